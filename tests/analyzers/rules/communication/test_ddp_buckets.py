"""Sizes of DDP's buckets: too small, one too large and late, and where nothing can be gained."""

from __future__ import annotations

import dataclasses

import pytest

from perfscope.analyzers.rules.communication import ddp_buckets
from perfscope.analyzers.rules.context import RuleContext
from perfscope.recording.metadata import RunMetadata
from perfscope.results.findings import Prediction
from perfscope.results.rows import CollectiveRow, CostRow
from perfscope.results.tables import GroupRow
from tests.analyzers.rules.jobs import breakdown, changed, context


def reduced(counts: dict[int, int], *, alpha_us: float, gbps: float, exposed_us: float, **others) -> RuleContext:
    """``counts``: bucket bytes -> all-reduces per step; two ranks, so that bus bandwidth is algorithm bandwidth."""
    rows = tuple(
        CollectiveRow(
            group="0", ranks=(0, 1), kind="all_reduce", dtype="float32", bytes=size, count=8 * count,
            transfer_us=alpha_us + size / gbps / 1e3, wait_us=0.0, algbw_gbps=gbps, busbw_gbps=gbps,
            last_arriver={},
        )
        for size, count in counts.items()
    )  # fmt: skip
    cost = CostRow(group="0", kind="all_reduce", alpha_us=alpha_us, busbw_gbps=gbps, residual=0.01)
    ranks = tuple(breakdown(rank, exposed_comm_transfer=exposed_us) for rank in (0, 1))
    runs = {0: RunMetadata(settings={"ddp": {"bucket_cap_mb": 1.0}})}
    return context(*ranks, **{"collectives": rows, "cost_model": (cost,), "runs": runs, **others})


def test_many_small_buckets_want_a_larger_cap():
    # 100 buckets of 1 MiB: 300 us to start each, 105 us to move it at 10 GB/s.
    finding = ddp_buckets.evaluate(reduced({1 << 20: 100}, alpha_us=300, gbps=10, exposed_us=30_000))
    assert finding is not None
    assert finding.action.old == "1"
    # 4·alpha/slope = 12 MB, rounded up to 12 MiB: 9 buckets instead of 100 save 91·300 us.
    assert finding.action.new == "12"
    assert finding.ceiling == pytest.approx(100_000 / (100_000 - 91 * 300) - 1)


def test_a_late_big_bucket_wants_a_smaller_cap():
    # 200 MB in two buckets, the larger 180 MB: 18 ms at 10 GB/s, all of it after the backward.
    runs = {0: RunMetadata(settings={"ddp": {"bucket_cap_mb": 170.0}})}
    late = reduced({20_000_000: 1, 180_000_000: 1}, alpha_us=100, gbps=10, exposed_us=18_000, runs=runs)
    finding = ddp_buckets.evaluate(late)
    assert finding is not None
    # sqrt(100 us · 200 MB / 0.0001 us/B) = 14.1 MB.
    assert finding.action.new == "13"
    assert "too big" in finding.title


@pytest.mark.parametrize("role", ["tensor", "context"])
def test_the_buckets_are_those_of_the_gradients_group(role):
    """Tensor parallel layers move more, in many collectives of one size."""
    runs = {0: RunMetadata(settings={"ddp": {"bucket_cap_mb": 170.0}})}
    case = reduced({20_000_000: 1, 180_000_000: 1}, alpha_us=100, gbps=10, exposed_us=18_000, runs=runs)
    of_layers = dataclasses.replace(case.summary.collectives[0], group="tp", bytes=50_000_000, count=8 * 40)
    groups = tuple(
        GroupRow(name=name, ranks=(0, 1), role=what, role_from="test", comm_us=1.0, across_hosts=False)
        for name, what in (("0", "data"), ("tp", role))
    )
    finding = ddp_buckets.evaluate(changed(case, collectives=(*case.summary.collectives, of_layers), groups=groups))
    assert finding is not None
    assert finding.action.new == "13"
    assert next(each.value for each in finding.evidence if each.what == "gradient bytes per step") == 200_000_000


def test_a_replay_that_is_sure_decides_where_the_cost_model_sees_nothing():
    # 8 buckets of 64 kB, latency 0.4 of their time: a busy host blurs the fit.
    case = reduced({1 << 16: 8}, alpha_us=400, gbps=0.11, exposed_us=8_000, runs={})
    assert ddp_buckets.evaluate(case) is None

    def to(high: float) -> RuleContext:
        predicted = Prediction(low=80_000, mid=88_000, high=high)
        return changed(case, predict=lambda change: predicted if change == {"ddp.bucket_cap_mb": "1"} else None)

    finding = ddp_buckets.evaluate(to(96_000))
    assert finding is not None
    assert "too small" in finding.title
    assert (finding.action.new, finding.whatif) == ("1", {"ddp.bucket_cap_mb": "1"})
    assert ddp_buckets.evaluate(to(104_000)) is None


@pytest.mark.parametrize(("alpha_us", "advised"), [(120, True), (60, False)])
def test_the_replay_decides_where_latency_is_a_part_of_the_step_though_not_half_of_the_time(alpha_us, advised):
    """60 buckets of 4 MiB: 419 µs each to move, and 7 or 3 % of the step to start all but two."""
    case = reduced({4 << 20: 60}, alpha_us=alpha_us, gbps=10, exposed_us=30_000, runs={})

    def predict(change):
        # The larger, the longer the last one that nothing overlaps.
        mid = (change == {"ddp.bucket_cap_mb": "25"} and 92_000) or 97_000
        return Prediction(low=mid - 20_000, mid=mid, high=mid + 20_000)

    finding = ddp_buckets.evaluate(changed(case, predict=predict))
    assert (finding is not None) is advised
    if finding is not None:
        assert "too small" in finding.title
        assert finding.whatif == {"ddp.bucket_cap_mb": "25"}


@pytest.mark.parametrize(("bucket_mb", "advised"), [(500, True), (40, False)], ids=["far over the default", "not far"])
def test_all_gradients_in_one_bucket_are_to_be_several(bucket_mb, advised):
    """Of one size no latency can be fitted, and the replay leaves open how much is gained."""
    runs = {0: RunMetadata(settings={"ddp": {"bucket_cap_mb": 2000.0}})}
    case = reduced({bucket_mb << 20: 1}, alpha_us=400, gbps=10, exposed_us=30_000, runs=runs, cost_model=())
    finding = ddp_buckets.evaluate(changed(case, predict=lambda _: Prediction(low=70_000, mid=80_000, high=104_000)))
    assert (finding is not None) is advised
    if finding is not None:
        assert "too big to overlap" in finding.title
        assert finding.action.old == "2000"
        assert 25 <= int(finding.action.new) < 500


@pytest.mark.parametrize(("other_us", "cap"), [(88_000, "13"), (94_000, "1")])
def test_a_size_that_may_make_the_step_longer_gives_way_to_one_nearly_as_good_that_does_not(other_us, cap):
    counts, runs = {20_000_000: 1, 180_000_000: 1}, {0: RunMetadata(settings={"ddp": {"bucket_cap_mb": 200.0}})}
    late = reduced(counts, alpha_us=100, gbps=10, exposed_us=18_000, runs=runs)

    def predict(change):
        if change == {"ddp.bucket_cap_mb": "1"}:
            return Prediction(low=60_000, mid=86_000, high=150_000)
        return Prediction(low=80_000, mid=other_us + (change != {"ddp.bucket_cap_mb": "13"}), high=96_000)

    finding = ddp_buckets.evaluate(changed(late, predict=predict))
    assert finding is not None
    assert finding.action.new == cap


@pytest.mark.parametrize(
    "change",
    [
        {"strategy": "fsdp"},
        {"cost_model": ()},
        {"steps": ()},
        {"collectives": ()},
        {"runs": {0: RunMetadata(settings={"ddp": {"implementation": "horovod"}})}},
    ],
)
def test_silent_without_torchs_ddp_a_cost_model_steps_or_all_reduces(change):
    case = reduced({1 << 20: 100}, alpha_us=300, gbps=10, exposed_us=30_000)
    assert ddp_buckets.evaluate(changed(case, **change)) is None


def test_silent_when_overlapped_or_when_the_size_is_right():
    assert ddp_buckets.evaluate(reduced({1 << 20: 100}, alpha_us=300, gbps=10, exposed_us=4_900)) is None
    right = reduced({25 << 20: 4, 1 << 20: 1}, alpha_us=30, gbps=10, exposed_us=8_000)
    assert ddp_buckets.evaluate(right) is None


@pytest.mark.parametrize(("cap", "found"), [(25.0, False), (0.06, True), (None, True)])
def test_buckets_of_several_models_are_not_called_too_small(cap: float | None, found: bool) -> None:
    """8 all-reduces of 64 kB, all latency: one bucket of 1 MiB would hold them, unless each has its own limit."""
    settings = {} if cap is None else {"ddp": {"bucket_cap_mb": cap}}
    case = reduced({1 << 16: 8}, alpha_us=2_000, gbps=1, exposed_us=16_000, runs={0: RunMetadata(settings=settings)})
    finding = ddp_buckets.evaluate(case)
    assert (finding is not None) is found
    assert finding is None or finding.action.new == "1"
