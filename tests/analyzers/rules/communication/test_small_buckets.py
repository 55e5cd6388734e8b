"""Many small all-reduces of one size, or of sizes that are not recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perfscope.analyzers.rules.communication import ddp_buckets, gradients_by_hand
from tests.analyzers.rules.bare import BACKWARD_US, Bare, found

TINY = Bare(buckets=160, transfer_us=60.0, bytes=2 << 10)


@pytest.mark.parametrize("size", [2 << 10, 8 << 10, 100_000, 1 << 20, None])
@pytest.mark.parametrize("ddp", [True, False], ids=["DDP", "perhaps DDP"])
def test_larger_buckets_save_at_most_what_is_exposed(size: int | None, ddp: bool, tmp_path: Path) -> None:
    job = replace(TINY, bytes=size, ddp=ddp)
    summary = job.analyze(tmp_path)
    finding = found(summary, ddp_buckets.RULE)
    assert finding is not None
    assert finding is summary.findings[0]
    assert (finding.obtained, finding.confidence) == ("bounded", "low")
    # 160 of 60 µs take longer than the backward, which hides all but 40 µs of the first.
    exposed_us = 40 + 160 * 60 - BACKWARD_US
    assert finding.ceiling == pytest.approx(job.step_us / (job.step_us - exposed_us) - 1, rel=0.01)
    # One bucket of all 320 KiB would take little longer than one of these.
    assert finding.ceiling >= job.step_us / Bare(buckets=1, transfer_us=60.0).step_us - 1
    cap = 25 if size in (None, 1 << 20) else 8 if size == 100_000 else 1
    assert f"bucket_cap_mb={cap})" in finding.action.how
    assert ("_flatten_dense_tensors" in finding.action.how) is not ddp


def test_what_a_slow_network_takes_to_start_may_be_a_slow_link_too(tmp_path: Path) -> None:
    """1 MiB in 400 µs: all of it is the bound, and what would show which of both it is."""
    job = Bare(buckets=40, transfer_us=400.0, bytes=1 << 20)
    finding = found(job.analyze(tmp_path), ddp_buckets.RULE)
    assert finding is not None
    assert "so small that each may be mostly latency" in finding.title
    assert (finding.obtained, finding.confidence) == ("bounded", "low")
    assert "all_reduce_perf" in finding.action.how
    usual = found(replace(TINY, bytes=1 << 20).analyze(tmp_path), ddp_buckets.RULE)
    assert usual is not None
    assert "all_reduce_perf" not in usual.action.how


def test_of_what_nothing_overlaps_a_loop_is_likelier(tmp_path: Path) -> None:
    summary = replace(TINY, overlap=False).analyze(tmp_path)
    assert found(summary, gradients_by_hand.RULE) is not None
    assert found(summary, ddp_buckets.RULE) is None


@pytest.mark.parametrize(
    "job",
    [
        replace(TINY, buckets=90),
        replace(TINY, bytes=4 << 20),
        replace(TINY, bytes=1 << 20, transfer_us=1_500.0),
        replace(TINY, bytes=None, transfer_us=90.0),
        Bare(transfer_us=2_000.0),
    ],
    ids=["hidden", "large", "as long as only a slow link takes", "of unknown sizes, not that short", "few"],
)
def test_it_is_silent_elsewhere(job: Bare, tmp_path: Path) -> None:
    assert found(job.analyze(tmp_path), ddp_buckets.RULE) is None
