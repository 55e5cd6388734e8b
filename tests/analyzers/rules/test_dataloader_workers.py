"""The number of workers, as each framework is told it; when it is asked for is tested in ``test_rules``."""

from __future__ import annotations

import pytest

from perfscope.analyzers.rules import dataloader_workers
from perfscope.summary import DataLoaderRow
from tests.analyzers.rules.jobs import account, facts, runs


@pytest.mark.parametrize(
    ("settings", "typed"),
    [
        ({}, "DataLoader(dataset, …, num_workers=4, persistent_workers=True)."),
        ({"transformers": {"bf16": True}}, "--dataloader_num_workers 4 --dataloader_persistent_workers True."),
        ({"megatron": {"bf16": True}}, "--num-workers 4."),
        ({"lightning": {"precision": "bf16-mixed"}}, "DataLoader(dataset, …, num_workers=4, persistent_workers=True)."),
    ],
)
def test_the_framework_s_own_words(settings, typed):
    # Loading takes 80 ms, the rest of the step 20 ms: 4 workers finish a batch every 20 ms.
    row = DataLoaderRow(rank=0, wait_us=80_000.0, blocking_us=80_000.0, batch_us=80_000.0, num_workers=0)
    finding = dataloader_workers.evaluate(
        facts(account(0, idle_dataloader=80_000.0), dataloader=(row,), runs=runs(1, **settings))
    )
    assert finding is not None
    assert finding.action.how == typed
