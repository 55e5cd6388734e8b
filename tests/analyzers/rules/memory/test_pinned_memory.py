"""Pinned memory: copies from pageable memory for which the step waits."""

from __future__ import annotations

import pytest

from perfscope.analyzers.job.tables.syncs import SyncRow
from perfscope.analyzers.rules.host import host_syncs
from perfscope.analyzers.rules.memory import pinned_memory
from perfscope.recording.metadata import DataLoaderMetadata
from tests.analyzers.rules.jobs import breakdown, context, kernel, runs

PAGEABLE, PINNED = "Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pinned -> Device)"
LOADER = DataLoaderMetadata(num_workers=2)
BLOCKED = SyncRow(
    call="cudaStreamSynchronize", operator="aten::copy_", inside="", idle_us=5_000.0, delayed_us=6_000.0,
    count_per_step=1.0, ranks=(0,),
)  # fmt: skip
ZERO = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}}


def copying(name: str = PAGEABLE, us: float = 4_000.0, exposed: float = 3_000.0, syncs=(BLOCKED,), **others):
    idle = sum(row.idle_us for row in syncs)
    rows = breakdown(0, exposed_copy=exposed, idle_sync=idle)
    others.setdefault("runs", runs(1, loader=LOADER))
    return context(rows, kernels=(kernel(name, us, category="copy", operator_class="copy"),), syncs=syncs, **others)


def test_pageable_copies_fire_with_both_halves_of_the_cure():
    finding = pinned_memory.evaluate(copying())
    assert finding is not None
    assert (finding.action.setting, finding.action.old, finding.action.new) == (
        "DataLoader(pin_memory=…)", "False", "True",
    )  # fmt: skip
    assert "pin_memory=True" in finding.action.how
    assert "non_blocking=True" in finding.action.how
    # 3 ms of the copy that nothing hides and 6 ms behind it, of 100; in one of these the host pauses.
    assert finding.ceiling == pytest.approx(100 / 91 - 1)


def test_the_sync_behind_such_a_copy_is_not_reported_twice():
    assert host_syncs.evaluate(copying()) is None


@pytest.mark.parametrize(
    "job",
    [copying(PINNED), copying(us=100.0, exposed=3_000.0, syncs=()), copying(exposed=0.0, syncs=())],
    ids=["pinned", "other copies are exposed", "hidden"],
)
def test_silent(job):
    assert pinned_memory.evaluate(job) is None


def test_a_loader_that_pins_does_not_know_the_batch_s_type():
    recorded = runs(1, loader=DataLoaderMetadata(num_workers=2, pin_memory=True))
    finding = pinned_memory.evaluate(copying(runs=recorded))
    assert finding is not None
    assert finding.action.new is None
    assert "a method pin_memory()" in finding.action.how


def test_transformers_has_an_argument():
    finding = pinned_memory.evaluate(copying(runs=runs(1, loader=LOADER, transformers={"optim": "adamw_torch"})))
    assert finding is not None
    assert "--dataloader_pin_memory True" in finding.action.how


def test_the_copies_of_an_offloaded_optimizer_are_another_rule_s():
    assert pinned_memory.evaluate(copying(runs=runs(1, deepspeed=ZERO))) is None
