"""What host synchronizations cost, against a simulated host and device: run with them, and once more without."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from perfscope.analyzers.rank import idle
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.rank.sync_delays import sync_delays
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import Category
from tests.traces import TraceBuilder

SYNC = "cudaStreamSynchronize"
LATENCY = 3


@dataclass(frozen=True)
class Act:
    """The host spends ``host`` ns in an operator and then launches a kernel of ``device`` ns, or synchronizes."""

    host: int
    device: int = 0
    sync: bool = False


def simulated(acts: list[Act], *, syncs: bool) -> tuple[TraceBuilder, int]:
    """(the trace, the time from the first kernel's start to the last one's end); without ``syncs`` they are skipped."""
    builder = TraceBuilder().step(1, 0, 10**6)
    now, done, first = 10, 0, None
    for act in acts:
        if act.sync:
            if syncs:
                begin, now = now, max(now, done) + 2
                builder.call(SYNC, begin, now)
            continue
        builder.op("aten::mm", now, now + act.host + 1)
        now += act.host
        start = max(done, now + LATENCY)
        first = start if first is None else first
        done = start + act.device
        builder.launched("gemm", now, start, done)
        now += 1
    assert first is not None
    return builder, done - first


def categories(builder: TraceBuilder) -> dict[TimeCategory, int]:
    """From the first kernel's start to the last one's end."""
    trace = builder.build()
    kernels = trace.rows(Category.KERNEL)
    bounds = (np.array([time]) for time in (trace.start_ns[kernels].min(), trace.end_ns[kernels].max()))
    totals = analyze_rank(trace).timeline.totals(*bounds).sum(axis=0)
    return {category: int(totals[category]) for category in TimeCategory}


@pytest.mark.parametrize("seed", range(60))
def test_what_synchronizations_cost_is_what_a_run_without_them_saves(seed):
    draw = random.Random(seed)
    host, device = draw.choice([(20, 60), (40, 40), (60, 20)])
    acts = [Act(draw.randint(1, host), draw.randint(1, device))]
    for _ in range(draw.randint(20, 80)):
        if draw.random() < 0.1:
            host, device = draw.choice([(20, 60), (40, 40), (60, 20)])
        sync = draw.random() < 0.08
        acts.append(Act(0, sync=True) if sync else Act(draw.randint(1, host), draw.randint(1, device)))
    if acts[-1].sync:
        acts.append(Act(5, 5))
    with_syncs, slow = simulated(acts, syncs=True)
    found = categories(with_syncs)
    assert found[TimeCategory.SYNC] == slow - simulated(acts, syncs=False)[1]
    assert found[TimeCategory.DEPENDENCY] == found[TimeCategory.HOST] == found[TimeCategory.UNKNOWN] == 0


def test_a_job_that_is_launch_bound_anyway_stays_launch_bound():
    acts = [Act(50, 10), *[Act(50, 10), Act(50, 10), Act(0, sync=True)] * 10, Act(50, 10)]
    found = categories(simulated(acts, syncs=True)[0])
    # Each synchronization waits for the last kernel, launched 1 ns before: its latency, its 10 ns, and 2 ns to return.
    assert found[TimeCategory.SYNC] == 10 * (LATENCY - 1 + 10 + 2)
    assert found[TimeCategory.LAUNCH] > 10 * found[TimeCategory.SYNC] / 4


def test_a_synchronization_owns_the_starved_launches_until_the_queue_has_filled_again():
    """60 ns of launches in 30 kernels of 1 ns after a wait of 500, in a job whose device is busy on the whole."""
    acts = [Act(1, 600), Act(0, sync=True), *[Act(2, 1)] * 30, Act(2, 100)]
    found = categories(simulated(acts, syncs=True)[0])
    assert found[TimeCategory.SYNC] > 60
    assert found[TimeCategory.LAUNCH] == found[TimeCategory.HOST] == 0


def test_the_time_breakdown_and_the_table_ask_once_for_the_same_gaps(monkeypatch):
    asked = []

    def noted(trace, work, host, *gaps):
        asked.append((work, gaps))
        return sync_delays(trace, work, host, *gaps)

    monkeypatch.setattr(idle, "sync_delays", noted)
    builder, _ = simulated([Act(5, 40), Act(0, sync=True), Act(9, 30), Act(7, 20)], syncs=True)
    partial = analyze_rank(builder.build())
    assert partial.tables.syncs.calls == (SYNC,)
    works = {id(work) for work, _ in asked}
    assert len(asked) == len(works) == 2, "that of the rank, and that of its own progress"


def test_a_wait_delays_what_the_host_does_after_it_too():
    """The host waits 10 ms for a kernel, then pauses 3 ms: without the wait the pause would have been under the kernel.

    The pause is the host's in the time breakdown, where one has to look at; the wait costs both.
    """
    ms = 1_000_000
    builder = TraceBuilder().step(1, 0, 14 * ms)
    builder.op("aten::mm", 10, 21).launched("gemm", 20, 30, 10 * ms)
    builder.call(SYNC, 22, 10 * ms + 2)
    launched = 13 * ms
    builder.op("aten::mm", launched - 10, launched + 1).launched("gemm", launched, launched + 10, launched + ms)
    partial = analyze_rank(builder.build())
    (idle_ns,), (delayed_ns,) = partial.tables.syncs.idle_ns[:, 0], partial.tables.syncs.delayed_ns[:, 0]
    assert delayed_ns == launched + 10 - 10 * ms
    assert idle_ns < 0.1 * ms
