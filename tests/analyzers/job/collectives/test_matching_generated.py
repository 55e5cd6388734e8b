"""Collectives and clocks of generated jobs, against what the simulation knows of them."""

from __future__ import annotations

from collections import Counter
from functools import reduce
from pathlib import Path

import numpy as np
import pytest

from perfscope.analyzers import readers
from perfscope.analyzers.job.collectives.matched import MatchedCollectives
from perfscope.analyzers.job.collectives.matching import match
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.trace.clock import Clocks
from tests.generator import MS, Job, JobSpec, ModelSpec, PipelineSpec, simulate

pytestmark = pytest.mark.scale

SMALL = ModelSpec(layers=8, tokens=1024)


def stages(ranks: int = 8, **schedule: object) -> JobSpec:
    return JobSpec(
        ranks=ranks, strategy="pipeline", pipeline=4, microbatches=8, model=SMALL, schedule=PipelineSpec(**schedule)
    )


SPECS = {
    "ddp": JobSpec(ranks=8, model=SMALL),
    "fsdp": JobSpec(ranks=8, strategy="fsdp", model=SMALL),
    "zero3": JobSpec(ranks=8, strategy="zero3", model=SMALL),
    "tensor": JobSpec(ranks=8, tensor=4, model=SMALL),
    "1f1b": stages(),
    "gpipe": stages(schedule="gpipe"),
    "1f1b, described by operators": JobSpec(
        ranks=8, strategy="pipeline", pipeline=4, microbatches=8, model=SMALL, metadata="operator"
    ),
    "1f1b, no peers recorded": stages(peers=False),
    "three dimensions": JobSpec(
        ranks=16, tensor=2, strategy="pipeline", pipeline=4, microbatches=8, model=SMALL, groups="mesh"
    ),
}


def analyzed(job: Job, folder: Path, ranks: list[int] | None = None) -> dict[int, RankPartial]:
    job.write(folder, ranks=ranks)
    partials = [analyze_rank(readers.read(path)) for path in sorted(folder.iterdir())]
    return {int(partial.rank): partial for partial in partials if partial.rank is not None}


def matched(partials: dict[int, RankPartial]) -> tuple[MatchedCollectives, Clocks]:
    steps = reduce(np.intersect1d, [partial.steps.number for partial in partials.values()])
    found, clocks, mismatches = match(partials, steps)
    assert mismatches == ()
    return found, clocks


def counted(found: MatchedCollectives) -> Counter[tuple[str, int, tuple[int, ...]]]:
    """Complete instances by kind, bytes and ranks; messages by sender and receiver."""
    instances = found.instances
    kinds = Counter[tuple[str, int, tuple[int, ...]]]()
    for at in np.flatnonzero(instances.complete & ~instances.is_kind(("send_recv",))).tolist():
        ranks = tuple(found.rank[found.instance == at].tolist())
        kinds[instances.kinds[instances.kind[at]], int(instances.bytes[at]), ranks] += 1
    sent = found.messages
    for columns in zip(sent.source.tolist(), sent.destination.tolist(), sent.bytes.tolist(), strict=True):
        kinds["send_recv", columns[2], columns[:2]] += 1
    return kinds


KINDS = {
    "allreduce": "all_reduce",
    "_allgather_base": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "send_recv": "send_recv",
}


@pytest.mark.parametrize("name", SPECS)
def test_every_collective_of_every_group_is_found(name: str, tmp_path: Path) -> None:
    job = simulate(SPECS[name])
    found, clocks = matched(analyzed(job, tmp_path))
    expected = Counter[tuple[str, int, tuple[int, ...]]]()
    for truth in job.truth.collectives:
        expected[KINDS[truth.kind], truth.bytes, truth.ranks] += truth.count
    assert found.instances.inferred.any() == (name == "1f1b, no peers recorded")
    assert counted(found) == expected
    assert found.instances.complete.all()
    assert clocks.offset_ns.tolist() == [0] * job.spec.ranks


@pytest.mark.parametrize("schedule", [{"schedule": "1f1b"}, {"schedule": "interleaved", "chunks": 2}])
def test_messages_that_share_kernels_are_all_found(schedule: dict[str, object], tmp_path: Path) -> None:
    job = simulate(stages(coalesced=True, **schedule))
    found, _ = matched(analyzed(job, tmp_path))
    expected = Counter[tuple[int, ...]]()
    for truth in job.truth.collectives:
        if truth.kind == "send_recv":
            expected[truth.ranks] += truth.count
    assert Counter(zip(found.messages.source.tolist(), found.messages.destination.tolist(), strict=True)) == expected
    exchanges = found.instances.is_kind(("send_recv",))
    assert found.instances.complete.all()
    assert 2 <= found.instances.participants[exchanges].max() <= 4
    # No rank takes part in one exchange twice.
    assert len(np.unique(np.stack((found.instance, found.rank)), axis=1).T) == len(found)


def test_a_job_of_which_one_stage_is_recorded_is_bounded(tmp_path: Path) -> None:
    job = simulate(stages())
    found, _ = matched(analyzed(job, tmp_path, job.spec.ranks_of_stage(1)))
    instances = found.instances
    exchanges = instances.is_kind(("send_recv",))
    assert not instances.complete[exchanges].any()
    assert instances.complete[~exchanges].all()  # data parallel groups lie within the stage
    assert (found.waited_for[exchanges[found.instance]] == -1).all()


@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
def test_offsets_and_drift_of_hosts_are_found(strategy: str, tmp_path: Path) -> None:
    """Stages of this pipeline lie on hosts of their own: only messages pass between these."""
    options: dict[str, object] = {"strategy": "pipeline", "pipeline": 2, "microbatches": 4}
    spec = JobSpec(
        ranks=16,
        steps=30,
        model=ModelSpec(layers=4, tokens=4096),
        host_clock_offsets_ns={1: 5 * MS},
        host_drift_ppm={1: 40.0},
        **(options if strategy == "pipeline" else {}),
    )
    job = simulate(spec)
    _, clocks = matched(analyzed(job, tmp_path))
    assert clocks.aligned.all()
    drift = np.array([job.truth.drift_ppm[rank] for rank in range(16)])
    assert clocks.drift_ppm == pytest.approx(-drift, abs=0.5)
    correction = np.array([job.truth.clock_correction_ns[rank] for rank in range(16)])
    assert clocks.offset_ns == pytest.approx(correction, abs=1000)
    assert clocks.residual_ns.max() < 1000
