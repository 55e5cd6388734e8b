"""What synchronizations cost in real recordings: the raw events simulated once more, every launch earlier by the time
that the host had been blocked before it."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from perfscope.analyzers import readers
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import NONE, Category, Trace

TRACES = Path(__file__).parents[4] / "shared" / "traces"
pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason="no folder of real traces beside the checkout")

LATENCY_NS = 8_000
"""A launch is on the device within this time."""
JUST_NS = 6_000
"""Work that starts within this time of another's end waited for it."""


def blocked(trace: Trace) -> list[tuple[int, int]]:
    """When the host waited for the device, apart from a wait for work of before the recording."""
    copies = {int(trace.correlation[row]): int(row) for row in trace.rows(Category.MEMCPY)}
    found = []
    for row in trace.rows(Category.RUNTIME).tolist():
        name, copy = trace.name_of(row), copies.get(int(trace.correlation[row]))
        pageable = copy is not None and "Pageable" in trace.name_of(copy)
        if "Synchronize" in name or (pageable and copy is not None and trace.start_ns[copy] < trace.end_ns[row]):
            found.append((int(trace.start_ns[row]), int(trace.end_ns[row])))
    return sorted(found)


def without(trace: Trace, blocks: list[tuple[int, int]]) -> tuple[int, int]:
    """(time from the first work's start to the last one's end as recorded, the same without the blocked time)."""
    rows = trace.rows(Category.KERNEL, Category.MEMCPY, Category.MEMSET)
    calls: dict[int, int] = {}
    for row in trace.rows(Category.RUNTIME).tolist():
        if trace.correlation[row] != NONE:
            calls.setdefault(int(trace.correlation[row]), int(trace.start_ns[row]))
    ends = sorted((int(trace.end_ns[row]), int(row)) for row in rows)
    times = np.array([end for end, _ in ends])
    launched = [calls.get(int(trace.correlation[row])) for row in rows]
    first = min(time for time in launched if time is not None)
    saved = [0, *itertools.accumulate(end - begin for begin, end in blocks if begin > first)]
    returns = np.array([end for begin, end in blocks if begin > first])
    begun: dict[int, int] = {}
    done: dict[int, int] = {}
    last: dict[int, int] = {}
    for row, launch in zip(rows.tolist(), launched, strict=True):
        start, stream = int(trace.start_ns[row]), int(trace.stream[row])
        before = int(np.searchsorted(times, start, side="right")) - 1
        ready = []
        just = before >= 0 and start - ends[before][0] <= JUST_NS
        if launch is not None:
            earlier = launch - saved[int(np.searchsorted(returns, launch, side="right"))]
            ready.append(earlier + min(start - launch, LATENCY_NS if just else start - launch))
        if stream in last:
            gap = max(start - int(trace.end_ns[last[stream]]), 0)
            ready.append(done[last[stream]] + (gap if launch is None and not just else min(gap, 2_000)))
        if just and ends[before][1] in done:
            ready.append(done[ends[before][1]] + start - ends[before][0])
        begun[row] = max(ready, default=start)
        done[row] = begun[row] + int(trace.duration_ns[row])
        last[stream] = row
    recorded = ends[-1][0] - int(trace.start_ns[rows[0]])
    return recorded, max(done.values()) - min(begun.values())


@pytest.mark.parametrize(
    ("name", "part", "least"),
    [
        ("nsys_h100_2gpu/report.sqlite", 0, 0.06),
        ("nsys_h100_2gpu/report.sqlite", 1, 0.08),
        ("resnet50_workers_4/worker0.pt.trace.json.gz", 0, 0.015),
        ("resnet50_workers_0/worker0.pt.trace.json.gz", 0, 0.008),
        ("a100_ddp_rank0of2/rank0.json.gz", 0, 0.0),
        ("quirks/cuda_event_sync.json.gz", 0, 0.1),
        ("h100_eager_single/trace.json.gz", 0, 0.0),
    ],
)
def test_the_simulation_of_a_recording_without_its_synchronizations_saves_what_is_charged_to_them(name, part, least):
    """Nothing else waits in these: one stream does all the work, or all but a little of it."""
    path = TRACES / name
    trace = readers.read(path, readers.parts(path)[part])
    recorded, unblocked = without(trace, blocked(trace))
    partial = analyze_rank(trace)
    work = trace.rows(Category.KERNEL, Category.MEMCPY, Category.MEMSET)
    begin = max(int(trace.start_ns[work[0]]), int(partial.timeline.start_ns[0]))
    window = int(trace.end_ns[work].max()) - begin
    (charged,) = partial.timeline.where(TimeCategory.SYNC).within(np.array([begin]), np.array([begin + window]))
    assert charged == pytest.approx(recorded - unblocked, abs=0.004 * window)
    assert charged >= least * window
