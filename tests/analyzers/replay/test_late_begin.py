"""A rank that begins the recording late: that is its own doing as far as the recording shows what delays it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from perfscope.analyzers.replay.pace import came_later_ns
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
