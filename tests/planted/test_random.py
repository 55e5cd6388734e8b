"""Jobs that random drawing found to be judged wrongly; ``python -m tests.benchmarks.planted_random`` draws more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perfscope.results.summary import Summary
from tests.analyzers.measured import advised
from tests.generator import (
    MS,
    TENSORBOARD,
    Evaluation,
    Job,
    JobSpec,
    LoaderSpec,
    Pause,
    SlowCompute,
    SlowHost,
    SlowLoader,
    simulate,
)
from tests.planted.draw import draw
from tests.planted.jobs import data_parallel, pipeline
from tests.planted.judge import judge

pytestmark = pytest.mark.scale

DDP = replace(data_parallel(8, "ddp"), ranks_per_host=8)
RACE = SlowCompute(ranks=(2, 5), factor=1.3)
FIRST, SECOND = (Pause(ranks=(rank,), steps=(11, 13), pause_ns=4 * MS) for rank in (2, 5))


def analyzed(spec: JobSpec, folder: Path) -> tuple[Job, Summary]:
    job = simulate(spec)
    job.write(folder, file_template=TENSORBOARD)
    return job, advised(folder)


@pytest.mark.parametrize(("causes", "cause"), [((RACE,), "compute"), ((FIRST, SECOND), "host")])
def test_ranks_that_are_slow_alike_are_one_straggler(
    causes: tuple[SlowCompute | Pause, ...], cause: str, tmp_path: Path
) -> None:
    # Cured one by one neither saves anything.
    job, summary = analyzed(replace(DDP, causes=causes), tmp_path)
    (row,) = summary.stragglers
    assert (row.scope, row.ranks, row.cause) == ("ranks", (2, 5), cause)
    assert row.lost_us == pytest.approx(job.lost_ns(*causes) / 1e3, rel=0.05)
    (finding,) = (finding for finding in summary.findings if finding.rule == "straggling-rank")
    assert finding.title.startswith("Ranks 2, 5 are stragglers (")
    assert "waiting for them " in finding.title


@pytest.mark.parametrize(
    ("causes", "expected"),
    [
        ((SlowCompute(ranks=(2,), factor=1.6), Pause(ranks=(5,), pause_ns=2 * MS)), ("compute", "host")),
        ((SlowCompute(ranks=(2,), factor=1.6), SlowHost(ranks=(5,), factor=20)), ("compute", "launch")),
        ((SlowCompute(ranks=(2,), factor=1.6), SlowLoader(ranks=(5,), load_ns=14 * MS)), ("compute", "dataloader")),
    ],
)
def test_ranks_that_are_slow_by_different_causes_do_not_hide_each_other(
    causes: tuple[SlowCompute | Pause | SlowHost | SlowLoader, ...], expected: tuple[str, ...], tmp_path: Path
) -> None:
    job, summary = analyzed(replace(DDP, causes=causes), tmp_path)
    alone, together = [job.lost_ns(cause) / 1e3 for cause in causes], job.lost_ns(*causes) / 1e3
    assert together > 1.9 * sum(alone)
    (row,) = summary.stragglers
    assert (row.scope, row.ranks, row.causes) == ("ranks", (2, 5), expected)
    assert row.lost_us == pytest.approx(together, rel=0.05)
    assert row.alone_us == pytest.approx(alone, abs=0.02 * summary.job.step_time_us)
    assert sum(row.adds_us) == pytest.approx(row.lost_us)
    (finding,) = (finding for finding in summary.findings if finding.rule == "straggling-rank")
    assert finding.whatif == {"rank.2": "peers", "rank.5": "peers"}
    assert all(f"rank {rank}" in finding.action.how.lower() for rank in row.ranks)


def test_ranks_that_pause_in_different_steps_hide_nobody(tmp_path: Path) -> None:
    causes = tuple(Pause(ranks=(rank,), steps=steps, pause_ns=8 * MS) for rank, steps in ((2, (11, 13)), (5, (12, 14))))
    job, summary = analyzed(replace(DDP, causes=causes), tmp_path)
    assert [row.ranks for row in summary.stragglers] in ([(2,), (5,)], [(5,), (2,)])
    for row in summary.stragglers:
        cause = next(cause for cause in causes if cause.ranks == row.ranks)
        assert row.lost_us == pytest.approx(job.lost_ns(cause) / 1e3, rel=0.05)


def test_half_of_all_ranks_may_be_a_slow_host(tmp_path: Path) -> None:
    # The median of all ranks lies half-way between the hosts, so that 6 % seem to be 3 %.
    slow = SlowCompute(ranks=(4, 5, 6, 7), factor=1.06)
    job, summary = analyzed(replace(data_parallel(8, "ddp"), causes=(slow,), noise=0.0), tmp_path)
    (row,) = summary.stragglers
    assert (row.scope, row.ranks, row.cause) == ("host", (4, 5, 6, 7), "compute")
    assert row.lost_us == pytest.approx(job.lost_ns(slow) / 1e3, rel=0.05)


def test_the_loss_makes_no_slow_stage_of_the_last_one(tmp_path: Path) -> None:
    # It multiplies as much as the others and computes the loss besides.
    spec = replace(pipeline(8), ranks=4, ranks_per_host=4, microbatches=4, steps=3, noise=0.0)
    _, summary = analyzed(replace(spec, model=replace(spec.model, layers=4, small_kernel_ns=60_000)), tmp_path)
    assert summary.stragglers == ()


def test_a_device_that_lags_behind_its_loader_gains_no_more_than_the_loader_allows(tmp_path: Path) -> None:
    # A batch every 6.5 ms goes unnoticed while rank 1 takes 7.7, and is what is left once it takes 6 as the others do.
    slow = SlowCompute(ranks=(1,), factor=1.3)
    ahead = data_parallel(4, "ddp")
    spec = replace(
        ahead, model=replace(ahead.model, tokens=4096), end_sync=False, noise=0.0, steps=12, warmup=1,
        loader=LoaderSpec(workers=1, load_ns=6_500_000), causes=(slow,),
    )  # fmt: skip
    job, summary = analyzed(spec, tmp_path)
    (row,) = summary.stragglers
    assert (row.rank, row.cause) == (1, "compute")
    assert row.lost_us == pytest.approx(job.lost_ns(slow) / 1e3, rel=0.01)


def test_hybrid_sharding_with_an_evaluation(tmp_path: Path) -> None:
    slow = SlowCompute(ranks=(3,), factor=1.3)
    hybrid = replace(data_parallel(8, "fsdp"), replicas=2, causes=(slow,))
    _, summary = analyzed(replace(hybrid, causes=(slow, Evaluation(steps=(13,)))), tmp_path)
    assert summary.job.steps == (10, 11, 12, 14, 15)
    (row,) = summary.stragglers
    assert (row.rank, row.cause) == (3, "compute")
    assert {group.ranks for group in summary.groups} >= {(0, 1, 2, 3), (4, 5, 6, 7), (0, 4), (3, 7)}
    # The evaluation's step is left out, so the loss is that of the steps without one. It is found only where the
    # reduction across replicas is known to wait for the reduce-scatter, which runs on another stream.
    assert row.lost_us == pytest.approx(simulate(hybrid).lost_ns(slow) / 1e3, rel=0.12)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(1206, id="pauses while workers deliver at their own pace anyway"),
        pytest.param(2002, id="pauses in turn beside a slow rank"),
        pytest.param(9113, id="all hosts are slow, and those of one stage launch while it waits"),
        pytest.param(2601, id="one device alone notices that all loaders are slow"),
        pytest.param(62056, id="a loader that is slow behind a rank that computes slowly"),
        pytest.param(62040, id="stages on a host each, which nothing but batched sends and receives ties together"),
        pytest.param(19106, id="a rank that is slow on a slow host"),
        pytest.param(19073, id="all loaders are slow, and half of the ranks have batches ready"),
        pytest.param(19147, id="pauses, beside a slow batch and an evaluation in a step that is left out"),
        pytest.param(19307, id="pauses in turn behind synchronizations, beside a slow link"),
        pytest.param(63028, id="costs are those of the used steps, not of the one with an evaluation"),
    ],
)
def test_random_jobs_are_judged_right(seed: int) -> None:
    assert judge(draw(seed)).wrong == ()
