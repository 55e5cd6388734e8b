"""Host syncs: what runs devices dry is named with the call that does it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perfscope.analyzers.job.tables.syncs import SyncRow
from perfscope.analyzers.rules.host import host_syncs
from perfscope.results.findings import Prediction
from tests.analyzers.measured import advised
from tests.analyzers.rules.jobs import QUICK, Analyzed, analyze, breakdown, changed, context, runs
from tests.emulator.changes import apply
from tests.emulator.emulate import emulate, step_ns
from tests.emulator.spec import Cause, Job, Model
from tests.generator import US, HostSpec, HostSync, step_time_ns

LATE_RETURN = HostSpec(sync_return_ns=500 * US)


@pytest.fixture(scope="module")
def synced(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    return analyze(replace(QUICK, host=LATE_RETURN, causes=(HostSync(),)), tmp_path_factory.mktemp("synced"))


@pytest.fixture(scope="module")
def on_one(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    spec = replace(QUICK, host=LATE_RETURN, end_sync=False, causes=(HostSync(ranks=(1,)),))
    return analyze(spec, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    return analyze(QUICK, tmp_path_factory.mktemp("printed"))


def sync(operator: str, idle_us: float, call: str = "cudaStreamSynchronize", inside: str = "") -> SyncRow:
    return SyncRow(
        call=call, operator=operator, inside=inside, idle_us=idle_us, delayed_us=idle_us, count_per_step=1.0, ranks=(0,)
    )


def test_item_in_every_step_is_named_with_its_place_and_cost(synced):
    (finding,) = [found for found in synced.summary.findings if found.rule == host_syncs.RULE]
    assert "aten::_local_scalar_dense" in finding.title
    assert ".item()" in finding.action.setting
    assert "loss.detach()" in finding.action.how
    idle = synced.summary.time_breakdown[0].idle_sync_us
    evidence = {row.what: row.value for row in finding.evidence}
    assert evidence["device idle after host synchronization (median)"] == pytest.approx(idle)
    (place,) = [what for what in evidence if what.startswith("of that in")]
    assert evidence[place] == pytest.approx(idle, rel=0.01)
    assert "cudaStreamSynchronize" in place
    step = synced.summary.job.step_time_us
    # A host that does not wait also runs ahead, which the idle time after its waits does not hold: the next test.
    assert step - idle > finding.predicted_step_us.mid
    assert finding.ceiling == pytest.approx(step / finding.predicted_step_us.mid - 1)
    assert (finding.obtained, finding.confidence) == ("replayed", "high")


def test_the_replay_without_syncs_is_what_the_step_takes_without(synced):
    (finding,) = [found for found in synced.summary.findings if found.rule == host_syncs.RULE]
    without = step_time_ns(replace(QUICK, host=LATE_RETURN, end_sync=False)) / 1e3
    assert finding.whatif == {"host.sync": "0"}
    assert finding.predicted_step_us.mid == pytest.approx(without, rel=0.02)


def test_calls_are_counted_once_however_their_idle_time_is_cut(synced):
    # One .item() between forward and backward, one after the optimizer.
    (row,) = synced.context.syncs
    assert 1.5 <= row.count_per_step <= 2.0
    assert row.ranks == (0, 1, 2, 3)


def test_a_loss_printed_once_a_step_is_no_defect(printed):
    assert printed.context.syncs
    assert host_syncs.RULE not in printed.rules


def test_one_rank_that_blocks_is_left_to_the_stragglers(on_one):
    assert on_one.summary.time_breakdown[1].idle_sync_us > 0.05 * on_one.summary.job.step_time_us
    assert host_syncs.evaluate(on_one.context) is None


@pytest.mark.parametrize(
    ("operator", "setting", "how"),
    [
        ("aten::nonzero", "nonzero in the step", "torch.where"),
        ("aten::_to_copy", "copies to the host in the step", "non_blocking=True"),
        ("", "synchronize() in the step", "torch.cuda.synchronize()"),
    ],
)
def test_each_kind_has_its_own_cure(operator, setting, how):
    finding = host_syncs.evaluate(context(breakdown(0, idle_sync=8_000.0), syncs=(sync(operator, 8_000.0),)))
    assert finding is not None
    assert finding.action.setting == setting
    assert how in finding.action.how


def test_fires_from_four_percent():
    def told(idle_us):
        return host_syncs.evaluate(context(breakdown(0, idle_sync=idle_us), syncs=(sync("aten::item", idle_us),)))

    assert told(3_900.0) is None
    assert told(4_100.0) is not None


def test_fsdp_s_limit_on_gathers_is_no_sync_of_the_script():
    waits = sync("", 8_000.0, call="cudaEventSynchronize", inside="FullyShardedDataParallel.rate_limiter")
    assert host_syncs.evaluate(context(breakdown(0, idle_sync=8_000.0), syncs=(waits,))) is None
    both = context(breakdown(0, idle_sync=16_000.0), syncs=(waits, sync("aten::item", 8_000.0)))
    finding = host_syncs.evaluate(both)
    assert finding is not None
    assert "8%" in finding.title
    assert not any("rate_limiter" in row.what for row in finding.evidence)


def test_launches_that_are_set_to_block_are_not_the_script_s_syncs():
    recorded = runs(1, environment={"CUDA_LAUNCH_BLOCKING": "1"})
    blocked = context(breakdown(0, idle_sync=30_000.0), syncs=(sync("", 30_000.0),), runs=recorded)
    assert host_syncs.evaluate(blocked) is None


def test_deepspeed_s_timers_are_distinguished_from_the_script(synced):
    recorded = synced.with_settings(deepspeed={"config": {"wall_clock_breakdown": True}})
    finding = host_syncs.evaluate(recorded)
    assert finding is not None
    assert '"wall_clock_breakdown": false' in finding.action.how


def test_a_copy_of_which_no_operator_is_known_is_no_explicit_synchronization():
    case = context(breakdown(0, idle_sync=10_000), syncs=(sync("", 10_000, call="hipMemcpyWithStream"),))
    finding = host_syncs.evaluate(case)
    assert finding is not None
    assert finding.action.setting == "copies to the host in the step"
    assert ".item()" in finding.action.how
    assert "synchronize()" not in finding.action.how


def test_memory_that_is_freed_in_the_step_is_not_the_operator_s_doing():
    case = context(breakdown(0, idle_sync=10_000), syncs=(sync("aten::empty", 10_000, call="cudaFree"),))
    finding = host_syncs.evaluate(case)
    assert finding is not None
    assert finding.action.setting == "memory freed in the step"
    assert "empty_cache" in finding.action.how


@pytest.mark.scale
@pytest.mark.parametrize(("loads", "fires"), [(0.12, True), (0.01, False)])
def test_waits_that_keep_hosts_from_running_ahead_are_told_by_what_the_step_takes_without(
    loads: float, fires: bool, tmp_path: Path
) -> None:
    """On the second simulator: every loss is read; one host pauses in every other step, and all load their batches,
    which hosts that run ahead of their devices make up for. Right after the waits devices hardly idle. Where the pauses
    are all there is to make up for, they are what is told.
    """
    job = Job(ranks=2, ranks_per_host=2, item_every=1, noise=0.0, model=Model(blocks=6, tokens=4096))
    usual_ns = step_ns(job)
    loader = replace(job.loader, workers=0, load_ns=round(loads * usual_ns), jitter=0.0)
    pause = Cause("pause", 0.3 * usual_ns, (1,), every=2, how="log")
    job = replace(job, causes=(pause,), loader=loader, recording=replace(job.recording, steps=4))
    emulate(job).write(tmp_path)
    summary = advised(tmp_path)
    assert all(row.idle_sync_us < 0.05 * summary.job.step_time_us for row in summary.time_breakdown)
    found = [finding for finding in summary.findings if finding.rule == host_syncs.RULE]
    assert len(found) == fires
    applied = apply(job, {"host.sync": "0"})
    assert applied is not None
    truth = step_ns(applied.job) / 1e3
    for finding in found:
        assert finding.whatif == {"host.sync": "0"}
        assert finding.predicted_step_us.mid == pytest.approx(truth, rel=0.02)


def test_one_rank_that_waits_is_no_reason_why_hosts_cannot_run_ahead(synced):
    quick = Prediction(low=1.0, mid=0.5 * synced.context.step_time_us, high=2e9)
    rows = (sync("aten::item", 10.0),)
    job = replace(synced.context, predict=lambda settings: quick if "host.sync" in settings else None)
    assert host_syncs._cannot_run_ahead(job, rows) is None
    everywhere = (replace(rows[0], ranks=(0, 1, 2, 3)),)
    finding = host_syncs._cannot_run_ahead(job, everywhere)
    assert finding is not None
    assert "50% less" in finding.title
    assert host_syncs._cannot_run_ahead(replace(synced.context, predict=lambda _: None), everywhere) is None
    assert host_syncs._cannot_run_ahead(changed(job, steps=(10,)), everywhere) is None
