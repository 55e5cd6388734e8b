"""ZeRO, accumulation, recomputation and causes planted in them, checked by hand."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.generator import (
    MS,
    Job,
    JobSpec,
    ModelSpec,
    PipelineSpec,
    ReduceEachMicrobatch,
    RotatingPause,
    SlowLoader,
    simulate,
)
from tests.generator.paper import PAPER, present


def test_zero_3_gathers_twice_and_scatters_in_buckets() -> None:
    # No kernel zeroes gradients, so a step begins with a gather of 400 bytes, 50 + 400 / 2 / 4 = 100. Forward 210,
    # loss 20, gather 100, backward 410; the first weight's bucket is averaged and scattered (50 + 200 / 2 / 4 = 75)
    # meanwhile, the second's after it: 10 + 75; optimizer 60, the next batch's copy 5.
    truth = simulate(dataclasses.replace(PAPER, strategy="zero3")).truth

    window = truth.windows[0][0]
    assert window.duration_ns == 100 + 210 + 20 + 100 + 410 + 10 + 75 + 60 + 5
    assert present(window.categories) == {"compute": 710, "exposed_comm_transfer": 275, "exposed_copy": 5}
    assert {(c.kind, c.bytes, c.count) for c in truth.collectives} == {
        ("_allgather_base", 400, 6), ("_reduce_scatter_base", 200, 6),
    }  # fmt: skip


def test_zero_2_gathers_parameters_after_the_optimizer() -> None:
    # Copy 5, forward 210, loss 20, backward 410, 10 + 75, optimizer 60, gather 100.
    truth = simulate(dataclasses.replace(PAPER, strategy="zero2")).truth

    assert truth.windows[0][0].duration_ns == 5 + 210 + 20 + 410 + 85 + 60 + 100
    assert {(c.kind, c.bytes, c.count) for c in truth.collectives} == {
        ("_allgather_base", 400, 3), ("_reduce_scatter_base", 200, 6),
    }  # fmt: skip


def test_zero_1_reduces_after_the_last_backward() -> None:
    # Two micro-batches of 5 + 210 + 20 + 410; averaging 10, two reductions of 100 in turn (the second one's averaging
    # lies under the first), optimizer 60, gather 100.
    truth = simulate(dataclasses.replace(PAPER, strategy="zero1", microbatches=2)).truth

    window = truth.windows[0][0]
    assert window.duration_ns == 2 * 645 + 10 + 200 + 60 + 100
    assert {(c.kind, c.bytes, c.count) for c in truth.collectives} == {
        ("_allgather_base", 400, 3),
        ("allreduce", 200, 6),
    }


def test_accumulation_reduces_once_or_each_time() -> None:
    # Zero 10, twice copy 5, forward 210, loss 20, backward 410; the last bucket's 100; optimizer 60. Reducing each time
    # exposes the first micro-batch's last bucket as well.
    each = ReduceEachMicrobatch()
    job = simulate(dataclasses.replace(PAPER, microbatches=2, causes=(each,)))

    assert job.truth.step_time_ns == 10 + 2 * 645 + 2 * 100 + 60
    assert job.lost_ns(each) == 100
    assert job.truth.flops_per_step == 2 * 2 * 6 * 2_000
    assert [(c.bytes, c.count) for c in job.truth.collectives] == [(200, 2 * 2 * 3)]


def test_accumulation_takes_a_batch_for_each_microbatch() -> None:
    # Batches of 700 that nothing can hide: a micro-batch takes 645.
    slow = SlowLoader(steps=(11,), load_ns=700)
    job = simulate(dataclasses.replace(PAPER, microbatches=2, causes=(slow,)))

    assert [delivery.load_ns for delivery in job.truth.deliveries[0]] == [0, 0, 700, 700, 0, 0]
    assert len(job.deliveries[0]) == 2 * 4


def test_a_loader_is_slow_in_some_steps_of_one_rank() -> None:
    # No worker: the batch of step 11 takes 500 more on rank 1, of which the 60 of the optimizer before it are hidden,
    # and the 10 and 5 that come after are not.
    loader = dataclasses.replace(PAPER.loader, workers=0)
    slow = SlowLoader(ranks=(1,), steps=(11,), load_ns=500)
    job = simulate(dataclasses.replace(PAPER, loader=loader, end_sync=True, causes=(slow,)))

    assert [window.categories["idle_dataloader"] for window in job.truth.windows[1]] == [0, 500, 0]
    assert job.lost_ns(slow) == pytest.approx(500 / 3)


@pytest.mark.parametrize(("recompute", "again", "products"), [("reentrant", 210, 2), ("non_reentrant", 110, 1)])
def test_recomputation_runs_a_layers_forward_again(recompute: str, again: int, products: int, tmp_path: Path) -> None:
    job = simulate(dataclasses.replace(PAPER, recompute=recompute))

    assert job.truth.step_time_ns == 815 + again
    assert job.truth.flops_per_step == 2 * 6 * 2_000
    assert job.truth.hardware_flops_per_step == 2 * (6 + products) * 2_000
    operators = _operators(job, tmp_path)
    assert sum(_flops(op) for op in operators) == 3 * job.truth.hardware_flops_per_step // 2
    threads = {op["tid"] for op in operators if op["name"] == "aten::addmm"}
    backward = {op["tid"] for op in operators if op["name"] == "aten::mm"}
    assert backward < threads
    checkpoints = [op for op in operators if op["name"] == "CheckpointFunctionBackward"]
    assert len(checkpoints) == (3 if recompute == "reentrant" else 0)


def test_a_rotating_pause_is_on_each_rank_in_turn() -> None:
    pause = RotatingPause(pause_ns=2 * MS, every=2)
    spec = JobSpec(ranks=4, steps=8, causes=(pause,))

    victims = {step: [rank for rank in range(4) if spec.pauses(rank, step)] for step in spec.recorded_steps}
    assert victims == {10: [1], 11: [], 12: [2], 13: [], 14: [3], 15: [], 16: [0], 17: []}
    some = RotatingPause(pause_ns=1, ranks=(1, 3), steps=(10, 11))
    spec = JobSpec(ranks=4, steps=8, causes=(some,))
    assert [(rank, step) for step in spec.recorded_steps for rank in range(4) if spec.pauses(rank, step)] == [
        (1, 10), (3, 11),
    ]  # fmt: skip


def test_a_rotating_pause_costs_every_step() -> None:
    # As a pause in each step of one rank does: 400, less the 15 of work that lie under it.
    pause = RotatingPause(pause_ns=400, name="gc")
    job = simulate(dataclasses.replace(PAPER, end_sync=True, causes=(pause,)))

    assert job.lost_ns(pause) == 385
    idle = {rank: [window.categories["idle_host"] for window in job.truth.windows[rank]] for rank in (0, 1)}
    assert idle == {0: [385, 0, 385], 1: [0, 385, 0]}


@pytest.mark.parametrize(
    ("metadata", "on_kernel", "on_operator"),
    [
        ("kernel", {"Collective name"}, {"Collective name", "Seq"}),
        ("numbered", {"Collective name", "Seq"}, {"Collective name", "Seq"}),
        ("operator", set(), {"Collective name", "Seq"}),
        ("none", set(), set()),
    ],
)
def test_collectives_are_described_where_asked_for(
    metadata: str, on_kernel: set[str], on_operator: set[str], tmp_path: Path
) -> None:
    job = simulate(dataclasses.replace(PAPER, metadata=metadata))
    (file,) = job.write(tmp_path, ranks=[1], compress=False)
    events = json.loads(file.read_text())["traceEvents"]

    launched = {e["args"]["correlation"] for e in events if e.get("cat") == "cuda_runtime"}
    kernels = [e["args"] for e in events if e.get("cat") == "kernel" and e["name"].startswith("nccl")]
    kernels = [args for args in kernels if args["correlation"] in launched]
    operators = [e["args"] for e in events if e["name"] == "record_param_comms"]
    assert len(kernels) == len(operators) == 6
    assert {key for args in kernels for key in ("Collective name", "Seq") if key in args} == on_kernel
    assert {key for args in operators for key in ("Collective name", "Seq") if key in args} == on_operator


def test_only_the_ranks_asked_for_are_written(tmp_path: Path) -> None:
    files = simulate(dataclasses.replace(PAPER, ranks=4)).write(tmp_path, ranks=[0, 2, 3])

    assert [file.name for file in files] == ["rank0.json.gz", "rank2.json.gz", "rank3.json.gz"]


@pytest.mark.parametrize(
    "spec",
    [
        JobSpec(ranks=64, steps=6),
        JobSpec(
            ranks=64, steps=3, warmup=1, strategy="pipeline", pipeline=8, microbatches=16,
            model=ModelSpec(layers=8, tokens=2048), schedule=PipelineSpec(coalesced=True),
        ),
    ],
    ids=["ddp", "pipeline"],
)  # fmt: skip
def test_jobs_of_64_ranks_are_quick(spec: JobSpec, tmp_path: Path) -> None:
    # 1 and 2 s; what is guarded against is time that grows with the square of ranks or events.
    began = time.process_time()
    job = simulate(spec)
    job.write(tmp_path)
    assert len(job.truth.windows[63]) == spec.steps
    assert time.process_time() - began < 20


def _operators(job: Job, folder: Path) -> list[dict[str, Any]]:
    (file,) = job.write(folder, ranks=[0], compress=False)
    return [event for event in json.loads(file.read_text())["traceEvents"] if event.get("cat") == "cpu_op"]


def _flops(event: dict[str, Any]) -> int:
    if event["name"] not in ("aten::addmm", "aten::mm"):
        return 0
    (rows, inner), (_, columns) = event["args"]["Input Dims"][-2:]
    return int(2 * rows * inner * columns)
