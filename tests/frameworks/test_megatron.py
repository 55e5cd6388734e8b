"""megatron-core's schedules, optimizers and timers, run for real: tensor parallel, pipelines, interleaved ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfscope.recording.vocabulary import (
    BACKWARD,
    COMMUNICATION,
    EVALUATION,
    FORWARD,
    MEGATRON_TIMER_PREFIX,
    OPTIMIZER,
    PIPELINE_PREFIX,
)
from tests.frameworks.harness import Trained, analyzed, needs, script, torchrun, train

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600), needs("megatron.core")]


def megatron(folder: Path, *arguments: str, ranks: int = 2) -> Trained:
    return train(folder, *torchrun(ranks), script("megatron_loop"), *arguments, ranks=ranks, steps=8)


def test_tensor_parallel(tmp_path: Path) -> None:
    trained = megatron(tmp_path, "--tensor-model-parallel-size", "2")
    run = trained.run(1)
    settings = run.settings["megatron"]
    assert run.strategies == ("tensor",)
    assert run.settings["tensor"] == {"implementation": "megatron", "degree": 2}
    sizes = ("tensor", "pipeline", "data")
    assert [settings.get(f"{size}_model_parallel_size", settings.get(f"{size}_parallel_size")) for size in sizes] == [
        2, 1, 1,
    ]  # fmt: skip
    assert (settings["context_parallel_size"], settings["expert_model_parallel_size"]) == (1, 1)
    assert (settings["num_microbatches"], settings["use_distributed_optimizer"]) == (4, False)
    assert (settings["overlap_grad_reduce"], settings["tp_comm_overlap"]) == (False, False)
    assert settings["moe_token_dispatcher_type"] == "allgather"
    assert run.model is not None
    assert run.model.name == "GPTModel"
    assert run.problems == ()
    assert [trained.per_step(name) for name in (FORWARD, BACKWARD, OPTIMIZER)] == [4, 4, 1]
    assert trained.ranges()[EVALUATION] == 4
    # At --timing-log-level 0 Megatron itself measures none of these.
    for timer, count in (("forward-compute", 16), ("backward-compute", 12), ("all-grads-sync", 3)):
        assert trained.ranges()[f"{MEGATRON_TIMER_PREFIX}{timer}"] == count
    analyzed(trained, "tensor")


def test_the_distributed_optimizer(tmp_path: Path) -> None:
    trained = megatron(tmp_path, "--use-distributed-optimizer")
    run = trained.run()
    assert run.strategies == ("zero1",)
    assert run.settings["megatron"]["use_distributed_optimizer"] is True
    assert run.settings["megatron"]["data_parallel_size"] == 2
    assert run.settings["zero1"]["implementation"] == "megatron"
    # Gradients are scattered and weights gathered through names that Megatron took from torch when it was imported.
    assert trained.per_step(COMMUNICATION) > 2
    analyzed(trained, "zero1")


def test_plain_data_parallelism(tmp_path: Path) -> None:
    run = megatron(tmp_path).run()
    assert run.strategies == ("ddp",)
    assert run.settings["ddp"]["implementation"] == "megatron"


@pytest.mark.parametrize(("chunks", "schedule"), [(1, "1f1b"), (2, "interleaved")])
def test_pipelines(tmp_path: Path, chunks: int, schedule: str) -> None:
    arguments = ["--pipeline-model-parallel-size", "2", "--deallocate-pipeline-outputs"]
    if chunks > 1:
        arguments += ["--virtual-pipeline-model-parallel-size", str(chunks)]
    trained = megatron(tmp_path, *arguments)
    for rank in (0, 1):
        run = trained.run(rank)
        stages = [rank + 2 * chunk for chunk in range(chunks)]
        assert run.strategies == ("pipeline",)
        assert run.settings["pipeline"] == {
            "implementation": "megatron", "stages": 2 * chunks, "stage": stages, "virtual_stages": chunks, "degree": 2,
            "schedule": schedule, "microbatches": 4,
        }  # fmt: skip
        ranges = trained.ranges(rank)
        named = [name for name in ranges if name.startswith(PIPELINE_PREFIX)]
        assert set(named) == {
            f"{PIPELINE_PREFIX}{phase}|{stage}|{micro_batch}"
            for phase in ("forward", "backward")
            for stage in stages
            for micro_batch in range(4)
        }
        assert {ranges[name] for name in named} == {3}
        assert (ranges[FORWARD], ranges[BACKWARD]) == (12 * chunks, 12 * chunks)
        assert ranges[OPTIMIZER] == 3
    analyzed(trained, "pipeline")


def test_tensor_and_pipeline_parallelism_together(tmp_path: Path) -> None:
    sizes = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")
    trained = megatron(tmp_path, *sizes, ranks=4)
    assert trained.run(3).settings["pipeline"]["stage"] == [1]
    analyzed(trained, ("pipeline", "tensor"))
