"""Pipeline stages that take longer for the same work, against one that only waits for its data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perfscope.analyzers.replay.stragglers.work_pace import WorkPace
from perfscope.results.categories import TimeCategory
from tests.analyzers.measured import advised, measured
from tests.emulator import MS, Cause, Job, Loader, Model, Recording, emulate, step_ns

JOB = Job(
    strategy="pipeline", ranks=2, ranks_per_host=2, stages=2, microbatches=2, noise=0.03,
    model=Model(blocks=4, tokens=32768, width=512), loader=Loader(workers=1, load_ns=10 * MS),
    recording=Recording(steps=6),
)  # fmt: skip


def test_a_stage_that_waits_for_data_has_no_slow_kernels(tmp_path: Path) -> None:
    """Kernels of both stages differ by their noise alone; rank 1 loads a batch for longer than a step takes."""
    healthy_ns = step_ns(JOB)
    late = Cause("slow loader", 1.2 * healthy_ns / JOB.loader.load_ns, ranks=(1,))
    emulate(replace(JOB, causes=(late,))).write(tmp_path)
    summary = advised(tmp_path)
    assert not summary.stragglers
    assert summary.findings[0].rule == "dataloader-workers"


def test_slow_kernels_of_a_stage_cost_nothing_while_its_batches_come_later(tmp_path: Path) -> None:
    """Rank 1 computes for longer too, but waits for its batches until after that."""
    healthy_ns = step_ns(JOB)
    late = Cause("slow loader", 1.6 * healthy_ns / JOB.loader.load_ns, ranks=(1,))
    slow = Cause("slow compute", 1.2, ranks=(1,))
    both = emulate(replace(JOB, causes=(late, slow)))
    assert step_ns(replace(JOB, causes=(late,))) > 0.99 * both.step_ns
    both.write(tmp_path)
    assert "compute" not in {row.cause for row in measured(tmp_path).stragglers}


def test_a_stage_with_slow_kernels_costs_what_it_takes_longer(tmp_path: Path) -> None:
    job = replace(JOB, causes=(Cause("slow compute", 1.3, ranks=(1,)),))
    emulation = emulate(job)
    emulation.write(tmp_path)
    (found,) = measured(tmp_path).stragglers
    assert (found.ranks, found.cause) == ((1,), "compute")
    saved_us = (emulation.step_ns - step_ns(JOB)) / 1e3
    assert abs(found.lost_us - saved_us) < 0.03 * emulation.step_ns / 1e3


def test_a_stage_whose_host_pauses_costs_what_is_not_hidden_in_its_waits(tmp_path: Path) -> None:
    """The pause is at one place of the step, before anything is sent; shared out over the step it would cost half."""
    job = Job(
        strategy="pipeline", ranks=4, ranks_per_host=4, stages=4, microbatches=4, noise=0.03, item_every=1,
        model=Model(blocks=8, tokens=32768, width=512), recording=Recording(steps=5),
    )  # fmt: skip
    healthy_ns = step_ns(job)
    emulation = emulate(replace(job, causes=(Cause("pause", 0.4 * healthy_ns, (0,), how="log"),)))
    emulation.write(tmp_path)
    (found,) = measured(tmp_path).stragglers
    assert (found.ranks, found.cause) == ((0,), "host")
    saved_us = (emulation.step_ns - healthy_ns) / 1e3
    assert abs(found.lost_us - saved_us) < 0.05 * emulation.step_ns / 1e3


def pace(**kernels: tuple[float, float]) -> WorkPace:
    """A stage that computes all the time, in kernels of these counts and total times."""
    rows = np.zeros(len(TimeCategory))
    rows[TimeCategory.COMPUTE] = sum(total for _, total in kernels.values())
    return WorkPace(rows, kernels, {}, 0.0)


def over(stage: WorkPace, other: WorkPace) -> float:
    """What ``stage`` computes for longer than at the pace of ``other``."""
    return float(stage.excess([other])[0])


def test_the_kernel_of_the_loss_is_not_a_slow_one_of_the_layers() -> None:
    """The last stage has one more matrix product, of 300, in the kernel that takes 10 for each of ten others."""
    middle, last = pace(gemm=(10, 100), norm=(10, 50)), pace(gemm=(11, 400), norm=(10, 50))
    assert last.launches_like(middle)
    assert over(last, middle) == pytest.approx(0)


def test_a_slow_last_stage_is_as_slow_as_its_kernels_that_run_as_often() -> None:
    """All 450 take twice as long there."""
    middle, last = pace(gemm=(10, 100), norm=(10, 50)), pace(gemm=(11, 800), norm=(10, 100))
    assert over(last, middle) == pytest.approx(450)


def test_kernels_that_run_as_often_are_compared_one_by_one() -> None:
    middle, last = pace(gemm=(10, 100), norm=(10, 50)), pace(gemm=(10, 130), norm=(10, 50))
    assert over(last, middle) == pytest.approx(30)
