"""The model as the run records it: the blocks that strategies shard by."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from perfscope.collectors.describe.model import describe_model  # noqa: E402
from perfscope.collectors.discovery import JobObjects  # noqa: E402

BLOCK_BYTES = 4 * (2 * 8 * 8 + 2 * 8)


def block() -> Any:
    """Two layers of 8 in, 8 out."""
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))


def block_sizes(*modules: Any) -> tuple[int, ...]:
    root = torch.nn.ModuleList(modules)
    record = describe_model(JobObjects(roots=[root], modules=list(root.modules())))
    assert record is not None
    assert record.trainable_bytes == sum(record.trainable_sizes)
    return record.block_sizes


def test_repeated_blocks_and_not_what_lies_beside_or_inside_them() -> None:
    blocks = torch.nn.ModuleList([block() for _ in range(3)])
    # The embedding is larger than all blocks together.
    assert block_sizes(torch.nn.Embedding(1000, 8), blocks, torch.nn.Linear(8, 10)) == (BLOCK_BYTES,) * 3


def test_frozen_parameters_are_not_counted() -> None:
    blocks = torch.nn.Sequential(block(), block())
    for parameter in blocks[0][0].parameters():
        parameter.requires_grad = False
    assert block_sizes(torch.nn.Embedding(10, 8), blocks) == (BLOCK_BYTES // 2, BLOCK_BYTES)


def test_none_where_nothing_repeats() -> None:
    assert block_sizes(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 8), block()) == ()
