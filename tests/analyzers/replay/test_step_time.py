"""What the first and the last recorded step become where a change is replayed, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from perfscope.analyzers.replay.step_time import _as_the_others, _host_paced_ns, predicted_step_ns


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


@pytest.mark.parametrize(
    ("recorded", "changed", "last"),
    [
        # What goes on beside the next step, gathers say, is not seen in the last one.
        ((100, 100, 100, 100), (80, 80, 80, 40), 80),
        # None between took as long as the last one.
        ((100, 100, 100, 150), (80, 80, 80, 120), 120),
        ((100, 150, 100, 150), (100, 90, 80, 40), 90),
    ],
)
def test_the_last_step_changes_as_those_before_it_that_took_as_long(
    recorded: tuple[float, ...], changed: tuple[float, ...], last: float
) -> None:
    found = _as_the_others(np.array(changed, dtype=np.float64), np.array(recorded, dtype=np.float64))
    assert found[1:].tolist() == pytest.approx([*changed[1:-1], last])


@pytest.mark.parametrize(
    ("recorded_ns", "host_ns", "least_ns"),
    [
        # A host that the change makes slower.
        (100.0, 110.0, 110.0),
        # Ranks that begin 30 apart take that less in all three steps: what changes nothing makes them no longer.
        (90.0, 100.0, 90.0),
        (90.0, 110.0, 100.0),
        # No less for steps that took longer than their host.
        (120.0, 110.0, 110.0),
    ],
)
def test_a_host_limits_a_step_by_what_it_takes_more_than_before(
    recorded_ns: float, host_ns: float, least_ns: float
) -> None:
    """Three steps of a host and a device that took 100 from one to the next."""
    begin = np.array([[0, 1, 2]])

    def replayed(pace_ns: float) -> Any:
        marks = (begin[0] * pace_ns).astype(np.int64)
        return SimpleNamespace(host_mark_ns=marks, mark_ns=marks)

    recorded: Any = SimpleNamespace(begin=begin, used=np.ones(3, dtype=np.bool_), step_time_ns=lambda _: recorded_ns)
    steps_ns = np.full(3, recorded_ns)
    assert _host_paced_ns(recorded, replayed(host_ns), replayed(100.0), steps_ns, steps_ns) == pytest.approx(least_ns)


def test_a_host_that_pauses_before_the_last_step_is_no_slower_in_all_of_them() -> None:
    """Its pace is that of two steps of three, 130 on their mean with the pause; the job's steps are 30, 230 and 40."""
    begin = np.array([[0, 1, 2]])
    marks = np.array([0, 30, 260])
    replayed: Any = SimpleNamespace(host_mark_ns=marks, mark_ns=marks)
    recorded: Any = SimpleNamespace(begin=begin, used=np.ones(3, dtype=np.bool_), step_time_ns=lambda _: 100.0)
    steps_ns = np.array([30.0, 230.0, 40.0])
    assert _host_paced_ns(recorded, replayed, replayed, steps_ns, steps_ns) == pytest.approx(100.0)


def test_a_step_that_is_left_out_is_no_part_of_its_host_s_pace() -> None:
    """Steps of 100, an evaluation of 1000 between them. Of the steps the host can be spared 20: they then take 80."""
    begin, used = np.array([[0, 1, 2, 3]]), np.array([True, False, True, True])

    def replayed(step: int) -> Any:
        marks = np.cumsum([0, step, 1000, step])
        return SimpleNamespace(host_mark_ns=marks, mark_ns=marks)

    recorded: Any = SimpleNamespace(begin=begin, used=used, step_time_ns=lambda _: 100.0)
    before, after = np.full(3, 100.0), np.full(3, 80.0)
    assert _host_paced_ns(recorded, replayed(80), replayed(100), after, before) == pytest.approx(80.0)


def test_a_long_wait_counts_no_more_where_the_first_step_is_left_out() -> None:
    """Workers held up some steps and do not with the change; one of five steps is odd for another reason. The first one
    takes what the others do that took as long, so the mean is of five steps, not of four.
    """
    steps = {"unchanged": np.array([100, 100, 100, 300, 100]), "changed": np.array([60, 90, 90, 290, 90])}
    recorded: Any = SimpleNamespace(used=np.ones(5, dtype=np.bool_), begin=np.zeros((1, 5), dtype=np.int64))
    recorded.steps_ns = lambda replayed, _=None: steps[replayed.name]
    recorded.step_time_ns = lambda replayed: steps[replayed.name].mean()
    nothing = np.zeros(1, dtype=np.int64)
    replays: Any = {name: SimpleNamespace(name=name, host_mark_ns=nothing, mark_ns=nothing) for name in steps}
    found = predicted_step_ns(
        recorded, replays["changed"], replays["unchanged"], settling=1, steps_alike=True, lifted=True, floors_ns=()
    )
    assert found == pytest.approx((4 * 90 + 290) / 5)
