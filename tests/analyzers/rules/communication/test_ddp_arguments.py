"""DDP's arguments as each framework writes them."""

from __future__ import annotations

import pytest

from perfscope.analyzers.rules.communication.ddp_arguments import setting, written
from tests.analyzers.rules.jobs import breakdown, context, runs


@pytest.mark.parametrize(
    ("framework", "values", "typed"),
    [
        ("", {"bucket_cap_mb": 50}, "model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=50)"),
        (
            "accelerate", {"bucket_cap_mb": 50},
            "accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=50)])",
        ),
        ("transformers", {"bucket_cap_mb": 50}, "args = TrainingArguments(output_dir, ddp_bucket_cap_mb=50)"),
        (
            "transformers", {"gradient_as_bucket_view": True},
            "trainer.accelerator.ddp_handler = DistributedDataParallelKwargs(gradient_as_bucket_view=True)",
        ),
        ("fabric", {"static_graph": True}, "fabric = Fabric(strategy=DDPStrategy(static_graph=True))"),
        ("lightning", {"static_graph": True}, "trainer = Trainer(strategy=DDPStrategy(static_graph=True))"),
    ],
)  # fmt: skip
def test_what_is_typed(framework: str, values: dict[str, object], typed: str) -> None:
    settings = {"fabric": {"lightning": {"fabric": True}}}.get(framework, {framework: {"x": 1}} if framework else {})
    recorded = runs(2, **settings)
    assert (
        written(context(breakdown(0), runs=recorded).framework, **values).splitlines()[-2].partition("  #")[0] == typed
    )


def test_what_was_recorded() -> None:
    case = context(breakdown(0), runs=runs(2, ddp={"static_graph": False}))
    assert setting(case, "static_graph") is False
    assert setting(case, "comm_hook") is None
