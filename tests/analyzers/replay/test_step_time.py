"""What the first recorded step becomes where a change is replayed, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from perfscope.analyzers.replay.step_time import _as_the_others


@pytest.mark.parametrize(
    ("recorded", "changed", "first"),
    [
        # Every other step pauses for 50, which the change makes up for; the first, without a pause, stays as it is.
        ((100, 150, 100, 150, 100), (80, 100, 100, 100, 100), 100),
        ((150, 100, 150, 100, 150), (80, 100, 100, 100, 100), 100),
        # None took as long as the first: as the others are.
        ((200, 100, 100, 100), (180, 50, 50, 50), 100),
        # Two steps count as they are replayed.
        ((100, 150), (80, 100), 80),
    ],
)
def test_the_first_step_changes_as_those_that_took_as_long(
    recorded: tuple[float, ...], changed: tuple[float, ...], first: float
) -> None:
    found = _as_the_others(np.array(changed, dtype=np.float64), np.array(recorded, dtype=np.float64))
    assert found.tolist() == pytest.approx([first, *changed[1:]])
