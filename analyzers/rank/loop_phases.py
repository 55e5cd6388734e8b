"""Where in the training loop a host pauses: in the forward, the backward or the optimizer's step, or between them."""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from perfscope.analyzers.rank.intervals import Intervals
from perfscope.recording.vocabulary import BACKWARD as BACKWARD_RANGE
from perfscope.recording.vocabulary import FORWARD as FORWARD_RANGE
from perfscope.recording.vocabulary import OPTIMIZER
from perfscope.trace.trace import NEVER, Category, Int64, Trace

IN_FORWARD: Final = "the forward"
IN_BACKWARD: Final = "the backward"
IN_OPTIMIZER: Final = "the optimizer's step"
"""Host work: Python between the operators of that phase, where no function is known."""

DDP_FORWARD: Final = "DistributedDataParallel.forward"
"""Name of the range that torch records around a forward pass of a DDP module."""

OPTIMIZER_RANGE: Final = re.compile(rf"^Optimizer\.step#|^{re.escape(OPTIMIZER)}$")
"""Ranges around an optimizer's step: torch's own, and the recorder's."""

AUTOGRAD: Final = re.compile("autograd::engine::evaluate_function")
"""Ranges that autograd's engine records around each of its functions, with their hooks."""

_RANGES: Final = {
    IN_FORWARD: re.compile(rf"^(?:{re.escape(FORWARD_RANGE)}|{DDP_FORWARD}|FullyShardedDataParallel\.forward)$"),
    IN_BACKWARD: re.compile(rf"^{re.escape(BACKWARD_RANGE)}$"),
    IN_OPTIMIZER: OPTIMIZER_RANGE,
}
"""The phases, in the order in which a step has them."""

INSIDE: Final = tuple(_RANGES)
"""Names of the phases themselves."""

LOOP: Final = "the loop between "
"""What names of the time between two phases begin with."""

OF_GRADIENTS: Final = f"{LOOP}backward and optimizer"
"""Where gradients are clipped, scaled, reduced and looked at."""

OF_BATCH: Final = "the preparation of the batch"
"""Between the arrival of a batch and the forward: augmentation, for example."""

BEFORE_BACKWARD: Final = "between forward and backward"
BETWEEN_BATCHES: Final = "between backward and forward"
BEFORE_OPTIMIZER: Final = "between backward and optimizer"
"""Stretches of a step beside :data:`IN_FORWARD`, in which the training loop may call collectives for itself."""

STRETCHES: Final = (IN_FORWARD, BEFORE_BACKWARD, BETWEEN_BATCHES, BEFORE_OPTIMIZER)
"""Names of what ``stretches`` finds."""

ELSEWHERE: Final = "the rest of the step"
"""What lies in no phase, and between no two that are known."""

_AROUND: Final = " or the loop around it"

_SHORT: Final = ("forward", "backward", "optimizer")
"""The same inside the name of what lies between two of them."""


def is_phase(name: str) -> bool:
    """Is that a name of one of the phases, or of what lies between or around them?"""
    return name in (*INSIDE, OF_BATCH, ELSEWHERE) or name.startswith(LOOP) or name.endswith(_AROUND)


def by_phase(trace: Trace, pauses: Intervals, threads: Int64) -> dict[str, Intervals]:
    """The pauses in each phase and in the loop between two phases, by name; empty where no range marks a phase.

    A pause in a forward that a backward or an optimizer's step calls is the forward's. What lies between two phases
    is only named where it is known which: without ranges of the backward, the stretch from a forward to the optimizer
    is "the backward or the loop around it".
    """
    return _by_phase(pauses, {name: _ranges(trace, pattern, threads) for name, pattern in _RANGES.items()})


def _by_phase(pauses: Intervals, phases: dict[str, Intervals]) -> dict[str, Intervals]:
    inside: dict[str, Intervals] = {}
    taken = Intervals.empty()
    for name, ranges in phases.items():
        inside[name] = pauses.intersect(ranges).subtract(taken)
        taken = taken.union(ranges)
    rest = pauses.subtract(taken)
    outside = {name: rest.intersect(gaps) for name, gaps in _gaps(list(phases.values())).items()}
    return {name: part for name, part in (inside | outside).items() if len(part)}


def split(trace: Trace, stretch: Intervals, threads: Int64) -> dict[str, Intervals]:
    """All of ``stretch`` by the names of ``by_phase``, and what has none as :data:`ELSEWHERE`. Where no range marks
    backwards, each lasts from autograd's first function to its last.
    """
    forward, backward, optimizer = _phases(trace, threads)
    found = _by_phase(stretch, dict(zip(_RANGES, (forward, backward, optimizer), strict=True)))
    rest = stretch.subtract(Intervals.empty().union(*found.values()))
    return found | ({ELSEWHERE: rest} if len(rest) else {})


def outside_the_model(trace: Trace, threads: Int64) -> dict[str, Intervals]:
    """The time of the optimizer's step and of the loop between two phases, by the names of ``by_phase``. Where no range
    marks backwards, each lasts from autograd's first function to its last.
    """
    forward, backward, optimizer = _phases(trace, threads)
    gaps = _gaps([forward, backward, optimizer])
    found = {IN_OPTIMIZER: optimizer.subtract(forward.union(backward))}
    found |= {name: part for name, part in gaps.items() if name.startswith((LOOP, IN_OPTIMIZER))}
    return {name: part for name, part in found.items() if len(part)}


def stretches(trace: Trace, threads: Int64) -> dict[str, Intervals]:
    """The forwards, and the stretches between a forward and its backward, between a backward and the next micro-batch's
    forward without a step of the optimizer in between, and between a backward and the optimizer's step. Such a step may
    enclose the forward and the backward, as where it calls a closure. Where no range marks backwards, each lasts from
    autograd's first function to its last.
    """
    forward, backward, optimizer = _phases(trace, threads)
    forward = forward.subtract(backward)  # one that runs again
    start = np.concatenate((forward.start_ns, backward.start_ns, [-NEVER]))
    end = np.concatenate((forward.end_ns, backward.end_ns, [-NEVER]))
    is_backward = np.arange(len(start)) >= len(forward)
    order = np.argsort(start, kind="stable")
    start, end, is_backward = start[order], np.maximum.accumulate(end[order]), is_backward[order]
    begin, until, after, last = end[:-1], start[1:], is_backward[:-1], np.arange(1, len(start)) == len(start) - 1
    edges = np.sort(np.concatenate((optimizer.start_ns, optimizer.end_ns)))
    first = np.searchsorted(edges, begin)
    stepped = first < np.searchsorted(edges, until)
    steps_ns = np.append(edges, -NEVER)[first]
    begins = stepped & np.isin(steps_ns, optimizer.start_ns)
    apart = (until > begin) & ~last
    before = apart & ~after & is_backward[1:] & ~stepped
    batches = apart & after & ~is_backward[1:] & ~stepped & (len(edges) > 0)
    return {
        IN_FORWARD: forward,
        BEFORE_BACKWARD: Intervals.of(begin[before], until[before]),
        BETWEEN_BATCHES: Intervals.of(begin[batches], until[batches]),
        BEFORE_OPTIMIZER: Intervals.of(begin[after & begins], steps_ns[after & begins]),
    }


def _phases(trace: Trace, threads: Int64) -> tuple[Intervals, Intervals, Intervals]:
    """Forwards, backwards and steps of the optimizer."""
    forward, backward, optimizer = (_ranges(trace, pattern, threads) for pattern in _RANGES.values())
    backward = backward if len(backward) else _backwards(trace, threads, forward.union(optimizer))
    return forward, backward, optimizer


def _backwards(trace: Trace, threads: Int64, others: Intervals) -> Intervals:
    """From the first to the last function of autograd between each two of the other phases."""
    rows = trace.rows(Category.CPU_OP, named=AUTOGRAD.match, threads=threads)
    start, end = trace.start_ns[rows], np.maximum.accumulate(trace.ends_ns(rows))
    gap = np.searchsorted(others.start_ns, start, side="right")
    first = np.flatnonzero(np.diff(gap, prepend=-1))
    return Intervals.of(start[first], end[np.append(first[1:], len(rows))[: len(first)] - 1])


def _ranges(trace: Trace, pattern: re.Pattern[str], threads: Int64) -> Intervals:
    rows = trace.rows(Category.ANNOTATION, Category.CPU_OP, named=pattern.match, threads=threads)
    return Intervals.of_rows(trace, rows)


def _gaps(phases: list[Intervals]) -> dict[str, Intervals]:
    """The time between each two phases that follow on each other, by its name."""
    kind = np.repeat(np.arange(len(phases)), [len(ranges) for ranges in phases])
    start = np.concatenate([ranges.start_ns for ranges in phases])
    end = np.concatenate([ranges.end_ns for ranges in phases])
    order = np.argsort(start, kind="stable")
    kind, start, end = kind[order], start[order], end[order]
    missing = [place for place, ranges in enumerate(phases) if len(ranges) == 0]
    until = np.maximum.accumulate(end)[:-1] if len(end) else end
    apart = np.flatnonzero(start[1:] > until)  # one that lies in another is no neighbour
    gaps: dict[str, Intervals] = {}
    for before, after in {(int(kind[place]), int(kind[place + 1])) for place in apart}:
        name = _between(before, after, missing)
        if name:
            here = apart[(kind[apart] == before) & (kind[apart + 1] == after)]
            gaps[name] = gaps.get(name, Intervals.empty()).union(Intervals.of(until[here], start[here + 1]))
    return gaps


def _between(before: int, after: int, missing: list[int]) -> str:
    """What lies between two phases, in words; empty where most of the loop may."""
    if before == after:
        return "" if missing else f"{LOOP}two {_SHORT[before]}s".replace("optimizers", "optimizers' steps")
    skipped = (before + 1) % len(_SHORT)
    if skipped != after and skipped in missing:
        return f"{list(_RANGES)[skipped]}{_AROUND}"
    return f"{LOOP}{_SHORT[before]} and {_SHORT[after]}" if len(missing) < 2 else ""
