"""What it takes to time a phase or a wait: measured once in every process, for what recording costs its steps."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, Final

from perfscope.collectors.phases.clock import PhaseClock
from perfscope.collectors.phases.phases import BACKWARD, StepPhases
from perfscope.collectors.phases.waits import RankWaits
from perfscope.collectors.problems import Problems

_ROUNDS: Final = 15
_OTHER_BYTES: Final = 1 << 19

Call = Callable[..., Any]


def phase_ns(problems: Problems) -> int:
    """What timing one phase takes. What fails in it is one of ``problems``: it will fail in the training too."""
    phases = StepPhases(problems)
    phases.attach(PhaseClock(), (BACKWARD,))
    return longer_ns(phases.timed_backward(_nothing), _nothing)


def wait_ns() -> int:
    """What timing one wait takes."""
    return longer_ns(RankWaits(PhaseClock()).timed(_nothing, _nothing.__name__), _nothing)


def longer_ns(timed: Call, bare: Call) -> int:
    """How much longer a call of ``timed`` takes than one of ``bare``, ns: the difference of their medians.

    As in a training, other work has the core's caches between two calls: in a loop of nothing else the same calls
    take a fraction of the time.
    """
    other = bytes(_OTHER_BYTES)
    took: dict[Call, list[int]] = {timed: [], bare: []}
    for _ in range(_ROUNDS):
        for call, samples in took.items():
            bytearray(other)
            began = perf_counter_ns()
            call(None)
            samples.append(perf_counter_ns() - began)
    return max(median_ns(took[timed]) - median_ns(took[bare]), 0)


def median_ns(samples: list[int]) -> int:
    """The upper median."""
    return sorted(samples)[len(samples) // 2]  # not by the statistics module: importing that takes ten times as long


def _nothing(_: Any) -> None:
    """What is timed."""
