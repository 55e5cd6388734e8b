"""What is proposed for a job, and the line that makes it permanent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perfscope.analyzers.whatif.predict import WhatIfAnswer
from perfscope.recording.metadata import DataLoaderMetadata, DeviceMetadata, ModelMetadata
from perfscope.tune.baseline import BaselineRecording, baseline_of
from perfscope.tune.candidates import Candidate, Value
from perfscope.tune.permanent import how_to_keep
from perfscope.tune.proposals import asked_for, parse, propose


@pytest.fixture(scope="module")
def starved(samples: Path) -> BaselineRecording:
    """Two ranks under DDP, on CPUs, whose loader has no workers and takes most of the step."""
    return baseline_of(samples / "starved")


@pytest.fixture(scope="module")
def healthy(samples: Path) -> BaselineRecording:
    return baseline_of(samples / "healthy")


def other(baseline: BaselineRecording, **run: Any) -> BaselineRecording:
    """The same recording of a job that is set otherwise; what was predicted does not count."""
    return replace(baseline, run=replace(baseline.run, **run), context=None)


def proposed(baseline: BaselineRecording, *, numerics: bool = False) -> dict[str, list[Value]]:
    """Name -> values, in order."""
    found: dict[str, list[Value]] = {}
    for candidate in propose(baseline, numerics=numerics)[0]:
        found.setdefault(candidate.name, []).append(candidate.new)
    return found


def test_what_a_finding_asks_for_comes_first_with_its_prediction(starved: BaselineRecording) -> None:
    first = propose(starved, numerics=False)[0][0]
    assert (first.name, first.old, first.recommended) == ("dataloader.num_workers", 0, True)
    assert first.predicted is not None
    assert first.predicted.low_ns <= first.predicted.mid_ns <= first.predicted.high_ns
    assert first.predicted.saved > 0.1
    assert first in {first}, "the search keeps trials by candidate"


def test_what_is_predicted_to_save_nothing_comes_last(healthy: BaselineRecording) -> None:
    found = propose(healthy, numerics=False)[0]
    order = [3 if c.predicted and c.predicted.saved < 0.01 else 2 if c.predicted is None else 0 for c in found]
    assert order == sorted(order)


def test_a_changed_result_must_be_allowed(healthy: BaselineRecording) -> None:
    wanted, left = propose(healthy, numerics=False)
    assert "ddp.comm_dtype" not in {each.name for each in wanted}
    assert any(each.name == "ddp.comm_dtype" and "--allow-numerics" in why for each, why in left)
    assert proposed(healthy, numerics=True)["ddp.comm_dtype"] == ["bf16"]


def test_at_most_two_values_that_replay_distinguishes_are_tried(starved: BaselineRecording) -> None:
    assert all(len(values) <= 2 for values in proposed(starved).values())


def test_what_is_set_already_is_not_proposed(healthy: BaselineRecording) -> None:
    ddp = {"bucket_cap_mb": 25.0, "gradient_as_bucket_view": True, "static_graph": True, "comm_hook": "bf16"}
    found = proposed(other(healthy, settings={"ddp": ddp}), numerics=True)
    assert set(found) & {"ddp.gradient_as_bucket_view", "ddp.static_graph", "ddp.comm_dtype"} == set()


def test_buckets_larger_than_the_model_are_one(healthy: BaselineRecording) -> None:
    def of(mebibytes: int) -> dict[str, list[Value]]:
        return proposed(other(healthy, model=ModelMetadata(trainable_bytes=mebibytes << 20, dtypes=("float32",))))

    assert "ddp.bucket_cap_mb" not in of(3), "25 MiB hold it all already, and so do 4 and 100"
    assert of(10)["ddp.bucket_cap_mb"] == [4]
    assert of(60)["ddp.bucket_cap_mb"] == [4, 100]


def test_accumulation_that_exchanges_each_time_is_to_hold_back(healthy: BaselineRecording) -> None:
    settings = {**healthy.run.settings, "gradient_accumulation": {"backwards_per_step": 4, "no_sync": False}}
    assert proposed(other(healthy, settings=settings))["ddp.no_sync"] == [True]
    assert other(healthy, settings=settings).microbatches == 4
    settings["gradient_accumulation"] = {"backwards_per_step": 4, "no_sync": True}
    assert "ddp.no_sync" not in proposed(other(healthy, settings=settings))
    settings["gradient_accumulation"] = {"backwards_per_step": 4, "no_sync": False}
    settings["ddp"] = {**settings["ddp"], "find_unused_parameters": True}
    assert "ddp.no_sync" not in proposed(other(healthy, settings=settings))


def test_a_stream_gets_one_worker_at_most(healthy: BaselineRecording) -> None:
    stream = DataLoaderMetadata(num_workers=0, iterable=True, dataset="Stream")
    assert proposed(other(healthy, dataloaders=(stream,)))["dataloader.num_workers"] == [1]


def test_workers_at_work_bring_their_own_settings(healthy: BaselineRecording) -> None:
    loader = DataLoaderMetadata(num_workers=4, prefetch_factor=2, batch_size=10, dataset_length=1000, dataset="Images")
    found = proposed(other(healthy, dataloaders=(loader,), device=DeviceMetadata(type="cuda")))
    assert found["dataloader.prefetch_factor"] == [4]
    assert found["dataloader.persistent_workers"] == [True]
    assert found["dataloader.pin_memory"] == [True]


def test_variables_left_on_are_taken_away(healthy: BaselineRecording) -> None:
    environment = {"NCCL_P2P_DISABLE": "1", "TORCH_DISTRIBUTED_DEBUG": "OFF"}
    device = DeviceMetadata(type="cuda")
    found = proposed(other(healthy, device=device, backend="nccl", environment=environment))
    assert found["env.NCCL_P2P_DISABLE"] == [None]
    assert "env.TORCH_DISTRIBUTED_DEBUG" not in found
    assert "env.NCCL_BUFFSIZE" in found
    assert not any(name.startswith("env.NCCL") for name in proposed(healthy)), "no NCCL on CPUs"


def test_threads_are_a_matter_of_cpus(healthy: BaselineRecording) -> None:
    run = other(healthy, cpu_count=16, local_world_size=2, cpu_threads=1)
    assert proposed(run)["env.OMP_NUM_THREADS"] == [8, 4]
    assert "env.OMP_NUM_THREADS" not in proposed(other(run, device=DeviceMetadata(type="cuda")))


def test_deepspeeds_own_json(healthy: BaselineRecording) -> None:
    zero = {"stage": 2, "overlap_comm": False, "contiguous_gradients": True, "reduce_bucket_size": 500_000_000}
    settings = {"deepspeed": {"zero_optimization": zero}, "zero2": {"implementation": "deepspeed"}}
    found = proposed(other(healthy, settings=settings, dataloaders=()))
    assert found["deepspeed.zero_optimization.overlap_comm"] == [True]
    assert found["deepspeed.zero_optimization.reduce_bucket_size"] == [50_000_000]
    assert not any(name.startswith("ddp.") for name in found)
    zero["reduce_bucket_size"] = 50_000_000
    found = proposed(other(healthy, settings=settings))
    assert found["deepspeed.zero_optimization.reduce_bucket_size"] == [5_000_000, 200_000_000]


def test_looking_for_unused_parameters_is_dropped_where_there_were_none(healthy: BaselineRecording) -> None:
    ddp = {**healthy.run.settings["ddp"], "find_unused_parameters": True, "unused_parameter_size": 0}
    assert proposed(other(healthy, settings={"ddp": ddp}))["ddp.find_unused_parameters"] == [False]
    assert "ddp.find_unused_parameters" not in proposed(
        other(healthy, settings={"ddp": {**ddp, "unused_parameter_size": 8}})
    )


def advising(baseline: BaselineRecording, setting: str, new: str | None, how: str = "") -> BaselineRecording:
    """With one finding more, which asks for a setting."""
    (known,) = baseline.summary.findings
    finding = replace(
        known, title="found", whatif={}, action=replace(known.action, setting=setting, old=None, new=new, how=how)
    )
    return replace(baseline, summary=replace(baseline.summary, findings=(finding,)), context=None)


def test_every_finding_about_a_setting_puts_it_first(starved: BaselineRecording) -> None:
    view = propose(advising(starved, "DistributedDataParallel(gradient_as_bucket_view=…)", "True"), numerics=False)[0]
    assert (view[0].name, view[0].why, view[0].recommended) == ("ddp.gradient_as_bucket_view", "found", True)
    assert not any(each.recommended for each in view[1:])
    threads = advising(starved, "OMP_NUM_THREADS", "3")
    assert [(each.name, each.new) for each in propose(threads, numerics=False)[0] if each.recommended] == [
        ("env.OMP_NUM_THREADS", 3)
    ]
    environment = {"NCCL_PROTO": "LL", "NCCL_P2P_DISABLE": "1"}
    run = replace(starved.run, device=DeviceMetadata(type="cuda"), backend="nccl", environment=environment)
    several = replace(advising(starved, "NCCL_PROTO", None, "unset NCCL_PROTO\nunset NCCL_P2P_DISABLE"), run=run)
    assert {each.name for each in propose(several, numerics=False)[0] if each.recommended} == {
        "env.NCCL_PROTO", "env.NCCL_P2P_DISABLE",
    }  # fmt: skip


def test_the_users_own_values_are_taken_as_they_are(healthy: BaselineRecording) -> None:
    asked = dict((parse("ddp.bucket_cap_mb=10,50"), parse("env.NCCL_ALGO=Ring"), parse("deepspeed.a.b=true")))
    assert asked == {"ddp.bucket_cap_mb": (10, 50), "env.NCCL_ALGO": ("Ring",), "deepspeed.a.b": (True,)}
    found = asked_for(healthy, asked)
    assert [(each.name, each.old, each.new) for each in found][:2] == [
        ("ddp.bucket_cap_mb", 25.0, 10),
        ("ddp.bucket_cap_mb", 25.0, 50),
    ]


@pytest.mark.parametrize(
    "text", ["ddp.bucket_cap_mb", "bucket=1", "ddp.no_such=1", "ddp.comm_dtype=fp16", "fsdp.x=1", "env.=1", "env.A="]
)
def test_a_setting_that_is_not_understood_says_how_to_write_it(text: str) -> None:
    with pytest.raises(ValueError, match=r"write NAME=VALUE|settings that begin with|write ddp.comm_dtype=bf16"):
        parse(text)


def _changes(values: Mapping[str, Value]) -> list[Candidate]:
    return [Candidate(name=name, new=new, old=None, why="") for name, new in values.items()]


@pytest.mark.parametrize(
    ("frameworks", "changes", "lines"),
    [
        ((), {"dataloader.num_workers": 2, "dataloader.pin_memory": True},
         ["loader = DataLoader(dataset, num_workers=2, pin_memory=True)"]),
        (("transformers", "accelerate"), {"dataloader.num_workers": 2, "ddp.bucket_cap_mb": 50.0},
         ["args = TrainingArguments(output_dir, dataloader_num_workers=2, ddp_bucket_cap_mb=50)"]),
        (("accelerate",), {"ddp.static_graph": True},
         ["from accelerate import DistributedDataParallelKwargs",
          "accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(static_graph=True)])"]),
        (("lightning",), {"ddp.bucket_cap_mb": 4, "ddp.no_sync": True},
         ["from lightning.pytorch.strategies import DDPStrategy",
          "trainer = Trainer(strategy=DDPStrategy(bucket_cap_mb=4))",
          "Trainer(accumulate_grad_batches=4)    # instead of accumulating by hand"]),
        ((), {"ddp.bucket_cap_mb": 4.0, "ddp.gradient_as_bucket_view": True},
         ["model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=4, gradient_as_bucket_view=True)"]),
        ((), {"env.OMP_NUM_THREADS": 4, "env.NCCL_P2P_DISABLE": None},
         ["export OMP_NUM_THREADS=4", "unset NCCL_P2P_DISABLE"]),
        (("deepspeed",), {"deepspeed.zero_optimization.overlap_comm": True, "deepspeed.zero_optimization.x": 5},
         ['DeepSpeed\'s JSON: {"zero_optimization": {"overlap_comm": true, "x": 5}}']),
    ],
)  # fmt: skip
def test_the_line_that_makes_it_permanent(
    frameworks: tuple[str, ...], changes: Mapping[str, Value], lines: list[str]
) -> None:
    assert how_to_keep(_changes(changes), frameworks, 4) == lines


def test_a_prediction_is_carried_over_to_the_job_without_a_profiler() -> None:
    predicted = WhatIfAnswer({}, 300.0, 300.0, 170.0, 180.0, 190.0, 0.0)
    low, mid, high = predicted.where_step_takes(250.0)
    assert mid == pytest.approx((130 + 150) / 2)
    assert low == pytest.approx(min(120, 250 * 170 / 300))
    assert high == pytest.approx(max(140, 250 * 190 / 300))
    assert predicted.saved == pytest.approx(0.4)
