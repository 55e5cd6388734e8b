"""Accelerate, Transformers' Trainer and Lightning, run for real."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from perfscope.recording.vocabulary import (
    BACKWARD,
    CHECKPOINT,
    COMMUNICATION,
    DATALOADER,
    EVALUATION,
    FORWARD,
    OPTIMIZER,
)
from tests.frameworks.harness import Trained, analyzed, launcher, needs, script, torchrun, train

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]

ACCELERATE = (launcher("accelerate"), "launch", "--num_processes", "2", "--num_machines", "1", "--dynamo_backend", "no")
ZERO2: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 2, "overlap_comm": True},
}


def two_micro_batches_a_step(trained: Trained) -> None:
    assert [trained.per_step(name) for name in (FORWARD, BACKWARD, OPTIMIZER)] == [2, 2, 1]
    assert trained.ranges()[DATALOADER] >= 6
    assert trained.run().settings["gradient_accumulation"]["backwards_per_step"] == 2


@needs("accelerate")
def test_accelerate_with_ddp(tmp_path: Path) -> None:
    arguments = ("--cpu", "--save", str(tmp_path / "state"))
    command = (*ACCELERATE, "--multi_gpu", "--mixed_precision", "no", script("accelerate_loop"), *arguments)
    trained = train(tmp_path, *command, ranks=2, steps=10)
    run = trained.run(1)
    assert run.strategies == ("ddp",)
    accelerate = run.settings["accelerate"]
    assert accelerate["distributed_type"] == "MULTI_CPU"
    assert (accelerate["num_processes"], accelerate["gradient_accumulation_steps"]) == (2, 2)
    assert accelerate["mixed_precision"] == "no"
    assert accelerate["dataloader_config"]["split_batches"] is False
    assert run.settings["gradient_accumulation"]["no_sync"] is True
    assert run.settings["ddp"]["bucket_cap_mb"] == 25
    assert run.problems == ()
    two_micro_batches_a_step(trained)
    # Both lie between step 3 and step 4.
    assert trained.ranges()[EVALUATION] == 16
    assert trained.ranges()[CHECKPOINT] == 1
    analyzed(trained, "ddp")


@needs("accelerate", "deepspeed")
def test_accelerate_with_its_deepspeed_plugin(tmp_path: Path) -> None:
    batches = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, **batches}))
    deepspeed = ("--use_deepspeed", "--deepspeed_config_file", str(tmp_path / "ds.json"))
    # Without an accelerator Accelerate takes each process for the only one, and DeepSpeed knows better.
    trained = train(
        tmp_path, *ACCELERATE, *deepspeed, script("accelerate_loop"),
        ranks=2, steps=10, detected_by="deepspeed", world=1,
    )  # fmt: skip
    run = trained.run(1)
    assert run.strategies == ("zero2",)
    assert run.settings["accelerate"]["distributed_type"] == "DEEPSPEED"
    assert run.settings["accelerate"]["deepspeed_config"]["zero_stage"] == 2
    assert run.settings["deepspeed"]["gradient_accumulation_steps"] == 2
    two_micro_batches_a_step(trained)
    analyzed(trained, "zero2")


@needs("accelerate")
@pytest.mark.filterwarnings("ignore")
def test_accelerates_fsdp_plugin_as_its_file_spells_it() -> None:
    """The plugin does nothing without an accelerator, so it is described and not trained with."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    from perfscope.collectors.discovery import JobObjects
    from perfscope.collectors.frameworks.accelerate import describe

    accelerator: Any = Accelerator(cpu=True)
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        cpu_offload=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["GPT2Block"],
        mixed_precision_policy="bf16",
    )
    described = describe(JobObjects(trainers=[accelerator]))
    assert described is not None
    config = described["fsdp_config"]
    assert (config["fsdp_version"], config["fsdp_reshard_after_forward"], config["fsdp_offload_params"]) == (
        2,
        True,
        True,
    )
    assert config["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
    assert config["fsdp_transformer_layer_cls_to_wrap"] == ["GPT2Block"]
    assert config["fsdp_mixed_precision_policy"]["param_dtype"] == "bfloat16"


TRAINER = (
    "--max_steps", "10", "--gradient_accumulation_steps", "2", "--per_device_train_batch_size", "4", "--use_cpu",
    "--eval_strategy", "steps", "--eval_steps", "3", "--save_steps", "3", "--report_to", "none",
    "--dataloader_num_workers", "0",
)  # fmt: skip


def trainer_command(folder: Path, *more: str) -> tuple[str, ...]:
    return (*torchrun(2), script("transformers_trainer"), "--output_dir", str(folder / "out"), *TRAINER, *more)


@needs("transformers", "accelerate")
def test_transformers_with_ddp(tmp_path: Path) -> None:
    more = ("--ddp_bucket_cap_mb", "7", "--bf16", "--ddp_find_unused_parameters", "False")
    trained = train(tmp_path, *trainer_command(tmp_path, *more), ranks=2, steps=10)
    run = trained.run(1)
    arguments = run.settings["transformers"]
    assert run.strategies == ("ddp",)
    assert arguments["trainer"] == "Trainer"
    assert (arguments["gradient_accumulation_steps"], arguments["per_device_train_batch_size"]) == (2, 4)
    assert (arguments["bf16"], arguments["ddp_bucket_cap_mb"], arguments["ddp_find_unused_parameters"]) == (
        True, 7, False,
    )  # fmt: skip
    assert (arguments["eval_strategy"], arguments["save_steps"], arguments["dataloader_num_workers"]) == ("steps", 3, 0)
    assert run.settings["ddp"]["bucket_cap_mb"] == 7
    assert run.settings["accelerate"]["ddp_kwargs"]["bucket_cap_mb"] == 7
    assert run.settings["amp"]["dtype"] == "bfloat16"
    assert run.model is not None
    assert run.model.name == "GPT2LMHeadModel"
    assert run.problems == ()
    two_micro_batches_a_step(trained)
    # Evaluation and checkpoint lie between step 2 and step 3.
    assert (trained.ranges()[EVALUATION], trained.ranges()[CHECKPOINT]) == (1, 1)
    analyzed(trained, "ddp")


@needs("transformers", "accelerate", "deepspeed")
def test_transformers_with_zero_2(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(ZERO2))
    command = trainer_command(tmp_path, "--deepspeed", str(tmp_path / "ds.json"))
    trained = train(tmp_path, *command, ranks=2, steps=10, detected_by="deepspeed")
    run = trained.run(1)
    assert run.strategies == ("zero2",)
    # What the user's file leaves to the Trainer ("auto") is there as it turned out.
    assert run.settings["deepspeed"]["config"]["gradient_accumulation_steps"] == 2
    assert run.settings["deepspeed"]["train_micro_batch_size_per_gpu"] == 4
    assert run.settings["deepspeed"]["zero_optimization"]["overlap_comm"] is True
    assert run.settings["transformers"]["gradient_accumulation_steps"] == 2
    assert trained.ranges()[COMMUNICATION] > 0
    assert (trained.ranges()[EVALUATION], trained.ranges()[CHECKPOINT]) == (1, 1)
    two_micro_batches_a_step(trained)
    analyzed(trained, "zero2")


@needs("lightning")
def test_lightning_with_its_own_launcher(tmp_path: Path) -> None:
    command = (sys.executable, script("lightning_fit"), "--root", str(tmp_path), "--precision", "bf16-mixed")
    trained = train(tmp_path, *command, ranks=2, steps=10)
    run = trained.run(1)
    lightning = run.settings["lightning"]
    assert run.strategies == ("ddp",)
    assert (lightning["strategy"], lightning["strategy_class"]) == ("ddp", "DDPStrategy")
    assert (lightning["accumulate_grad_batches"], lightning["precision"]) == (2, "bf16-mixed")
    assert (lightning["num_devices"], lightning["num_nodes"], lightning["gradient_clip_val"]) == (2, 1, 1.0)
    assert lightning["val_check_interval"] == 4
    assert run.settings["amp"]["dtype"] == "bfloat16"
    assert run.settings["gradient_accumulation"] == {"backwards_per_step": 2, "no_sync": True}
    assert run.problems == ()
    two_micro_batches_a_step(trained)
    # The optimizer calls a closure that trains: its range is what comes after.
    trace = trained.recording.trace(1)
    optimizing = [event for event in trace.events if event["name"] == OPTIMIZER]
    assert not any(
        optimizer["ts"] < event["ts"] < optimizer["ts"] + optimizer["dur"]
        for optimizer in optimizing
        for event in trace.events
        if event["name"] in (FORWARD, BACKWARD)
    )
    assert trained.ranges(1)[EVALUATION] >= 1
    analyzed(trained, "ddp")


@needs("lightning")
def test_lightning_on_one_process(tmp_path: Path) -> None:
    command = (sys.executable, script("lightning_fit"), "--root", str(tmp_path), "--devices", "1", "--strategy", "auto")
    trained = train(tmp_path, *command, ranks=1, steps=10, backend="")
    assert trained.run().strategies == ("single",)
    assert trained.run().settings["lightning"]["strategy_class"] == "SingleDeviceStrategy"
    two_micro_batches_a_step(trained)
    analyzed(trained, "single")


@needs("lightning")
def test_lightnings_fabric(tmp_path: Path) -> None:
    command = (sys.executable, script("fabric_loop"), "--checkpoint", str(tmp_path / "checkpoint.ckpt"))
    trained = train(tmp_path, *command, ranks=2, steps=10)
    run = trained.run(1)
    assert run.strategies == ("ddp",)
    assert run.settings["lightning"]["fabric"] is True
    assert run.settings["lightning"]["precision"] == "bf16-mixed"
    assert run.settings["lightning"]["strategy_class"] == "DDPStrategy"
    assert run.settings["gradient_accumulation"] == {"backwards_per_step": 2, "no_sync": True}
    assert run.settings["amp"]["dtype"] == "bfloat16"
    assert run.model is not None
    assert run.model.name == "Sequential"
    assert run.problems == ()
    two_micro_batches_a_step(trained)
    assert trained.ranges()[CHECKPOINT] == 1
    analyzed(trained, "ddp")
