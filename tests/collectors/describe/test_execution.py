"""How the process executes: what is recorded of compiled code, precision, threads, optimizers, recomputation."""

from __future__ import annotations

from typing import Any

import pytest

from perfscope.collectors.problems import Problems
from tests.collectors.harness import needs_torch

pytestmark = [needs_torch, pytest.mark.filterwarnings("ignore")]


def described(*compiled: Any, modules: tuple[Any, ...] = (), optimizers: tuple[Any, ...] = ()) -> dict[str, Any]:
    from perfscope.collectors.describe.execution import describe_execution
    from perfscope.collectors.discovery import JobObjects

    problems = Problems()
    objects = JobObjects(compiled=[each.dynamo_ctx for each in compiled], modules=list(modules))
    settings = describe_execution(objects, optimizers, problems)
    assert problems.as_tuple() == ()
    return settings


def net() -> Any:
    import torch

    return torch.nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, {"backend": "inductor", "mode": "default", "options": {}}),
        (
            {"mode": "reduce-overhead"},
            {"backend": "inductor", "mode": "reduce-overhead", "options": {"triton.cudagraphs": True}},
        ),
        (
            {"options": {"max_autotune": True}},
            {"backend": "inductor", "mode": None, "options": {"max_autotune": True}},
        ),
        ({"backend": "aot_eager", "fullgraph": True}, {"backend": "aot_eager", "mode": None, "fullgraph": True}),
        ({"dynamic": True}, {"backend": "inductor", "dynamic": True}),
    ],
)
def test_compiled_code_records_backend_mode_and_options(arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    import torch

    settings = described(torch.compile(net(), **arguments))["compile"]
    assert settings | expected == settings
    assert (settings["regions"], settings["alike"]) == (1, True)


def test_regions_compiled_in_different_ways_are_recorded_as_different() -> None:
    import torch

    regions = [torch.compile(net(), backend=backend) for backend in ("eager", "inductor", "eager")]
    settings = described(*regions)["compile"]
    assert (settings["backend"], settings["regions"], settings["alike"]) == ("eager", 3, False)


def test_functions_and_modules_compiled_in_place_are_found() -> None:
    import torch

    from perfscope.collectors.discovery import discover

    function = torch.compile(lambda x: x + 1, backend="eager")
    module = net()
    before = len(discover([]).compiled)
    module.compile(backend="eager")
    assert len(discover([]).compiled) == before + 1
    assert before >= 1
    assert function is not None


def test_precision_is_detected_whichever_way_it_was_set() -> None:
    import torch

    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert described()["precision"]["float32_matmul_precision"] == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert described()["precision"]["default_dtype"] == "float32"


def test_threads_and_optimizers() -> None:
    import torch

    model = net()
    settings = described(optimizers=(torch.optim.AdamW(model.parameters(), fused=True), torch.optim.SGD([model.bias])))
    assert settings["threads"] == {"intraop": torch.get_num_threads(), "interop": torch.get_num_interop_threads()}
    assert settings["optimizer"]["classes"] == ["AdamW", "SGD"]
    assert (settings["optimizer"]["count"], settings["optimizer"]["fused"]) == (2, True)


def test_recomputed_modules_are_counted() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    wrapped, flagged = checkpoint_wrapper(net()), net()
    flagged.gradient_checkpointing = True
    assert described(modules=(wrapped, flagged, net()))["activation_checkpointing"] == {"modules": 2}
    assert "activation_checkpointing" not in described(modules=(net(),))


def test_only_an_enabled_scaler_is_described() -> None:
    import torch

    from perfscope.collectors.describe.execution import describe_scaler
    from perfscope.collectors.discovery import JobObjects

    off, on = torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu", growth_interval=7)
    assert describe_scaler(JobObjects(scalers=[off])) == {}
    assert describe_scaler(JobObjects(scalers=[off, on])) == {"scaler": "GradScaler", "growth_interval": 7}
