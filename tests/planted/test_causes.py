"""Jobs with planted causes, analyzed as a user would, against what the generator knows to be true of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from perfscope.analyzers.rules.ranks.brief_recording import LONG_US
from perfscope.results.summary import Summary
from perfscope.results.time_breakdown import TimeBreakdown
from tests.analyzers.measured import advised, measured
from tests.generator import (
    MIB,
    MS,
    US,
    Cause,
    HostSpec,
    HostSync,
    Job,
    JobSpec,
    LoaderSpec,
    ModelSpec,
    NetworkSpec,
    Pause,
    SlowCompute,
    SlowCopy,
    SlowHost,
    SlowLink,
    SlowLoader,
    SmallBuckets,
    Truth,
    cpu_job,
    simulate,
)

pytestmark = pytest.mark.scale

A100_BF16_FLOPS = 312e12

QUICK = JobSpec(model=ModelSpec(tokens=2048), end_sync=True, network=NetworkSpec(busbw_gbps=600.0))
"""Steps of about 3.4 ms, the host never ahead of the device by more than a step."""

SLOW_RETURN = HostSpec(sync_return_ns=500 * US)
"""Synchronising calls return late: the device idles under the call itself, so nobody can call that idle time anything
else."""

MANY_LAYERS = JobSpec(
    model=ModelSpec(layers=24, tokens=4096, width=512, hidden=1024, small_kernel_ns=10 * US),
    network=NetworkSpec(alpha_ns=400 * US),
    bucket_bytes=100 * MIB,
)
"""50 MB of gradients in 48 weights, on a network with a long start-up."""


@dataclass(frozen=True)
class Scenario:
    """A job and what must be said about it."""

    name: str
    spec: JobSpec
    stragglers: tuple[Cause, ...] = ()
    """Planted on single ranks: each must be reported with its lost time. Empty: no rank may be."""


SLOW_RANK = SlowCompute(ranks=(2,), factor=1.3)
SLOW_SECOND = replace(SLOW_RANK, ranks=(1,))
SLOW_LOADER = SlowLoader(ranks=(1,), load_ns=40 * MS)
LOADER_EACH_STEP = SlowLoader(ranks=(1,), load_ns=20 * MS)
STALLS = SlowLoader(ranks=(1,), steps=(12, 15), load_ns=90 * MS)
SLOW_HOST = SlowHost(ranks=(3,), factor=16.0)
GC = Pause(ranks=(1,), steps=(12, 15), pause_ns=6 * MS)
EACH_STEP = Pause(ranks=(0,), pause_ns=1 * MS, name="write checkpoint")
COPY = SlowCopy(ranks=(0,), factor=50.0)
EARLY = SlowCompute(ranks=(2,), steps=(10, 11, 12, 13), factor=1.5)
LATE = Pause(ranks=(1,), steps=(14, 15, 16, 17), pause_ns=2 * MS)
CPU_RANK = SlowCompute(ranks=(0,), factor=1.4)
CPU_LOADER = SlowLoader(ranks=(3,), load_ns=80 * MS)
OFFSETS = {0: 1 * MS, 1: -5 * MS, 2: 5 * MS, 3: 3_217_001}

SCENARIOS = (
    Scenario("healthy", JobSpec(noise=0.005)),
    Scenario("healthy with a sync at the end", JobSpec(noise=0.005, end_sync=True)),
    Scenario("healthy fsdp", JobSpec(strategy="fsdp", noise=0.005)),
    Scenario("healthy on cpus", cpu_job(noise=0.005)),
    Scenario("healthy pair", JobSpec(ranks=2, noise=0.005)),
    Scenario("one rank", JobSpec(ranks=1)),
    Scenario("late start", JobSpec(start_skew_ns={2: 3 * MS})),
    Scenario("slow rank", JobSpec(causes=(SLOW_RANK,)), (SLOW_RANK,)),
    Scenario("slow rank of two", JobSpec(ranks=2, causes=(SLOW_SECOND,)), (SLOW_SECOND,)),
    Scenario("slow rank with noise", JobSpec(noise=0.01, causes=(SLOW_RANK,)), (SLOW_RANK,)),
    Scenario("slow rank fsdp", JobSpec(strategy="fsdp", causes=(SLOW_RANK,)), (SLOW_RANK,)),
    Scenario("slow rank, clocks apart", JobSpec(causes=(SLOW_RANK,), clock_offsets_ns=OFFSETS), (SLOW_RANK,)),
    Scenario("slow loader on one rank", JobSpec(causes=(SLOW_LOADER,)), (SLOW_LOADER,)),
    Scenario("loader stalls on one rank", JobSpec(causes=(STALLS,)), (STALLS,)),
    Scenario("slow host on one rank", replace(QUICK, causes=(SLOW_HOST,)), (SLOW_HOST,)),
    Scenario("garbage collection on one rank", replace(QUICK, causes=(GC,)), (GC,)),
    Scenario("pause in each step of one rank", replace(QUICK, causes=(EACH_STEP,)), (EACH_STEP,)),
    Scenario("slow copies on one rank", JobSpec(causes=(COPY,)), (COPY,)),
    Scenario("two causes in turn", replace(QUICK, causes=(EARLY, LATE)), (EARLY, LATE)),
    # Rank 2 is 3 ms slower than its peers, but every step waits longer for rank 1: curing rank 2 would save nothing.
    Scenario(
        "slow rank hidden by a slower loader",
        JobSpec(loader=LoaderSpec(workers=1), causes=(SLOW_RANK, LOADER_EACH_STEP)),
        (LOADER_EACH_STEP,),
    ),
    # The same with two workers: batches come in pairs, so every other step waits for rank 2; alone it still costs
    # nothing, because the pairs come no sooner. In both jobs it is left once rank 1 loads as quickly as its peers.
    Scenario("slow rank between loader stalls", JobSpec(causes=(SLOW_RANK, SLOW_LOADER)), (SLOW_LOADER,)),
    Scenario("starved", JobSpec(causes=(SlowLoader(load_ns=40 * MS),))),
    Scenario("starved without workers", JobSpec(loader=LoaderSpec(workers=0, load_ns=8 * MS), end_sync=True)),
    Scenario("launch-bound", replace(QUICK, causes=(SlowHost(factor=16.0),))),
    Scenario("sync in each step", replace(QUICK, host=SLOW_RETURN, causes=(HostSync(),))),
    Scenario("slow link", JobSpec(causes=(SlowLink(factor=10.0),))),
    Scenario("small buckets", replace(MANY_LAYERS, causes=(SmallBuckets(bucket_bytes=3 * MIB),))),
    Scenario("clocks apart", JobSpec(clock_offsets_ns=OFFSETS, network=NetworkSpec(end_jitter_ns=3 * US))),
    Scenario("slow rank on cpus", cpu_job(causes=(CPU_RANK,)), (CPU_RANK,)),
    Scenario("slow loader on cpus", cpu_job(causes=(CPU_LOADER,)), (CPU_LOADER,)),
    Scenario("starved on cpus", cpu_job(causes=(SlowLoader(load_ns=80 * MS),))),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A scenario, simulated and analyzed."""

    scenario: Scenario
    job: Job
    summary: Summary

    @property
    def truth(self) -> Truth:
        return self.job.truth

    def account(self) -> Iterator[tuple[int, TimeBreakdown]]:
        """(rank, row) of every rank."""
        assert [row.rank for row in self.summary.time_breakdown] == list(range(self.job.spec.ranks))
        return ((row.rank, row) for row in self.summary.time_breakdown)

    @property
    def tolerance_us(self) -> float:
        """1 us or 1 % of the step, whichever is more."""
        return max(1.0, self.truth.step_time_ns / 1e3 * 0.01)


@pytest.fixture(scope="module", params=SCENARIOS, ids=lambda scenario: scenario.name)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    scenario: Scenario = request.param
    job = simulate(scenario.spec)
    folder = tmp_path_factory.mktemp("job")
    job.write(folder)
    return Case(scenario, job, advised(folder))


def test_every_rank_and_step_is_used(case: Case) -> None:
    assert case.summary.job.ranks == tuple(range(case.job.spec.ranks))
    assert case.summary.job.failures == ()
    assert case.summary.job.missing_ranks == ()
    assert case.summary.job.steps == case.job.spec.recorded_steps


def test_step_time(case: Case) -> None:
    assert case.summary.job.step_time_us == pytest.approx(case.truth.step_time_ns / 1e3, rel=0.001)
    each = [step_ns / 1e3 for step_ns in case.truth.steps_ns]
    assert case.summary.job.step_time_us_per_step == pytest.approx(each, rel=0.001)
    assert statistics.fmean(case.summary.job.step_time_us_per_step) == pytest.approx(case.summary.job.step_time_us)


def test_account_adds_up(case: Case) -> None:
    case.summary.self_check()
    for _, row in case.account():
        assert math.fsum(row.categories().values()) == pytest.approx(row.step_time_us, abs=1e-6)
        assert min(row.categories().values()) >= 0
        assert row.hidden_comm_us >= 0


def test_account_is_true(case: Case) -> None:
    for rank, row in case.account():
        assert row.step_time_us == pytest.approx(case.truth.step_ns(rank) / 1e3, abs=case.tolerance_us)
        for name in ("compute", "exposed_copy", "idle_dataloader", "idle_dependency"):
            assert row.categories()[name] == pytest.approx(
                case.truth.mean_ns(rank, name) / 1e3, abs=case.tolerance_us
            ), name
        assert row.idle_unknown_us <= 0.02 * row.step_time_us


def test_account_of_the_host_is_true(case: Case) -> None:
    for rank, row in case.account():
        means = {name: case.truth.mean_ns(rank, name) / 1e3 for name in ("idle_sync", "idle_launch", "idle_host")}
        windows = case.truth.windows[rank]
        # What follows a synchronising call until the next launch arrives may be charged to it.
        after_sync = sum(window.idle_after_sync_ns for window in windows) / len(windows) / 1e3
        slack = max(0.0, after_sync - means["idle_sync"]) + case.tolerance_us
        assert means["idle_sync"] - case.tolerance_us <= row.idle_sync_us <= means["idle_sync"] + slack
        assert means["idle_launch"] - slack <= row.idle_launch_us <= means["idle_launch"] + case.tolerance_us
        assert means["idle_host"] - slack <= row.idle_host_us <= means["idle_host"] + case.tolerance_us
        together = row.idle_sync_us + row.idle_launch_us + row.idle_host_us + row.idle_unknown_us
        assert together == pytest.approx(sum(means.values()), abs=case.tolerance_us)


def test_account_of_communication_is_true(case: Case) -> None:
    for rank, row in case.account():
        windows = case.truth.windows[rank]
        wait, transfer = (case.truth.mean_ns(rank, f"exposed_comm_{part}") / 1e3 for part in ("wait", "transfer"))
        mixed = sum(window.mixed_comm_ns for window in windows) / len(windows) / 1e3
        assert row.comm_us == pytest.approx(sum(w.comm_ns for w in windows) / len(windows) / 1e3, abs=case.tolerance_us)
        exposed = row.exposed_comm_wait_us + row.exposed_comm_transfer_us
        assert exposed == pytest.approx(wait + transfer, abs=case.tolerance_us)
        # While one collective waits and another transfers, either name will do.
        assert wait - case.tolerance_us <= row.exposed_comm_wait_us <= wait + mixed + case.tolerance_us
        assert not row.wait_is_bound


def test_clocks_are_aligned(case: Case) -> None:
    if case.job.spec.ranks == 1:
        return
    assert [row.rank for row in case.summary.clock] == list(range(case.job.spec.ranks))
    for row in case.summary.clock:
        assert row.aligned
        assert row.offset_us == pytest.approx(case.truth.clock_correction_ns[row.rank] / 1e3, abs=50)
        assert row.residual_us is not None
        assert row.residual_us < 50


def test_collectives_are_matched_and_measured(case: Case) -> None:
    found = {(_plain(row.kind), row.bytes): row for row in case.summary.collectives}
    assert len(found) == len(case.summary.collectives)
    assert set(found) == {(_plain(true.kind), true.bytes) for true in case.truth.collectives}
    for true in case.truth.collectives:
        row = found[_plain(true.kind), true.bytes]
        assert row.ranks == tuple(range(case.job.spec.ranks))
        assert row.complete
        assert row.count == true.count
        assert row.wait_us == pytest.approx(true.wait_ns / 1e3, abs=case.tolerance_us)
        # Where ranks leave one after another, the transfer may be said to end with the first or with the last.
        longest_ns = true.transfer_ns + case.job.spec.network.end_jitter_ns
        assert true.transfer_ns / 1e3 * 0.99 <= row.transfer_us <= longest_ns / 1e3 * 1.01
        assert row.algbw_gbps is not None
        assert true.bytes / longest_ns * 0.98 <= row.algbw_gbps <= true.bytes / true.transfer_ns * 1.02
        assert row.busbw_gbps == pytest.approx(row.algbw_gbps * _wire_factor(case, true.kind), rel=1e-9)
        if case.scenario.stragglers == (SLOW_RANK,):
            assert row.last_arriver[2] == pytest.approx(true.last_arriver[2], abs=0.01)


def test_the_stragglers_are_reported(case: Case) -> None:
    found = {(row.rank, row.cause): row for row in case.summary.stragglers}
    assert len(found) == len(case.summary.stragglers)
    lost = [row.lost_us for row in case.summary.stragglers]
    assert lost == sorted(lost, reverse=True)
    if not case.scenario.stragglers:
        assert not found
        return
    expected = {(cause.ranks[0], cause.category): cause for cause in case.scenario.stragglers if cause.ranks}
    # No other rank is reported, not even for little.
    assert set(found) == set(expected)
    for key, cause in expected.items():
        row, alone = found[key], case.job.lost_ns(cause) / 1e3
        if row.causes:  # It hides other causes, whose ranks are reported with it.
            assert {rank for other in case.scenario.spec.causes for rank in other.ranks or ()} == set(row.ranks)
            assert row.lost_us == pytest.approx(case.job.lost_ns(*case.scenario.spec.causes) / 1e3, rel=0.05)
            assert row.alone_us[row.ranks.index(row.rank)] == pytest.approx(alone, rel=0.05)
        else:
            assert row.lost_us == pytest.approx(alone, rel=0.05)
        # One slow batch does not show how fast the other ranks load, once they need not wait for this one.
        one_batch = row.cause == "dataloader" and len(row.steps) == 1
        # And in a part of a second all operators of a rank on a CPU may take longer by what else runs there.
        recorded_us = sum(case.summary.job.step_time_us_per_step)
        brief = case.summary.job.devices == ("CPU",) and row.cause == "compute" and recorded_us < LONG_US
        assert row.confidence in (("low",) if one_batch or brief else ("medium", "high"))


def test_the_unchanged_replay_is_the_recording(case: Case) -> None:
    assert case.summary.replay.measured_step_us == case.summary.job.step_time_us
    assert case.summary.replay.error == pytest.approx(0.0, abs=1e-6)


def test_stragglers_are_a_finding(case: Case) -> None:
    straggling = [finding for finding in case.summary.findings if "straggl" in finding.rule]
    assert bool(straggling) == bool(case.scenario.stragglers)
    if straggling:
        worst = case.summary.stragglers[0]
        assert worst.rank in {rank for evidence in straggling[0].evidence for rank in evidence.ranks}


def test_healthy_jobs_are_called_healthy(case: Case) -> None:
    if not case.scenario.name.startswith("healthy"):
        return
    assert case.summary.verdict.healthy
    assert [(finding.rule, finding.severity) for finding in case.summary.findings if finding.severity != "info"] == []


def test_starved_jobs_are_told_so(case: Case) -> None:
    loading = [finding for finding in case.summary.findings if "dataloader" in finding.rule]
    starved = case.scenario.name.startswith("starved")
    # One rank's loader is that rank's trouble: a straggler, whatever the loader's rule says of it.
    if starved:
        assert loading
        assert loading[0].severity in ("medium", "high")
        assert not case.summary.verdict.healthy
    elif "loader" not in case.scenario.name:
        assert not loading


def test_small_buckets_are_told_so(case: Case) -> None:
    if case.scenario.name == "small buckets":
        (found,) = [finding for finding in case.summary.findings if "bucket" in finding.rule]
        assert found.severity in ("medium", "high")
        assert "bucket_cap_mb" in found.action.setting


def test_dataloader_times(case: Case) -> None:
    assert [row.rank for row in case.summary.dataloader] == list(range(case.job.spec.ranks))
    for row in case.summary.dataloader:
        deliveries = case.truth.deliveries[row.rank]
        wait = sum(delivery.end_ns - delivery.start_ns for delivery in deliveries) / len(deliveries) / 1e3
        assert row.wait_us == pytest.approx(wait, abs=case.tolerance_us)
        blocking = case.truth.mean_ns(row.rank, "idle_dataloader") / 1e3
        assert row.blocking_us == pytest.approx(blocking, abs=case.tolerance_us)
        if row.batch_us is not None and len({delivery.load_ns for delivery in deliveries}) == 1:
            assert row.batch_us == pytest.approx(deliveries[0].load_ns / 1e3, rel=0.1)


def test_cost_model(case: Case) -> None:
    network, fitted = case.job.spec.network, {_plain(row.kind): row for row in case.summary.cost_model}
    sizes = {true.bytes for true in case.truth.collectives}
    if len(sizes) < 2 or network.end_jitter_ns:
        return
    busbw_gbps = network.busbw_gbps / case.job.spec.link_factor(case.job.spec.first_step)
    assert fitted["allreduce"].alpha_us == pytest.approx(network.alpha_ns / 1e3, rel=0.1)
    assert fitted["allreduce"].busbw_gbps == pytest.approx(busbw_gbps, rel=0.1)
    assert fitted["allreduce"].residual < 0.02


def test_utilisation(case: Case) -> None:
    found = case.summary.utilisation
    assert found.model_flops_per_step == pytest.approx(case.truth.flops_per_step, rel=0.03)
    if case.job.spec.backend == "gloo":
        assert found.mfu is None
        assert found.why_absent
        return
    available = case.truth.step_time_ns / 1e9 * case.job.spec.ranks * A100_BF16_FLOPS
    assert found.mfu == pytest.approx(case.truth.flops_per_step / available, rel=0.03)
    assert found.peak_tflops == pytest.approx(A100_BF16_FLOPS / 1e12)


def test_critical_path_adds_up(case: Case) -> None:
    path = case.summary.critical_path
    if path is not None:
        assert math.fsum(row.us for row in path) == pytest.approx(case.summary.job.step_time_us, rel=1e-9)


def test_few_steps_are_weak_evidence(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("short")
    simulate(JobSpec(steps=3, causes=(SLOW_RANK,))).write(folder)

    (row,) = advised(folder).stragglers

    assert (row.rank, row.cause, row.confidence) == (2, "compute", "low")


def test_a_missing_rank_makes_waits_a_bound(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("partial")
    job = simulate(JobSpec(causes=(SLOW_RANK,)))
    job.write(folder)[2].unlink()

    summary = measured(folder)

    assert summary.job.missing_ranks == (2,)
    assert [row.rank for row in summary.time_breakdown] == [0, 1, 3]
    for row in summary.time_breakdown:
        exposed = sum(job.truth.mean_ns(row.rank, f"exposed_comm_{part}") for part in ("wait", "transfer")) / 1e3
        assert row.exposed_comm_wait_us + row.exposed_comm_transfer_us == pytest.approx(exposed, abs=1)
        assert row.wait_is_bound
    assert not any(row.complete for row in summary.collectives)
    assert not summary.stragglers


def _plain(kind: str) -> str:
    """One spelling for a kind of collective, whoever writes it."""
    plain = kind.lower().replace("_", "").replace("-", "")
    return plain.removesuffix("base")


def _wire_factor(case: Case, kind: str) -> float:
    ranks = case.job.spec.ranks
    return (2.0 if _plain(kind) == "allreduce" else 1.0) * (ranks - 1) / ranks
