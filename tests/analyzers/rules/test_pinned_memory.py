"""Pinned memory and offload: copies between host and device that hold the step up."""

from __future__ import annotations

import pytest

from perfscope.analyzers.rules import host_syncs, offload, pinned_memory
from perfscope.analyzers.work.sync_table import SyncRow
from perfscope.metadata import DataLoaderRecord
from tests.analyzers.rules.jobs import account, facts, kernel, runs

PAGEABLE, PINNED = "Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pinned -> Device)"
LOADER = DataLoaderRecord(num_workers=2)
BLOCKED = SyncRow(
    call="cudaStreamSynchronize", operator="aten::copy_", inside="", idle_us=6_000.0, count_per_step=1.0, ranks=(0,)
)
ZERO = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}}


def copying(name: str = PAGEABLE, us: float = 4_000.0, exposed: float = 3_000.0, syncs=(BLOCKED,), **others):
    idle = sum(row.idle_us for row in syncs)
    rows = account(0, exposed_copy=exposed, idle_sync=idle)
    others.setdefault("runs", runs(1, loader=LOADER))
    return facts(rows, kernels=(kernel(name, us, category="copy", operator_class="copy"),), syncs=syncs, **others)


class TestPinnedMemory:
    def test_pageable_copies_fire_with_both_halves_of_the_cure(self):
        finding = pinned_memory.evaluate(copying())
        assert finding is not None
        assert (finding.action.setting, finding.action.old, finding.action.new) == (
            "DataLoader(pin_memory=…)", "False", "True",
        )  # fmt: skip
        assert "pin_memory=True" in finding.action.how
        assert "non_blocking=True" in finding.action.how
        # 3 ms of the copy that nothing hides and 6 ms behind it, of 100.
        assert finding.ceiling == pytest.approx(100 / 91 - 1)

    def test_the_sync_behind_such_a_copy_is_not_reported_twice(self):
        assert host_syncs.evaluate(copying()) is None

    @pytest.mark.parametrize(
        "job",
        [copying(PINNED), copying(us=100.0, exposed=3_000.0, syncs=()), copying(exposed=0.0, syncs=())],
        ids=["pinned", "other copies are exposed", "hidden"],
    )
    def test_silent(self, job):
        assert pinned_memory.evaluate(job) is None

    def test_a_loader_that_pins_does_not_know_the_batch_s_type(self):
        told = runs(1, loader=DataLoaderRecord(num_workers=2, pin_memory=True))
        finding = pinned_memory.evaluate(copying(runs=told))
        assert finding is not None
        assert finding.action.new is None
        assert "a method pin_memory()" in finding.action.how

    def test_transformers_has_an_argument(self):
        finding = pinned_memory.evaluate(copying(runs=runs(1, loader=LOADER, transformers={"optim": "adamw_torch"})))
        assert finding is not None
        assert finding.action.how == "--dataloader_pin_memory True"

    def test_the_copies_of_an_offloaded_optimizer_are_another_rule_s(self):
        assert pinned_memory.evaluate(copying(runs=runs(1, deepspeed=ZERO))) is None


class TestOffload:
    def test_deepspeed_s_json_as_it_has_to_be(self):
        finding = offload.evaluate(copying(exposed=20_000.0, syncs=(), runs=runs(1, deepspeed=ZERO)))
        assert finding is not None
        assert (finding.action.setting, finding.action.new) == ('"offload_optimizer"', "pinned")
        assert '"offload_optimizer": {"device": "cpu", "pin_memory": true}' in finding.action.how
        assert '"offload_optimizer": {"device": "none"}' in finding.action.how
        assert finding.ceiling == pytest.approx(100 / 80 - 1)

    def test_pinned_already_it_can_only_be_turned_off(self):
        pinned = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": True}}}
        finding = offload.evaluate(copying(exposed=20_000.0, syncs=(), runs=runs(1, deepspeed=pinned)))
        assert finding is not None
        assert (finding.action.old, finding.action.new) == ("cpu", "on the device")
        assert "pin_memory" not in finding.action.how

    @pytest.mark.parametrize(
        ("settings", "typed"),
        [
            ({"fsdp": {"version": 1, "cpu_offload": True}}, "cpu_offload=None"),
            ({"fsdp": {"version": 2, "offload": True}}, "without offload_policy"),
            ({"megatron": {"optimizer_cpu_offload": True}}, "without --optimizer-cpu-offload"),
        ],
    )
    def test_other_frameworks(self, settings, typed):
        finding = offload.evaluate(copying(exposed=20_000.0, syncs=(), runs=runs(1, **settings)))
        assert finding is not None
        assert typed in finding.action.how

    def test_silent_where_copies_are_hidden_or_nothing_is_offloaded(self):
        assert offload.evaluate(copying(exposed=4_900.0, syncs=(), runs=runs(1, deepspeed=ZERO))) is None
        assert offload.evaluate(copying(exposed=20_000.0, syncs=())) is None
        on_device = {"zero_optimization": {"offload_optimizer": {"device": "none"}}}
        assert offload.evaluate(copying(exposed=20_000.0, syncs=(), runs=runs(1, deepspeed=on_device))) is None
