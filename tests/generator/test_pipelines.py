"""Pipelines, checked by hand: every expected time was worked out on paper."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.generator import (
    ExtraLayers,
    Fabric,
    Host,
    HostSync,
    Job,
    JobSpec,
    ModelSpec,
    NetworkSpec,
    PipelineSpec,
    SlowCompute,
    simulate,
)
from tests.generator.collectives import Transfer, describe_transfer
from tests.generator.engine import run
from tests.generator.paper import BALANCED, present
from tests.generator.schedules import interleaved_slots
from tests.generator.work import Part, Program, Work

FREE = NetworkSpec(alpha_ns=0, busbw_gbps=float("inf"))
COALESCED = PipelineSpec(coalesced=True)


def test_a_send_and_its_recv_end_after_both_have_arrived_and_the_transfer() -> None:
    # Computing until 10 and 14, then 50 for the transfer.
    fabric, hosts = Fabric(2), [Host(0, 0), Host(1, 0)]
    for host, busy in zip(hosts, (10, 14), strict=True):
        host.stream(7).put(Work(host.rank, "compute", "gemm", 0, 0, busy))
        half = Work(host.rank, "comm", "nccl", 0, 0, after=(host.stream(7).works[0],))
        _join(fabric, half, Transfer(send=host.rank == 0, peer=1 - host.rank, elements=100))
        host.stream(32).put(half)

    run(hosts, [_nothing(), _nothing()], fabric)

    assert [(host.stream(32).works[0].start_ns, host.stream(32).works[0].end_ns) for host in hosts] == [
        (10, 64), (14, 64),
    ]  # fmt: skip


def test_a_kernel_with_two_transfers_ends_with_the_last() -> None:
    # Rank 1 receives from rank 0, there at 10, and sends to rank 2, there at 70: in one kernel from 0 to 120. Rank 0
    # has sent at 60. Between 60 and 70 rank 1 waits again.
    fabric, hosts = Fabric(3), [Host(rank, 0) for rank in range(3)]
    ways = {
        0: [Transfer(True, 1, 100)],
        1: [Transfer(False, 0, 100), Transfer(True, 2, 100)],
        2: [Transfer(False, 1, 100)],
    }
    for host, queued in zip(hosts, (10, 0, 70), strict=True):
        work = Work(host.rank, "comm", "nccl", 0, queued)
        for way in ways[host.rank]:
            _join(fabric, work, way)
        host.stream(32).put(work)

    run(hosts, [_nothing() for _ in hosts], fabric)

    works = [host.stream(32).works[0] for host in hosts]
    assert [(work.start_ns, work.end_ns) for work in works] == [(10, 60), (0, 120), (70, 120)]
    assert [works[1].waits(time) for time in (5, 30, 65, 100)] == [True, False, True, False]


def test_one_forward_one_backward_of_two_stages_and_two_microbatches() -> None:
    # Stage 0: F0 [0, 200) sent by 250; F1 [250, 450). Stage 1: F0 [250, 450), B0 [450, 850); takes F1 by 900 and hands
    # B0 back by 950, one after the other; F1 [950, 1150), B1 [1150, 1550), sent by 1600. Stage 0: B0 [950, 1350),
    # B1 [1600, 2000).
    truth = simulate(BALANCED).truth

    assert truth.step_time_ns == 2_000
    for window in truth.windows[0]:
        assert present(window.categories) == {"compute": 1_200, "exposed_comm_wait": 600, "exposed_comm_transfer": 200}
        begin = window.start_ns
        assert window.bubbles == ((begin + 450, begin + 850), (begin + 1_350, begin + 1_550))
    for window in truth.windows[1][1:]:
        # It is done at 1600 of the last step and waits 400 for that to end and 200 for the first forward.
        assert present(window.categories) == {"compute": 1_200, "exposed_comm_wait": 600, "exposed_comm_transfer": 200}
        assert window.bubbles == ((window.start_ns, window.start_ns + 600),)
    first, last = truth.stages
    assert (first.bubble_start_ns, first.bubble_steady_ns, first.bubble_drain_ns) == (0, 600, 0)
    assert (last.bubble_start_ns, last.bubble_steady_ns, last.bubble_drain_ns) == (600, 0, 0)
    assert (first.forward_ns, first.backward_ns, first.busy_ns) == (200, 400, 1_400)
    assert [(c.ranks, c.kind, c.bytes, c.count) for c in truth.collectives] == [
        ((0, 1), "send_recv", 200, 6), ((1, 0), "send_recv", 200, 6),
    ]  # fmt: skip


def test_coalesced_transfers_go_both_ways_at_once() -> None:
    # The exchange of F1 and B0 takes 50 instead of 100.
    truth = simulate(dataclasses.replace(BALANCED, schedule=COALESCED)).truth

    assert truth.step_time_ns == 1_950
    assert present(truth.windows[0][0].categories) == {
        "compute": 1_200, "exposed_comm_wait": 600, "exposed_comm_transfer": 150,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("stages", "microbatches", "schedule"),
    [
        (2, 2, PipelineSpec()),
        (4, 8, PipelineSpec()),
        (4, 8, COALESCED),
        (4, 2, PipelineSpec()),
        (4, 8, PipelineSpec(schedule="gpipe")),
        (2, 4, PipelineSpec(schedule="interleaved", chunks=3, coalesced=True)),
        (4, 8, PipelineSpec(schedule="interleaved", chunks=2, coalesced=True)),
    ],
)
def test_bubbles_of_balanced_stages_are_those_of_theory(stages: int, microbatches: int, schedule: PipelineSpec) -> None:
    # (p - 1) / (v m + p - 1) of the step (Narayanan et al., SC'21), if passing on costs nothing.
    model = dataclasses.replace(BALANCED.model, layers=stages * schedule.chunks)
    spec = dataclasses.replace(
        BALANCED, ranks=stages, pipeline=stages, microbatches=microbatches, model=model, schedule=schedule, network=FREE
    )
    truth = simulate(spec).truth

    passes = microbatches * schedule.chunks
    assert truth.step_time_ns == 600 * (passes + stages - 1)
    assert [stage.bubble_ns for stage in truth.stages] == [600 * (stages - 1)] * stages
    assert truth.bubble_share == pytest.approx((stages - 1) / (passes + stages - 1))
    assert truth.flops_per_step == stages * passes * 6 * 2_000


def test_interleaved_turns_keep_their_dependencies() -> None:
    for stages, microbatches, chunks in ((2, 4, 2), (4, 4, 2), (4, 8, 3)):
        at = {
            (part.forward, part.microbatch, part.chunk * stages + stage): (slot, within)
            for slot, turns in enumerate(interleaved_slots(stages, microbatches, chunks))
            for stage, turn in turns.items()
            for within, part in enumerate(turn)
        }
        last = stages * chunks - 1
        assert len(at) == 2 * microbatches * stages * chunks
        for microbatch, virtual in itertools.product(range(microbatches), range(last)):
            assert at[True, microbatch, virtual][0] < at[True, microbatch, virtual + 1][0]
            assert at[False, microbatch, virtual + 1][0] < at[False, microbatch, virtual][0]
        assert all(at[True, microbatch, last] < at[False, microbatch, last] for microbatch in range(microbatches))


def test_a_stage_with_more_layers_makes_the_others_wait() -> None:
    # Two layers on stage 1: F 400, B 800. F0 there [200, 600), B0 [600, 1400), F1, B1 until 2600; B1 of stage 0 until
    # 3000: 1200 more than the 1800 of the balanced pipeline, for 1200 x 2 more work.
    more = ExtraLayers(stages=(1,))
    job = simulate(dataclasses.replace(BALANCED, network=FREE, causes=(more,)))

    assert job.truth.step_time_ns == 3_000
    assert job.lost_ns(more) == 1_200
    assert [stage.busy_ns for stage in job.truth.stages] == [1_200, 2_400]
    assert [stage.flops_per_step for stage in job.truth.stages] == [2 * 6 * 2_000, 2 * 12 * 2_000]


def test_a_slow_stage_costs_what_it_is_slower_on_the_critical_path() -> None:
    # Stage 0 takes 400 and 800: F0 [0, 400), F1 [400, 800), B0 comes at 1000, [1000, 1800), B1 [1800, 2600). Stage 1:
    # F0 [400, 600), B0 [600, 1000), F1, B1 by 1600.
    spec = dataclasses.replace(BALANCED, network=FREE)
    slow = SlowCompute(ranks=spec.ranks_of_stage(0), factor=2.0)

    assert simulate(dataclasses.replace(spec, causes=(slow,))).lost_ns(slow) == 2_600 - 1_800


def test_stages_of_two_copies_reduce_their_gradients_at_the_end() -> None:
    # The second backward of stage 0 ends at 1800, then both of its weights' buckets, 50 each: only then the step ends.
    spec = dataclasses.replace(
        BALANCED, ranks=4, network=NetworkSpec(alpha_ns=50, busbw_gbps=float("inf")), first_bucket_bytes=200
    )
    truth = simulate(spec).truth

    reductions = [c for c in truth.collectives if c.kind == "allreduce"]
    assert [(c.ranks, c.group.description, c.bytes, c.count) for c in reductions] == [
        ((0, 1), "DATA_PARALLEL_GROUP", 200, 6), ((2, 3), "DATA_PARALLEL_GROUP", 200, 6),
    ]  # fmt: skip
    assert truth.step_time_ns == 2_000 + 2 * 50
    assert truth.windows[0][0].categories["exposed_comm_transfer"] == 200 + 2 * 50


def test_the_norm_of_gradients_makes_stages_wait_for_the_pipeline_to_drain() -> None:
    # Stage 1 is done at 1400 (free sends), stage 0 at 1800: 400 of waiting after the last backward.
    truth = simulate(dataclasses.replace(BALANCED, network=FREE, clip_norm=True)).truth

    first, last = truth.stages
    assert (first.bubble_start_ns, first.bubble_steady_ns, first.bubble_drain_ns) == (0, 600, 0)
    assert (last.bubble_start_ns, last.bubble_steady_ns, last.bubble_drain_ns) == (200, 0, 400)


def test_a_sync_in_a_pipeline_follows_the_last_forward() -> None:
    spec = dataclasses.replace(BALANCED, network=FREE, causes=(HostSync(ranks=(0,)),))
    host = simulate(spec).hosts[0]

    (call,) = [event for event in host.events if event.name == "cudaStreamSynchronize" and event.step == 10]
    forwards = [work for work in host.stream(7).works if work.step == 10 and work.part and work.part.forward]
    assert forwards[-1].part == Part(True, 1)
    assert call.end_ns == forwards[-1].ended + 1_000


def test_written_sends_and_receives_are_what_torch_writes(tmp_path: Path) -> None:
    spec = JobSpec(ranks=8, strategy="pipeline", pipeline=4, microbatches=4, steps=1, model=ModelSpec(tokens=512))
    kernels, operators = _transfers(simulate(spec), tmp_path, rank=3)

    # Rank 3 is the second copy's stage 1: its neighbours are ranks 1 and 5.
    assert {(k["Collective name"], k.get("Src Rank"), k.get("Dst Rank"), k["stream"]) for k in kernels} == {
        ("recv", 1, None, 32), ("send", None, 1, 32), ("recv", 5, None, 36), ("send", None, 5, 36),
    }  # fmt: skip
    assert len(kernels) == 4 * 4
    assert {k["In msg nelems"] for k in kernels} == {512 * 1024}
    assert {(k["Process Group Description"], k["Process Group Ranks"]) for k in kernels} == {
        ("PIPELINE_MODEL_PARALLEL_GROUP", "[1, 3, 5, 7]")
    }
    assert [op["Seq"] for op in operators] == list(range(operators[0]["Seq"], operators[0]["Seq"] + 16))
    anonymous = dataclasses.replace(spec, schedule=PipelineSpec(peers=False))
    kernels, _ = _transfers(simulate(anonymous), tmp_path, rank=3)
    assert not any("Src Rank" in k or "Dst Rank" in k for k in kernels)


def test_written_coalesced_kernels_are_described_by_the_operators_before_them(tmp_path: Path) -> None:
    spec = JobSpec(
        ranks=4, strategy="pipeline", pipeline=4, microbatches=4, steps=1, schedule=COALESCED,
        model=ModelSpec(tokens=512),
    )  # fmt: skip
    kernels, operators = _transfers(simulate(spec), tmp_path, rank=1)

    assert not any("Collective name" in kernel for kernel in kernels)
    # Two forwards ahead and their two backwards, in and out each; the third forward comes in by itself; twice an
    # exchange with the next stage and one with the previous.
    assert len(kernels) == 2 * 2 + 2 * 2 + 1 + 2 * 2
    assert [op["Collective name"] for op in operators].count("send") == 8
    assert len({op["Seq"] for op in operators}) == len(kernels)


def test_written_microbatches_have_ranges_where_asked_for(tmp_path: Path) -> None:
    spec = dataclasses.replace(BALANCED, steps=1, schedule=PipelineSpec(ranges=True))
    (file, _) = simulate(spec).write(tmp_path, compress=False)

    names = [event["name"] for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]
    assert [name for name in names if name.split()[0] in ("Forward", "Backward")] == [
        "Forward 0", "Forward 1", "Backward 0", "Backward 1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        {"ranks": 3},
        {"strategy": "ddp"},
        {"model": ModelSpec(layers=3)},
        {"microbatches": 3, "schedule": PipelineSpec(schedule="interleaved", chunks=2, coalesced=True)},
    ],
)
def test_pipelines_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"laid out|stages|divided"):
        dataclasses.replace(JobSpec(strategy="pipeline", pipeline=2, microbatches=2), **wrong)
    with pytest.raises(ValueError, match="chunks"):
        PipelineSpec(chunks=2)


def _transfers(job: Job, folder: Path, rank: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Arguments of the SendRecv kernels that one rank launched, and of the operators that describe them."""
    (file,) = job.write(folder, compress=False, ranks=[rank])
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]
    launched = {event["args"]["correlation"] for event in events if event["cat"] == "cuda_runtime"}
    kernels = [event["args"] for event in events if event["name"].startswith("ncclDevKernel_SendRecv")]
    kernels = [args for args in kernels if args["correlation"] in launched]
    operators = [event["args"] for event in events if event["name"] == "record_param_comms"]
    return kernels, [args for args in operators if args["Collective name"] in ("send", "recv")]


def _join(fabric: Fabric, work: Work, transfer: Transfer) -> None:
    spec = dataclasses.replace(BALANCED, ranks=4, pipeline=4, model=dataclasses.replace(BALANCED.model, layers=4))
    group = spec.groups_of(0)["pipeline"]
    fabric.join(
        work.rank,
        work,
        lambda sequence: describe_transfer(spec, group, transfer, work.rank, 0, sequence),
        transfer.ends(work.rank),
    )


def _nothing() -> Program:
    yield from ()
