"""Gradients that are reduced after the backward in few large all-reduces, in traces of other tools."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perfscope.analyzers.rules.communication import ddp_buckets, gradients_by_hand, late_gradients
from tests.analyzers.rules.bare import Bare, found

LATE = Bare(transfer_us=1_500.0, overlap=False)
ONE = Bare(buckets=1, transfer_us=6_000.0, bytes=500 << 20, overlap=False)


def test_it_fires_with_the_step_in_which_they_overlap_the_backward(tmp_path: Path) -> None:
    summary = LATE.analyze(tmp_path)
    assert summary.job.step_time_us == pytest.approx(LATE.step_us, rel=0.01)
    finding = found(summary, late_gradients.RULE)
    assert finding is not None
    assert finding is summary.findings[0]
    assert (finding.obtained, finding.whatif) == ("replayed", {"gradients.reduce": "ddp"})
    # Of four buckets three are reduced during the backward, 1.6 ms for each.
    overlapped = replace(LATE, overlap=True)
    assert overlapped.step_us == pytest.approx(LATE.step_us - 3 * LATE.transfer_us, rel=0.02)
    assert finding.predicted_step_us is not None
    assert finding.predicted_step_us.mid == pytest.approx(overlapped.step_us, rel=0.05)
    assert finding.predicted_step_us.low <= overlapped.step_us <= finding.predicted_step_us.high


def test_whether_ddp_is_at_work_is_not_known(tmp_path: Path) -> None:
    finding = found(LATE.analyze(tmp_path), late_gradients.RULE)
    assert finding is not None
    assert "Where a loop reduces gradients: DDP averages" in finding.action.how
    assert "Where it is at work already: DistributedDataParallel reduces a bucket as soon" in finding.action.how


def test_where_ddp_is_at_work_something_holds_its_buckets_back(tmp_path: Path) -> None:
    finding = found(replace(LATE, ddp=True).analyze(tmp_path), late_gradients.RULE)
    assert finding is not None
    assert finding.action.how.startswith("DistributedDataParallel reduces a bucket as soon")
    assert "loop" not in finding.action.how


@pytest.mark.parametrize("job", [replace(LATE, bytes=None), replace(ONE, bytes=None)], ids=["several", "one"])
def test_without_sizes_it_is_bounded_by_what_is_exposed(job: Bare, tmp_path: Path) -> None:
    finding = found(job.analyze(tmp_path), late_gradients.RULE)
    assert finding is not None
    assert (finding.obtained, finding.confidence, finding.whatif) == ("bounded", "low", {})
    exposed_us = job.buckets * job.transfer_us
    assert finding.ceiling == pytest.approx(job.step_us / (job.step_us - exposed_us) - 1, rel=0.01)


def test_one_bucket_is_to_be_several(tmp_path: Path) -> None:
    finding = found(ONE.analyze(tmp_path), late_gradients.RULE)
    assert finding is not None
    assert "bucket_cap_mb=25" in finding.action.how
    assert "DistributedDataParallel(model)" in finding.action.how


@pytest.mark.parametrize(
    ("job", "knows"),
    [
        (replace(ONE, ddp=True), ddp_buckets.RULE),
        (Bare(buckets=8, transfer_us=800.0, overlap=False), gradients_by_hand.RULE),
        (replace(LATE, overlap=True), None),
        (Bare(transfer_us=300.0, overlap=False), None),
        (Bare(buckets=1, transfer_us=900.0, overlap=False), None),
        (Bare(transfer_us=60_000.0), None),
        (Bare(transfer_us=700.0, overlap=False, ddp=True, tensor_us=6_000.0), None),
    ],
    ids=[
        "one bucket of DDP",
        "a loop",
        "overlapped",
        "little to gain",
        "little of the step",
        "hidden as far as it goes",
        "most of what is exposed is of tensor parallelism",
    ],
)
def test_it_is_silent_elsewhere(job: Bare, knows: str | None, tmp_path: Path) -> None:
    summary = job.analyze(tmp_path)
    assert found(summary, late_gradients.RULE) is None
    assert knows is None or found(summary, knows) is not None
