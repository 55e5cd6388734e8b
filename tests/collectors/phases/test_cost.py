"""What timing a phase takes: the difference between a call with and one without, on a clock that the calls move."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat

import pytest

from perfscope.collectors.phases import cost as module
from perfscope.collectors.phases.cost import longer_ns, phase_ns, wait_ns
from perfscope.collectors.problems import Problems
from tests.collectors.harness import needs_torch


class Clock:
    """Stands still until a call moves it."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def moves(self, ns: Iterator[int]) -> object:
        def call(_: object) -> None:
            self.now += next(ns)

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "perf_counter_ns", clock)
    return clock


def test_the_difference_by_hand(clock: Clock) -> None:
    """1,700 ns with and 300 without; a call that another process interrupts for a millisecond changes nothing."""
    timed = clock.moves(chain([1_000_000, 1_700, 1_000_000], repeat(1_700)))
    assert longer_ns(timed, clock.moves(repeat(300))) == 1400


def test_what_cannot_be_is_nothing(clock: Clock) -> None:
    assert longer_ns(clock.moves(repeat(300)), clock.moves(repeat(400))) == 0


@needs_torch
def test_phases_and_waits_take_something() -> None:
    assert phase_ns(Problems()) > 0
    assert wait_ns() > 0
