"""A rank's forwards and backwards of single micro-batches, where ranges mark them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.analyzers.collectives.communication import device_communication
from perfscope.analyzers.launches import DeviceWork
from perfscope.analyzers.steps import Steps
from perfscope.trace import NONE, Category, Int64, Trace
from perfscope.vocabulary import PIPELINE_PREFIX

FORWARD, BACKWARD, WEIGHTS = range(3)
"""Phases of a pass; ``WEIGHTS`` is the half of a backward that a schedule put off, ``BACKWARD`` then the other half."""

_PHASES: Final = {
    "forward": FORWARD, "backward": BACKWARD, "backward_input": BACKWARD, "backward_weight": WEIGHTS,
    "F": FORWARD, "B": BACKWARD, "I": BACKWARD, "W": WEIGHTS,
    "Forward": FORWARD, "Backward": BACKWARD,
}  # fmt: skip

_MARKS: Final = (
    # The collector's; torch/distributed/pipelining/schedules.py, schedules of several stages a rank; its GPipe.
    re.compile(rf"{re.escape(PIPELINE_PREFIX)}(?P<phase>\w+)\|(?P<stage>\d+)\|(?P<number>\d+)"),
    re.compile(r"PP:(?P<stage>\d+)(?P<phase>[FBIW])(?P<number>\d+)"),
    re.compile(r"(?P<phase>Forward|Backward) (?P<number>\d+)"),
)
"""How passes are marked, the best description first; only one of them is read, as they nest around the same work."""

_BEGINNINGS: Final = (PIPELINE_PREFIX, "PP:", "Forward ", "Backward ")


@dataclass(frozen=True, eq=False)
class Passes:
    """Passes of one rank in order of their ranges: parallel arrays.

    ``stage`` is the model's part as its schedule numbers it, several a rank where stages are interleaved (NONE: not
    said); ``step`` the index of the step in whose host window the range begins (-1: outside all). Times are ns on the
    rank's own clock: from the start of the first kernel launched inside to the end of the last, communication left
    out; on a rank without device work those of the range, which may hold a wait for its input.
    """

    phase: Int64
    stage: Int64
    microbatch: Int64
    step: Int64
    start_ns: Int64
    end_ns: Int64

    def __len__(self) -> int:
        return len(self.phase)

    @classmethod
    def none(cls) -> Passes:
        """No pass at all."""
        return cls(*(np.empty(0, dtype=np.int64) for _ in range(6)))


def find_passes(trace: Trace, work: DeviceWork, steps: Steps) -> Passes:
    """The passes that ranges of a known name mark; none where nothing does."""
    rows = np.flatnonzero(
        trace.names_where(lambda name: name.startswith(_BEGINNINGS)) & (trace.category == Category.ANNOTATION)
    )
    marks = {name: trace.strings[name] for name in np.unique(trace.name[rows]).tolist()}
    for pattern in _MARKS:
        told = {name: match for name, text in marks.items() if (match := pattern.fullmatch(text)) is not None}
        told = {name: match for name, match in told.items() if match["phase"] in _PHASES}
        if told:
            return _read(trace, work, steps, rows[np.isin(trace.name[rows], list(told))], told)
    return Passes.none()


def _read(trace: Trace, work: DeviceWork, steps: Steps, rows: Int64, told: dict[int, re.Match[str]]) -> Passes:
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    matches = [told[name] for name in trace.name[rows].tolist()]
    stage = [int(match.groupdict().get("stage", NONE)) for match in matches]
    start, end = trace.start_ns[rows], trace.end_ns[rows]
    step = steps.of_host_time(start)
    phase = np.array([_PHASES[match["phase"]] for match in matches], dtype=np.int64)
    number = np.array([int(match["number"]) for match in matches], dtype=np.int64)
    if len(work) == 0:
        return Passes(phase, np.array(stage, dtype=np.int64), number, step, start, end)
    begun, done = _on_device(trace, work, start, end)
    kept = done > begun
    return Passes(
        phase[kept], np.array(stage, dtype=np.int64)[kept], number[kept], step[kept], begun[kept], done[kept]
    )  # fmt: skip


def _on_device(trace: Trace, work: DeviceWork, start: Int64, end: Int64) -> tuple[Int64, Int64]:
    """(first start, last end) of the kernels launched during each range, whatever thread launched them: backwards are
    launched by autograd's. A range without any ends before it begins.
    """
    is_kernel = (trace.category[work.row] == Category.KERNEL) & (work.launch != NONE)
    chosen = np.flatnonzero(is_kernel & ~device_communication(trace, work))
    launched = trace.start_ns[work.launch[chosen]]
    place = np.searchsorted(start, launched, side="right") - 1
    inside = (place >= 0) & (launched < end[np.maximum(place, 0)])
    place, chosen = place[inside], chosen[inside]
    begun = np.full(len(start), np.iinfo(np.int64).max, dtype=np.int64)
    done = np.full(len(start), np.iinfo(np.int64).min, dtype=np.int64)
    np.minimum.at(begun, place, work.start_ns[chosen])
    np.maximum.at(done, place, work.end_ns[chosen])
    return begun, done
