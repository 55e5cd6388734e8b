"""Offload: copies of parameters and optimizer states that are exposed, and what to write instead."""

from __future__ import annotations

import pytest

from perfscope.analyzers.job.tables.syncs import SyncRow
from perfscope.analyzers.rules.host import host_syncs
from perfscope.analyzers.rules.memory import offload
from perfscope.results.tables import ModuleRow
from tests.analyzers.rules.jobs import breakdown, context, kernel, runs
from tests.analyzers.rules.memory.test_pinned_memory import ZERO, copying


def test_deepspeed_s_json_as_it_has_to_be():
    finding = offload.evaluate(copying(exposed=20_000.0, syncs=(), runs=runs(1, deepspeed=ZERO)))
    assert finding is not None
    assert (finding.action.setting, finding.action.new) == ('"offload_optimizer"', "pinned")
    assert '"offload_optimizer": {"device": "cpu", "pin_memory": true}' in finding.action.how
    assert '"offload_optimizer": {"device": "none"}' in finding.action.how
    assert finding.ceiling == pytest.approx(100 / 80 - 1)


def test_pinned_already_it_can_only_be_turned_off():
    pinned = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": True}}}
    finding = offload.evaluate(copying(exposed=20_000.0, syncs=(), runs=runs(1, deepspeed=pinned)))
    assert finding is not None
    assert (finding.action.old, finding.action.new) == ("cpu", "on the device")
    assert "pin_memory" not in finding.action.how


@pytest.mark.parametrize(
    ("settings", "typed"),
    [
        ({"fsdp": {"version": 1, "cpu_offload": True}}, "cpu_offload=None"),
        ({"fsdp": {"version": 2, "offload": True}}, "offload_policy=OffloadPolicy()"),
        ({"megatron": {"optimizer_cpu_offload": True}}, "without --optimizer-cpu-offload"),
    ],
)
def test_other_frameworks(settings, typed):
    finding = offload.evaluate(copying(exposed=20_000.0, syncs=(), runs=runs(1, **settings)))
    assert finding is not None
    assert typed in finding.action.how


def test_silent_where_copies_are_hidden_or_nothing_is_offloaded():
    assert offload.evaluate(copying(exposed=4_900.0, syncs=(), runs=runs(1, deepspeed=ZERO))) is None
    assert offload.evaluate(copying(exposed=20_000.0, syncs=())) is None
    on_device = {"zero_optimization": {"offload_optimizer": {"device": "none"}}}
    assert offload.evaluate(copying(exposed=20_000.0, syncs=(), runs=runs(1, deepspeed=on_device))) is None


@pytest.mark.parametrize(
    ("to_device", "to_host", "fires"),
    [(10_000.0, 10_000.0, True), (4_000.0, 9_000.0, False), (10_000.0, 3_000.0, False), (0.0, 9_000.0, False)],
)
def test_without_settings_copies_both_ways_tell(to_device: float, to_host: float, *, fires: bool) -> None:
    """A batch is copied one way, and so are outputs."""
    copy = {"category": "copy", "operator_class": "copy"}
    rows = (
        kernel("Memcpy HtoD (Pinned -> Device)", to_device, **copy),
        kernel("Memcpy DtoH (Device -> Pinned)", to_host, **copy),
    )
    finding = offload.evaluate(context(breakdown(0, exposed_copy=20_000.0), kernels=rows))
    assert (finding is not None) is fires
    if finding is not None:
        assert finding.ceiling == pytest.approx(100 / 80 - 1)
        assert "save_on_cpu" in finding.action.how


@pytest.mark.parametrize(
    ("launched", "name", "fires"),
    [
        (0.0, "AdamW", True),
        (6.0, "AdamW", False),
        (0.15, "AdamW", True),
        (6.0, "DeepSpeedCPUAdam", True),
    ],
    ids=["nothing", "kernels", "what follows counts to it now and then", "copies, under a name of the CPU's"],
)
def test_an_optimizer_that_launches_nothing_computes_on_the_cpu(launched: float, name: str, *, fires: bool) -> None:
    """30 ms of each step of 100: the devices wait, behind a synchronization for the gradients."""
    step = ModuleRow(
        name=f"Optimizer.step#{name}.step", depth=0, count_per_step=1.0, host_us_per_step=30_000.0,
        device_us_per_step=0.0, kernels_per_step=launched,
    )  # fmt: skip
    waits = SyncRow(
        call="cudaEventSynchronize", operator="", inside="", idle_us=31_000.0, delayed_us=31_000.0,
        count_per_step=1.0, ranks=(0,),
    )  # fmt: skip
    job = context(breakdown(0, idle_sync=31_000.0, exposed_copy=10_000.0), modules=(step,), syncs=(waits,))
    finding = offload.evaluate(job)
    assert (finding is not None) is fires
    assert (host_syncs.evaluate(job) is None) is fires
    if finding is not None:
        assert finding.title == (
            "The optimizer computes on the CPU: devices wait for it for 30% of the step, and copies to and from it for "
            "10%"
        )
        assert finding.ceiling == pytest.approx(100 / 60 - 1)
        assert ("DeepSpeedCPUAdam" in finding.action.how) is (name == "AdamW")
