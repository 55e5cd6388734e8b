"""NCCL's environment: variables that hold it back, and links that it does not use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perfscope.analyzers.rules.communication import nccl_environment
from perfscope.results.rows import CollectiveRow, StragglerRow
from perfscope.results.tables import GroupRow
from tests.analyzers.rules.bare import Bare, found
from tests.analyzers.rules.jobs import Analyzed, analyze, breakdown, context, runs
from tests.generator import JobSpec, SlowLink, simulate

SLOW = SlowLink(factor=10.0)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    """NVLink's 300 GB/s, of which 23 are used: what shared memory of the host gives."""
    return analyze(JobSpec(causes=(SLOW,)), tmp_path_factory.mktemp("slow"))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    return analyze(JobSpec(), tmp_path_factory.mktemp("healthy"))


def exposed(transfer_us: float, variables: dict[str, str], hosts: int = 1, busbw_gbps: float = 230.0, across=False):
    row = CollectiveRow(
        group="0", ranks=(0, 1), kind="all_reduce", dtype="bfloat16", bytes=64 << 20, count=8, transfer_us=400.0,
        wait_us=0.0, algbw_gbps=busbw_gbps, busbw_gbps=busbw_gbps, last_arriver={},
    )  # fmt: skip
    group = GroupRow(name="0", ranks=(0, 1), role="data", role_from="test", comm_us=1.0, across_hosts=across)
    recorded = {rank: replace(run, host=f"node{rank % hosts}") for rank, run in runs(2, environment=variables).items()}
    rows = [breakdown(rank, exposed_comm_transfer=transfer_us) for rank in range(2)]
    return context(*rows, runs=recorded, collectives=(row,), groups=(group,))


def test_a_link_that_is_not_used_fires_with_the_replay_of_one_that_is(slow):
    (finding,) = [found for found in slow.summary.findings if found.rule == nccl_environment.RULE]
    assert "22.8 of 300 GB/s (NVLink)" in finding.title
    job = simulate(JobSpec(causes=(SLOW,)))
    fixed_us = (job.truth.step_time_ns - job.lost_ns(SLOW)) / 1e3
    assert finding.predicted_step_us.mid == pytest.approx(fixed_us, rel=0.02)
    assert (finding.obtained, finding.confidence) == ("replayed", "medium")
    assert "NCCL_DEBUG=INFO" in finding.action.how
    assert "--ipc=host" in finding.action.how


def test_nvlink_at_its_usual_pace_is_silent(healthy):
    assert nccl_environment.RULE not in healthy.rules
    assert nccl_environment.evaluate(exposed(20_000.0, {})) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("NCCL_P2P_DISABLE", "1"), ("NCCL_ALGO", "Tree"), ("NCCL_PROTO", "LL"), ("TORCH_NCCL_BLOCKING_WAIT", "1")],
)
def test_each_variable_is_named_with_what_to_do(name, value):
    finding = nccl_environment.evaluate(exposed(6_000.0, {name: value}))
    assert finding is not None
    assert (finding.action.setting, finding.action.old) == (name, value)
    assert f"unset {name}  # " in finding.action.how
    assert finding.ceiling == pytest.approx(100 / 94 - 1)
    assert finding.evidence[1].ranks == (0, 1)


@pytest.mark.parametrize(
    "variables",
    [{"NCCL_P2P_DISABLE": "0"}, {"NCCL_DEBUG": "WARN"}, {"NCCL_DEBUG": "INFO"}, {"NCCL_IB_DISABLE": "1"}],
    ids=str,
)
def test_what_holds_nothing_back_is_silent(variables):
    """InfiniBand switched off means nothing on one host, and a line of debugging at the start costs nothing."""
    assert nccl_environment.evaluate(exposed(6_000.0, variables)) is None


def test_infiniband_switched_off_matters_between_hosts():
    finding = nccl_environment.evaluate(exposed(6_000.0, {"NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "INFO"}, hosts=2))
    assert finding is not None
    assert "NCCL_IB_DISABLE=1" in finding.title
    assert "unset NCCL_DEBUG" in finding.action.how


def test_overlapped_communication_needs_no_change():
    assert nccl_environment.evaluate(exposed(1_900.0, {"NCCL_P2P_DISABLE": "1"})) is None


def test_sockets_between_hosts_are_detected_by_their_pace():
    finding = nccl_environment.evaluate(exposed(20_000.0, {}, hosts=2, busbw_gbps=1.1, across=True))
    assert finding is not None
    assert "NET/Socket" in finding.action.how
    assert finding.confidence == "low"
    assert nccl_environment.evaluate(exposed(20_000.0, {}, hosts=2, busbw_gbps=20.0, across=True)) is None


def test_where_hosts_are_not_recorded_it_is_slow_for_both_links(tmp_path):
    """25 MiB in 8 ms among 4 ranks: 3.28 GB/s · 1.5."""
    job = Bare(transfer_us=8_000.0)
    finding = found(job.analyze(tmp_path), nccl_environment.RULE)
    assert finding is not None
    assert "4.92 GB/s; NVLink has 450 inside a host, one adapter of 100 Gbit/s 12.4 between hosts" in finding.title
    assert (finding.obtained, finding.confidence, finding.whatif) == ("bounded", "low", {})
    # The first of four buckets begins when a quarter of the backward is done.
    exposed_us = 4 * 8_000 - 6_400 * 3 / 4
    assert finding.ceiling == pytest.approx(job.step_us / (job.step_us - exposed_us * (1 - 4.92 / 450)) - 1, rel=0.01)
    assert "NET/Socket" in finding.action.how
    assert "via P2P" in finding.action.how


@pytest.mark.parametrize(("busbw_gbps", "fires"), [(12.0, True), (13.0, False)])
def test_where_hosts_are_not_recorded_one_adapter_s_pace_is_silent(busbw_gbps, fires):
    case = exposed(20_000.0, {}, busbw_gbps=busbw_gbps, across=None)
    assert (nccl_environment.evaluate(case) is not None) is fires


def beside_a_slow_link(quick_gbps: float, all_gbps: float, lost_us: float = 40_000.0):
    """Two groups of two ranks, of which the second's link has 20 GB/s, and one of all."""

    def row(ranks: tuple[int, ...], busbw_gbps: float) -> CollectiveRow:
        return CollectiveRow(
            group=str(ranks), ranks=ranks, kind="all_gather", dtype="bfloat16", bytes=64 << 20, count=8,
            transfer_us=400.0, wait_us=0.0, algbw_gbps=busbw_gbps, busbw_gbps=busbw_gbps, last_arriver={},
        )  # fmt: skip

    rows = (row((0, 1), quick_gbps), row((2, 3), 20.0), row((0, 1, 2, 3), all_gbps))
    groups = [
        GroupRow(name=each.group, ranks=each.ranks, role="data", role_from="test", comm_us=1.0, across_hosts=False)
        for each in rows
    ]
    link = StragglerRow(
        rank=2, cause="communication", lost_us=lost_us, confidence="high", share_of_steps=1.0, scope="link",
        ranks=(2, 3),
    )  # fmt: skip
    exposed_us = (20_000.0, 20_000.0, 60_000.0, 60_000.0)
    return context(
        *(breakdown(rank, exposed_comm_transfer=us) for rank, us in enumerate(exposed_us)), runs=runs(4),
        stragglers=(link,), collectives=rows, groups=tuple(groups),
    )  # fmt: skip


def test_a_slow_link_between_some_ranks_is_no_transport_of_all():
    """It explains the bandwidth of its own group, and of a larger one with it that is no slower."""
    assert nccl_environment.evaluate(beside_a_slow_link(230.0, 230.0)) is None
    assert nccl_environment.evaluate(beside_a_slow_link(230.0, 18.0)) is None
    assert nccl_environment.evaluate(beside_a_slow_link(230.0, 230.0, lost_us=4_000.0)) is not None  # told by no other


def test_beside_a_slow_link_the_others_count_by_what_is_left():
    """The other group is slow, too: what its ranks expose is the bound, and no replay that mends the slow link."""
    finding = nccl_environment.evaluate(beside_a_slow_link(60.0, 230.0))
    assert finding is not None
    assert "NCCL reaches 60 of 300 GB/s (NVLink): exposed transfer takes 20% of the step" in finding.title
    assert (finding.whatif, finding.ceiling) == ({}, pytest.approx(100 / (100 - 20 * (1 - 60 / 300)) - 1))
    slower = nccl_environment.evaluate(beside_a_slow_link(230.0, 5.0))
    assert slower is not None
    assert "NCCL reaches 5 of 300" in slower.title
