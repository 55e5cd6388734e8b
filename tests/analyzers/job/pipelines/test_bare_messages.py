"""Pipelines in recordings that name neither groups nor the ways of messages, as reports of nsys do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import perfscope
from tests.analyzers.measured import advised, measured
from tests.emulator import Cause, Job, Model, Recording, emulate, step_ns

BARE = Recording(steps=6, metadata="none", described=False, shapes=False)


def pipeline(ranks: int, stages: int, *, seed: int, hosts: int = 4, microbatches: int = 4) -> Job:
    return Job(
        seed=seed, strategy="pipeline", ranks=ranks, ranks_per_host=hosts, stages=stages, microbatches=microbatches,
        noise=0.03, model=Model(blocks=2 * stages, tokens=32768, width=512), recording=BARE,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("job", "slow"),
    [
        (pipeline(4, 4, seed=1, microbatches=8), (1,)),
        (pipeline(4, 4, seed=3, microbatches=8), (0,)),
        (pipeline(2, 2, seed=6), (1,)),
        (pipeline(8, 4, seed=4), (2,)),
        (pipeline(8, 4, seed=5), (2, 3)),
        (pipeline(8, 2, seed=9), (7,)),
        (pipeline(16, 4, seed=8, hosts=8), (6,)),
    ],
    ids=lambda value: f"{value.ranks} ranks, {value.stages} stages" if isinstance(value, Job) else str(value),
)
def test_a_slow_stage_or_a_rank_of_one_costs_what_is_saved_without_it(
    job: Job, slow: tuple[int, ...], tmp_path: Path
) -> None:
    emulation = emulate(replace(job, causes=(Cause("slow compute", 1.4, ranks=slow),)))
    emulation.write(tmp_path)
    summary = measured(tmp_path)
    (row,) = summary.stragglers
    assert (row.ranks, row.cause) == (slow, "compute")
    assert row.lost_us == pytest.approx((emulation.step_ns - step_ns(job)) / 1e3, rel=0.05)
    assert summary.pipeline is not None
    assert [stage.ranks for stage in summary.pipeline.stages] == [
        tuple(rank for rank in range(job.ranks) if job.stage_of(rank) == stage) for stage in range(job.stages)
    ]


@pytest.mark.parametrize(("ranks", "stages"), [(4, 4), (8, 2), (8, 4)])
def test_bubbles_are_no_stragglers(ranks: int, stages: int, tmp_path: Path) -> None:
    """Stages on hosts of their own, too, where nothing but messages says how far the hosts' clocks are apart."""
    job = pipeline(ranks, stages, seed=11)
    for name in ("bare", "named"):
        (tmp_path / name).mkdir()
    emulate(replace(job, recording=replace(BARE, clock_ns=3_000_000))).write(tmp_path / "bare")
    emulate(replace(job, recording=Recording(steps=6))).write(tmp_path / "named")
    bare, named = measured(tmp_path / "bare"), measured(tmp_path / "named")
    assert not bare.stragglers
    assert "pipeline" in bare.job.strategies
    assert bare.pipeline is not None
    assert named.pipeline is not None
    assert bare.pipeline.bubble_share == pytest.approx(named.pipeline.bubble_share, abs=0.02)


def test_a_rank_alone_in_its_stage_takes_the_pace_of_the_other_stages(tmp_path: Path) -> None:
    job = replace(pipeline(4, 4, seed=2), causes=(Cause("slow compute", 1.4, ranks=(2,)),))
    emulate(job).write(tmp_path)
    summary = advised(tmp_path)
    finding = next(one for one in summary.findings if one.rule == "straggling-rank")
    assert finding.predicted_step_us is not None
    answer = perfscope.whatif(tmp_path, {"rank.2": "peers"})
    assert answer.mid_ns / 1e3 == pytest.approx(finding.predicted_step_us.mid, rel=1e-3)


def test_a_slow_stage_of_several_ranks_is_asked_about_by_all_of_them(tmp_path: Path) -> None:
    job = replace(pipeline(8, 4, seed=5), causes=(Cause("slow compute", 1.4, ranks=(2, 3)),))
    emulate(job).write(tmp_path)
    finding = next(one for one in advised(tmp_path).findings if one.rule == "straggling-rank")
    assert finding.whatif == {"rank.2": "peers", "rank.3": "peers"}
    assert finding.predicted_step_us is not None
    answer = perfscope.whatif(tmp_path, finding.whatif)
    assert answer.mid_ns / 1e3 == pytest.approx(finding.predicted_step_us.mid, rel=1e-3)
    # One of two is no slower than the other.
    assert perfscope.whatif(tmp_path, {"rank.2": "peers"}).mid_ns == pytest.approx(answer.measured_ns, rel=0.02)


def test_a_device_that_is_behind_its_host_is_not_the_first_stage(tmp_path: Path) -> None:
    """Rank 1 receives what rank 0 computes. Its host marks a step while its device has 40 ms of the one before to do,
    more than rank 0 computes before it sends.
    """
    for rank in (0, 1):
        events: list[dict[str, Any]] = []
        for step in range(4):
            write_step(events, rank, step)
        (tmp_path / f"rank{rank}.json").write_text(json.dumps({"traceEvents": events}))
    pipeline = measured(tmp_path).pipeline
    assert pipeline is not None
    assert [stage.ranks for stage in pipeline.stages] == [(0,), (1,)]


def write_step(events: list[dict[str, Any]], rank: int, step: int) -> None:
    """Two micro-batches: forward 10 ms, backward 20, optimizer 2; a message takes 1. Of kernels: launch, start, end."""
    begin, send, recv = 100 * step, "ncclDevKernel_SendRecv(Args)", "ncclDevKernel_SendRecv(Args) "
    if rank == 0:
        mark, end = begin, begin + 95
        kernels = [
            ("gemm", 0, 0, 10), (send, 1, 10, 11), ("gemm", 2, 11, 21), (send, 3, 21, 43), (recv, 4, 22, 42),
            ("gemm", 5, 43, 63), (recv, 6, 63, 74), ("gemm", 7, 74, 94), ("adam", 8, 94, 95),
        ]  # fmt: skip
    else:
        mark, end = begin - 60, begin + 40
        # The first recv runs from when it is launched, beside the work of the step before.
        kernels = [
            (recv, -59, -56, 11), ("gemm", -58, 11, 41), (send, -57, 41, 42), (recv, -56, 42, 43),
            ("gemm", -55, 43, 73), (send, -54, 73, 74), ("adam", -53, 74, 75),
        ]  # fmt: skip

    def add(category: str, name: str, tid: int, start: float, end: float, **args: object) -> None:
        events.append(
            {"ph": "X", "cat": category, "name": name, "pid": tid, "tid": tid, "ts": start * 1e3, "args": args,
             "dur": (end - start) * 1e3}
        )  # fmt: skip

    add("user_annotation", f"ProfilerStep#{step}", 1, mark, end)
    for number, (name, launch, start, stop) in enumerate(kernels):
        correlation = 100 * step + number + 1
        at = begin + launch
        add("cuda_runtime", "cudaLaunchKernel", 1, at, at + 0.01, correlation=correlation)
        stream = {send: 20, recv: 24}.get(name, 7)
        add(
            "kernel",
            name.strip(),
            stream,
            begin + start,
            begin + stop,
            correlation=correlation,
            device=0,
            stream=stream,
        )
