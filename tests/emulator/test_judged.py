"""A few random emulated jobs whose causes and first advice the product gets right; the benchmark draws more."""

from __future__ import annotations

import pytest

from tests.emulator.draw import draw
from tests.emulator.judge import judge

pytestmark = pytest.mark.scale


@pytest.mark.parametrize("seed", [1001, 1003, 1008, 1009])
def test_who_is_named_and_what_is_advised(seed: int) -> None:
    """Healthy; a slow rank (three times), once with gradients that are reduced by hand as well."""
    judged = judge(draw(seed), predictions=False)
    assert judged.misses == []
    assert judged.sized == judged.due
