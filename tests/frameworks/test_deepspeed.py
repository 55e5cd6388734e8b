"""DeepSpeed's engines, run for real: every ZeRO stage, offload, bf16, its launcher, its pipelines."""

from __future__ import annotations

import json
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
    GATHER,
    OPTIMIZER,
    PIPELINE_PREFIX,
    REDUCE,
)
from tests.frameworks.harness import analyzed, launcher, needs, script, torchrun, train

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600), needs("deepspeed")]


def configuration(folder: Path, **settings: Any) -> tuple[str, str]:
    """Options that hand a DeepSpeed configuration to a script."""
    content = {
        "train_micro_batch_size_per_gpu": 8,
        "steps_per_print": 1000000,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        **settings,
    }
    path = folder / "ds.json"
    path.write_text(json.dumps(content))
    return "--deepspeed_config", str(path)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages_that_keep_the_parameters_whole(tmp_path: Path, stage: int) -> None:
    options = configuration(tmp_path, zero_optimization={"stage": stage, "reduce_bucket_size": 100000})
    command = (*torchrun(2), script("deepspeed_zero"), *options)
    trained = train(tmp_path, *command, ranks=2, steps=10, detected_by="deepspeed")
    name = f"zero{stage}" if stage else "ddp"
    run = trained.run(1)
    assert run.strategies == (name,)
    assert run.settings[name]["implementation"] == "deepspeed"
    assert run.settings["deepspeed"]["engine"] == "DeepSpeedEngine"
    assert run.settings["deepspeed"]["zero_optimization"]["stage"] == stage
    assert run.settings["deepspeed"]["zero_optimization"]["reduce_bucket_size"] == 100000
    assert run.settings["deepspeed"]["zero_optimization"]["overlap_comm"] is False  # the default below stage 3
    assert run.problems == ()
    for phase in (DATALOADER, FORWARD, BACKWARD, REDUCE, OPTIMIZER):
        assert trained.per_step(phase) == 1
    assert trained.per_step(GATHER) == (1 if stage else 0)
    assert trained.per_step(COMMUNICATION) >= 1
    assert trained.ranges()[EVALUATION] == 1
    analyzed(trained, name)


def test_stage_3_with_offload_bf16_accumulation_and_a_checkpoint(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 1000,
            "offload_optimizer": {"device": "cpu"},
        },
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": 2,
        "comet": {"enabled": False, "api_key": "hunter2hunter2"},
    }
    options = configuration(tmp_path, **settings)
    checkpoint = ("--accumulate", "2", "--checkpoint", str(tmp_path / "checkpoint"))
    command = (*torchrun(2), script("deepspeed_zero"), *options, *checkpoint)
    trained = train(tmp_path, *command, ranks=2, steps=10, detected_by="deepspeed")
    run = trained.run()
    deepspeed = run.settings["deepspeed"]
    assert run.strategies == ("zero3",)
    assert run.settings["zero3"] == {"implementation": "deepspeed", "stage": 3, "offload_optimizer": "cpu"}
    assert deepspeed["config"]["zero_optimization"] == settings["zero_optimization"]
    assert deepspeed["config"]["comet"] == {"enabled": False, "api_key": "[redacted]"}
    in_force = deepspeed["zero_optimization"]
    assert (in_force["overlap_comm"], in_force["stage3_prefetch_bucket_size"]) == (True, 1000)
    assert (in_force["stage3_param_persistence_threshold"], in_force["offload_optimizer"]["device"]) == (0, "cpu")
    assert (deepspeed["precision"], deepspeed["train_batch_size"]) == ("bf16", 32)
    assert (deepspeed["gradient_accumulation_steps"], deepspeed["train_micro_batch_size_per_gpu"]) == (2, 8)
    assert run.settings["gradient_accumulation"]["backwards_per_step"] == 2
    assert [trained.per_step(name) for name in (FORWARD, BACKWARD, OPTIMIZER)] == [2, 2, 1]
    assert trained.per_step(GATHER) >= 2
    assert trained.per_step(REDUCE) == 2
    assert (tmp_path / "checkpoint" / "latest").exists()
    analyzed(trained, "zero3")


def test_a_checkpoint_between_recorded_steps_has_its_range(tmp_path: Path) -> None:
    options = configuration(tmp_path, zero_optimization={"stage": 1})
    command = (*torchrun(2), script("deepspeed_zero"), *options, "--checkpoint", str(tmp_path / "checkpoint"))
    recorded = train(tmp_path, *command, "--checkpoint-at", "3", ranks=2, steps=10, detected_by="deepspeed")
    assert recorded.ranges()[CHECKPOINT] == 1


def test_deepspeeds_own_launcher(tmp_path: Path) -> None:
    options = configuration(tmp_path, zero_optimization={"stage": 2})
    command = (launcher("deepspeed"), "--num_accelerators", "2", script("deepspeed_zero"), *options)
    trained = train(tmp_path, *command, ranks=2, steps=10, detected_by="deepspeed")
    assert trained.run(1).strategies == ("zero2",)


def test_the_pipeline_engine(tmp_path: Path) -> None:
    options = configuration(tmp_path, gradient_accumulation_steps=4)
    command = (*torchrun(2), script("deepspeed_pipeline"), *options)
    trained = train(tmp_path, *command, ranks=2, steps=8, detected_by="deepspeed")
    for rank in (0, 1):
        run = trained.run(rank)
        assert run.strategies == ("pipeline",)
        assert run.settings["pipeline"] == {
            "implementation": "deepspeed", "stages": 2, "stage": [rank], "virtual_stages": 1, "degree": 2,
            "schedule": "1f1b", "microbatches": 4,
        }  # fmt: skip
        assert "gradient_accumulation" not in run.settings
        ranges = trained.ranges(rank)
        for micro_batch in range(4):
            for phase in ("forward", "backward"):
                assert ranges[f"{PIPELINE_PREFIX}{phase}|{rank}|{micro_batch}"] == 3
        assert (ranges[FORWARD], ranges[BACKWARD], ranges[OPTIMIZER]) == (12, 12, 3)
        assert ranges[EVALUATION] == 1
    analyzed(trained, "pipeline")


def test_a_pipeline_beside_data_parallelism(tmp_path: Path) -> None:
    options = configuration(tmp_path, gradient_accumulation_steps=2, zero_optimization={"stage": 1})
    command = (*torchrun(4), script("deepspeed_pipeline"), *options)
    trained = train(tmp_path, *command, ranks=4, steps=8, detected_by="deepspeed")
    assert [trained.run(rank).settings["pipeline"]["stage"] for rank in range(4)] == [[0], [0], [1], [1]]
    assert trained.run().settings["deepspeed"]["data_parallel_size"] == 2
    analyzed(trained, ("pipeline", "zero1"))


@pytest.mark.parametrize(
    ("fault", "message", "missing"),
    [
        ("perfscope.collectors.frameworks.deepspeed:_range_micro_batches", "the ranges of deepspeed", PIPELINE_PREFIX),
        ("perfscope.collectors.frameworks.deepspeed:describe", "describing deepspeed", ""),
    ],
)
def test_a_fault_of_a_hook_costs_that_hook_alone(tmp_path: Path, fault: str, message: str, missing: str) -> None:
    options = configuration(tmp_path, gradient_accumulation_steps=2)
    command = (*torchrun(2), script("deepspeed_pipeline"), *options)
    trained = train(tmp_path, *command, ranks=2, steps=8, detected_by="deepspeed", environment={"TEST_FAULT": fault})
    (problem,) = trained.run().problems
    assert problem.startswith(message)
    assert "injected" in problem
    assert trained.per_step(FORWARD) == 2
    if missing:
        assert not any(name.startswith(missing) for name in trained.ranges())
        assert "deepspeed" in trained.run().settings
    else:
        assert "deepspeed" not in trained.run().settings
