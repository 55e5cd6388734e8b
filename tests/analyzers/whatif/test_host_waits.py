"""Jobs whose hosts wait for their devices, by hand, with the hosts not waiting any more."""

from __future__ import annotations

import pytest

from perfscope.analyzers.job.aligned import align_job
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.replay.engine import replay
from perfscope.analyzers.replay.schedules import record_schedules
from perfscope.analyzers.whatif.schedules.recorded import editable_schedules
from tests.analyzers.job.collectives.matching_jobs import STEP, Rank

US = 1_000


def synchronizing(*, reduces: bool) -> Rank:
    """Steps of 1 ms: compute to 100 µs, then an all-reduce or more compute to 400; the host waits until that has ended,
    and then launches what computes from 410 to 990.
    """
    rank = Rank(0, 2, {"0": (0, 1)}, steps=3)
    for step in range(3):
        at = step * STEP
        rank.builder.launched("gemm", at + US, at + 2 * US, at + 100 * US)
        if reduces:
            rank.kernel("allreduce", "0", 100 * US, 400 * US, launch=3 * US, step=step)
        else:
            rank.builder.launched("gemm", at + 3 * US, at + 100 * US, at + 400 * US)
        rank.builder.call("cudaDeviceSynchronize", at + 5 * US, at + 402 * US)
        rank.builder.launched("gemm", at + 405 * US, at + 410 * US, at + 990 * US)
    return rank


@pytest.mark.parametrize("reduces", [True, False])
def test_what_a_host_waited_for_its_device_still_needs(reduces: bool) -> None:
    """The host runs ahead then, but what it waited for is behind the same all-reduce: 2 to 990 µs, less 10 idle."""
    ranks = {}
    for number in (0, 1):
        rank = synchronizing(reduces=reduces)
        rank.builder.rank = number
        ranks[number] = analyze_rank(rank.builder.build())
    result = align_job(ranks)
    recorded = record_schedules(result)
    schedules = editable_schedules(result, recorded, with_hosts=True)
    schedules.without_host_waits(0.0)
    steps_ns = recorded.steps_ns(replay(schedules.compiled()))
    assert steps_ns[1:] == pytest.approx(980 * US, abs=10 * US)
