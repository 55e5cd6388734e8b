"""A rank's forwards and backwards of micro-batches in a pipeline, where named ranges mark them."""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from perfscope.analyzers.rank.collectives.communication import device_communication
from perfscope.analyzers.rank.launches import DeviceWork
from perfscope.analyzers.rank.partial import BACKWARD, FORWARD, WEIGHTS, Passes
from perfscope.analyzers.rank.steps import Steps
from perfscope.recording.vocabulary import PIPELINE_PREFIX
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NONE, Category, Int64, Trace

_PHASES: Final = {
    "forward": FORWARD, "backward": BACKWARD, "backward_input": BACKWARD, "backward_weight": WEIGHTS,
    "F": FORWARD, "B": BACKWARD, "I": BACKWARD, "W": WEIGHTS,
    "Forward": FORWARD, "Backward": BACKWARD,
}  # fmt: skip

_MARKS: Final = (
    # PerfScope's; torch/distributed/pipelining/schedules.py, schedules with several stages per rank; its GPipe.
    re.compile(rf"{re.escape(PIPELINE_PREFIX)}(?P<phase>\w+)\|(?P<stage>\d+)\|(?P<number>\d+)"),
    re.compile(r"PP:(?P<stage>\d+)(?P<phase>[FBIW])(?P<number>\d+)"),
    re.compile(r"(?P<phase>Forward|Backward) (?P<number>\d+)"),
)
"""How passes are marked, the best description first. Only one is read, because they nest around the same work."""

_BEGINNINGS: Final = (PIPELINE_PREFIX, "PP:", "Forward ", "Backward ")


def find_passes(trace: Trace, work: DeviceWork, steps: Steps) -> Passes:
    """The passes that ranges of a known name mark; empty where there are none."""
    rows = trace.rows(Category.ANNOTATION, named=lambda name: name.startswith(_BEGINNINGS))
    marks = {name: trace.strings[name] for name in distinct(trace.name[rows]).tolist()}
    for pattern in _MARKS:
        matches = {name: match for name, text in marks.items() if (match := pattern.fullmatch(text)) is not None}
        matches = {name: match for name, match in matches.items() if match["phase"] in _PHASES}
        if matches:
            return _read(trace, work, steps, rows[np.isin(trace.name[rows], list(matches))], matches)
    return Passes.none()


def _read(trace: Trace, work: DeviceWork, steps: Steps, rows: Int64, by_name: dict[int, re.Match[str]]) -> Passes:
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    matches = [by_name[name] for name in trace.name[rows].tolist()]
    marks = [
        (_PHASES[match["phase"]], int(match.groupdict().get("stage", NONE)), int(match["number"])) for match in matches
    ]
    start, end = trace.start_ns[rows], trace.ends_ns(rows)
    phase, stage, number = np.array(marks, dtype=np.int64).T
    step = steps.of_host_time(start)
    if len(work) == 0:
        return Passes(phase, stage, number, step, start, end)
    begun, done = _on_device(trace, work, start, end)
    return Passes(*(column[done > begun] for column in (phase, stage, number, step, begun, done)))


def _on_device(trace: Trace, work: DeviceWork, start: Int64, end: Int64) -> tuple[Int64, Int64]:
    """(first start, last end) of the kernels launched during each range, by any thread: autograd's launches backwards.

    For a range without kernels, the end is before the start.
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
