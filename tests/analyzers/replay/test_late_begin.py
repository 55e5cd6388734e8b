"""A rank that begins the recording late: that is its own doing as far as the recording shows what delays it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from perfscope.analyzers.job.aligned import align_job
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.replay.engine import replay
from perfscope.analyzers.replay.pace import came_later_ns
from perfscope.analyzers.replay.schedules import record_schedules
from perfscope.analyzers.replay.stragglers.causes import Causes
from perfscope.analyzers.replay.stragglers.paced import PacedReplays
from perfscope.trace.trace import Category
from tests.analyzers.job.collectives.matching_jobs import Rank
from tests.analyzers.measured import measured
from tests.emulator import MS, Cause, Job, Loader, Model, Recording, emulate, step_ns


@pytest.mark.parametrize(
    ("later", "lead", "ours"),
    [
        ([7, 0, 0], 0, 0),  # the profiler started later
        ([7, 0, 9], 0, 7),  # it ends as late as it began
        ([7, 5, 0], 0, 5),
        ([7, 0, 0], 6, 6),  # its first launch came that much later
        ([-3, 5, 5], 5, 0),
    ],
)
def test_how_much_of_a_late_begin_is_a_rank_s_own(later: list[int], lead: int, ours: int) -> None:
    assert came_later_ns(np.array(later), np.float64(lead)) == ours


@pytest.mark.parametrize(("every", "steps"), [(1, 1), (2, 2), (2, 4)])
def test_a_pause_at_the_end_of_steps(tmp_path: Path, every: int, steps: int) -> None:
    """The last recorded step pauses, and so did the one before the recording, for which the others wait at first."""
    pause = Cause("pause", 4 * MS, ranks=(1,), every=every, how="log")
    recording = Recording(steps=steps)
    job = Job(ranks=4, item_every=1, noise=0.0, model=Model(blocks=2), recording=recording, causes=(pause,))
    emulation = emulate(job)
    emulation.write(tmp_path)
    (worst, *_) = measured(tmp_path).stragglers
    assert (worst.ranks, worst.cause) == ((1,), "host")
    lost_ns = emulation.step_ns - step_ns(job.without(pause))
    assert worst.lost_us * 1e3 == pytest.approx(lost_ns, rel=0.05)


def test_a_batch_that_comes_late_to_the_first_step(tmp_path: Path) -> None:
    """The workers of rank 1 deliver two batches at a time: it waits before the first of two recorded steps only."""
    slow = Cause("slow loader", 4.0, ranks=(1,))
    loader = Loader(workers=2, load_ns=10 * MS, jitter=0.0)
    recording, model = Recording(steps=2), Model(blocks=2, tokens=8192)
    job = Job(ranks=2, noise=0.0, model=model, loader=loader, recording=recording, causes=(slow,))
    emulation = emulate(job)
    emulation.write(tmp_path)
    (worst, *_) = measured(tmp_path).stragglers
    assert (worst.ranks, worst.cause) == ((1,), "dataloader")
    lost_ns = emulation.step_ns - step_ns(job.without(slow))
    assert worst.lost_us * 1e3 == pytest.approx(lost_ns, rel=0.05)


def test_what_delays_only_the_first_launch_is_its_host() -> None:
    """Rank 1 pauses for 6 ms before it launches the first step; all hosts are far ahead from then on. Its copies take
    1 µs longer than its peers', which is no cause of that.
    """
    traces = []
    for number in range(4):
        rank = Rank(number, 4, {"0": (0, 1, 2, 3)}, steps=0)
        late = 6 * MS if number == 1 else 0
        copied = 11_000 if number == 1 else 10_000
        host, begin = 0, 105_000 + late
        for step in range(6):
            launch = host + late * (step == 0) + 100_000
            rank.builder.step(step, host, launch + 200_000)
            rank.builder.launched("Memcpy HtoD", launch, begin, begin + copied, category=Category.MEMCPY)
            rank.builder.launched("gemm", launch + 20_000, begin + copied, begin + 5 * MS)
            arrived = begin + 5 * MS
            end = max(arrived, (5 * (step + 1) + 6) * MS + 105_000 + step * 100_000) + 100_000
            rank.kernel("allreduce", "0", arrived, end, launch=launch + 40_000)
            host, begin = launch + 200_000, end
        traces.append(rank.builder.build())
    result = align_job({rank: analyze_rank(trace) for rank, trace in enumerate(traces)})
    recorded = record_schedules(result)
    paced = PacedReplays(result, recorded, replay(recorded.schedules), {})
    assert Causes(paced).of((1,)) == "host"
