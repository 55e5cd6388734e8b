"""Settings of torch's own strategies, as one rank of a world that exchanges nothing holds them."""

from __future__ import annotations

from typing import Any

import pytest

from perfscope.collectors.problems import Problems
from tests.collectors.harness import needs_torch
from tests.collectors.worlds import world

pytestmark = [needs_torch, pytest.mark.filterwarnings("ignore")]

Settings = dict[str, dict[str, Any]]


def described(model: Any, world_size: int = 8) -> tuple[tuple[str, ...], Settings]:
    """Strategies and settings of a job that trains ``model``."""
    import torch

    from perfscope.collectors.describe.strategies import describe_strategies
    from perfscope.collectors.discovery import discover

    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    problems = Problems()
    result = describe_strategies(discover(optimizers), optimizers, world_size, problems)
    assert problems.as_tuple() == ()
    return result


def net() -> Any:
    import torch

    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))


def mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def shard(model: Any, **options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


@pytest.mark.parametrize(("reshard", "resharding"), [(True, 2), (False, 0), (2, 2)])
def test_fully_shard_records_what_stays_after_forward(reshard: bool | int, resharding: int) -> None:
    with world(8):
        names, settings = described(shard(net(), mesh=mesh((8,), ("dp",)), reshard_after_forward=reshard))
    assert names == ("fsdp",)
    fsdp = settings["fsdp"]
    assert (fsdp["version"], fsdp["units"], fsdp["reshard_after_forward"]) == (2, 3, reshard)
    assert type(fsdp["reshard_after_forward"]) is type(reshard)
    assert fsdp["units_resharding"] == resharding  # the root has no parameters of its own
    assert (fsdp["shard_degree"], fsdp["mesh"]) == (8, {"names": ["dp"], "shape": [8]})


def test_hybrid_sharding_names_both_groups() -> None:
    from perfscope.collectors.describe.groups import describe_groups

    with world(8, rank=5):
        names, settings = described(shard(net(), mesh=mesh((2, 4), ("replicas", "shards"))))
        groups = {group.name: group for group in describe_groups()}
    fsdp = settings["fsdp"]
    assert (names, fsdp["shard_degree"], fsdp["replicate_degree"]) == (("fsdp",), 4, 2)
    assert groups[fsdp["shard_group"]].ranks == (4, 5, 6, 7)
    assert groups[fsdp["replicate_group"]].ranks == (1, 5)
    assert groups[fsdp["shard_group"]].description == "mesh_shards"
    whole = {"names": ["replicas", "shards"], "shape": [2, 4]}
    assert {**whole, "groups": [fsdp["replicate_group"], fsdp["shard_group"]]} in settings["device_mesh"]["meshes"]


def test_tensor_parallelism_beside_sharding_is_read_from_the_mesh() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with world(8):
        device_mesh = mesh((2, 2, 2), ("pp", "dp", "tp"))
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        model = parallelize_module(net(), device_mesh["tp"], plan)
        names, settings = described(model)
        assert (names, settings["tensor"]["degree"], settings["tensor"]["mesh_dimension"]) == (("tensor",), 2, "tp")
        names, settings = described(shard(model, mesh=device_mesh["dp"]))
    assert names == ("fsdp", "tensor")
    assert (settings["tensor"]["degree"], settings["tensor"]["mesh_dimension"]) == (2, "tp")
    assert settings["fsdp"]["shard_degree"] == 2


def test_sharding_alone_is_not_tensor_parallelism() -> None:
    with world(8):
        names, _ = described(shard(net()))
    assert names == ("fsdp",)


@pytest.mark.parametrize(
    ("schedule", "per_rank", "stages"),
    [
        ("ScheduleGPipe", 1, [1]),
        ("Schedule1F1B", 1, [1]),
        ("ScheduleInterleaved1F1B", 2, [1, 5]),
        ("ScheduleInterleavedZeroBubble", 2, [1, 5]),
    ],
)
def test_a_pipeline_s_schedule(schedule: str, per_rank: int, stages: list[int]) -> None:
    import torch
    from torch.distributed import pipelining

    with world(4, rank=1):
        modules = [net() for _ in stages]
        made = [
            pipelining.PipelineStage(module, index, 4 * per_rank, torch.device("cpu"))
            for module, index in zip(modules, stages, strict=True)
        ]
        kind = getattr(pipelining, schedule)
        running = kind(made if per_rank > 1 else made[0], 8, loss_fn=torch.nn.functional.mse_loss)
        names, settings = described(torch.nn.ModuleList(modules), 4)
        del running
    assert names == ("pipeline",)
    assert settings["pipeline"] == {
        "stages": 4 * per_rank,
        "stage": stages,
        "virtual_stages": per_rank,
        "degree": 4,
        "group": "0",
        "schedule": schedule,
        "microbatches": 8,
    }


def test_fsdp1_settings_are_spelled_as_in_its_arguments() -> None:
    import torch
    from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy

    with world(8):
        model = FullyShardedDataParallel(
            net(),
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
            backward_prefetch=BackwardPrefetch.BACKWARD_POST,
            forward_prefetch=True,
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
            device_id=torch.device("cpu"),
        )
        names, settings = described(model)
    fsdp = settings["fsdp"]
    assert (names, fsdp["version"], fsdp["sharding_strategy"]) == (("fsdp",), 1, "SHARD_GRAD_OP")
    assert (fsdp["backward_prefetch"], fsdp["forward_prefetch"], fsdp["cpu_offload"]) == ("BACKWARD_POST", True, False)
    assert fsdp["mixed_precision"] == {"param_dtype": "torch.bfloat16"}
    assert (fsdp["shard_degree"], fsdp["group"]) == (8, "0")


def test_one_process_is_single() -> None:
    assert described(net(), 1)[0] == ("single",)
