"""Micro-batches of a step, by the ranges that torch records around forwards of whole models."""

from __future__ import annotations

import pytest

from perfscope.analyzers.rank.analyze import analyze_rank
from tests.traces import TraceBuilder

US = 1_000


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("DistributedDataParallel.forward", ()),
        ("FullyShardedDataParallel.forward", ("FullyShardedDataParallel.forward",) * 2),
        ("FSDP::root_pre_forward", ("FSDP::pre_forward (layers.0)", "FSDP::pre_forward (layers.1)")),
    ],
)
def test_forwards_of_the_whole_model_are_micro_batches(name: str, units: tuple[str, ...]) -> None:
    """Four of them in each of two steps, and none of a unit within the model."""
    builder = TraceBuilder()
    for step in range(2):
        begin = step * 100_000 * US
        builder.step(step, begin, begin + 99_000 * US)
        for batch in range(4):
            at = begin + (batch * 20_000 + 1_000) * US
            builder.note(name, at, at + 10_000 * US)
            for place, unit in enumerate(units):
                builder.note(unit, at + (1_000 + 3_000 * place) * US, at + (2_000 + 3_000 * place) * US)
            builder.launched("gemm", at + 3_000 * US, at + 4_000 * US, at + 15_000 * US)
    found = analyze_rank(builder.build())
    assert [found.microbatches(step) for step in range(2)] == [4, 4]
