"""The clock of phases: each phase its own time, whatever runs inside what."""

from __future__ import annotations

import pytest

from perfscope.collectors.phases import clock as module
from perfscope.collectors.phases.clock import PhaseClock
from perfscope.recording.history import STAGES

DATALOADER, FORWARD, BACKWARD, OPTIMIZER = map(STAGES.index, ("dataloader", "forward", "backward", "optimizer"))


class Time:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(module, "perf_counter_ns", time)
    return time


def taken(clock: PhaseClock) -> dict[str, int]:
    return {name: ns for name, ns in zip(STAGES, clock.take()[0], strict=True) if ns}


def test_a_phase_does_not_count_what_runs_inside_it(time: Time) -> None:
    """The optimizer calls a closure: 5 of its own, 3 forward, of which 1 is loading, 4 backward, 2 of its own."""
    clock = PhaseClock()
    clock.begin(OPTIMIZER)
    time.now += 5
    clock.begin(FORWARD)
    time.now += 1
    clock.begin(DATALOADER)
    time.now += 1
    clock.end(DATALOADER)
    time.now += 1
    clock.end(FORWARD)
    clock.begin(BACKWARD)
    time.now += 4
    clock.end(BACKWARD)
    time.now += 2
    clock.end(OPTIMIZER)
    assert taken(clock) == {"dataloader": 1, "forward": 2, "backward": 4, "optimizer": 7}
    assert taken(clock) == {}


def test_a_phase_within_itself_counts_once(time: Time) -> None:
    clock = PhaseClock()
    for _ in range(3):
        clock.begin(FORWARD)
        time.now += 1
    for _ in range(3):
        clock.end(FORWARD)
        time.now += 1
    assert taken(clock) == {"forward": 5}


def test_what_an_exception_went_through_ends_with_what_it_was_in(time: Time) -> None:
    clock = PhaseClock()
    clock.begin(OPTIMIZER)
    clock.begin(FORWARD)
    time.now += 3
    clock.end(OPTIMIZER)  # the forward raised, and the optimizer's step with it
    clock.end(FORWARD)  # nothing is open
    time.now += 9
    clock.begin(BACKWARD)
    time.now += 1
    clock.end(BACKWARD)
    assert taken(clock) == {"forward": 3, "backward": 1}


def test_a_step_that_ends_within_a_phase_leaves_nothing_of_it_to_the_next(time: Time) -> None:
    clock = PhaseClock()
    clock.begin(BACKWARD)
    time.now += 3
    assert taken(clock) == {}
    time.now += 2
    clock.end(BACKWARD)
    assert taken(clock) == {}
