"""``gradient_as_bucket_view``: fires on long copies out of buckets, and where memory is tight."""

from __future__ import annotations

from typing import Any

import pytest

from perfscope.analyzers.rules.communication import bucket_view
from perfscope.analyzers.rules.context import RuleContext
from perfscope.recording.metadata import DeviceMetadata, RunMetadata
from perfscope.results.findings import Severity
from perfscope.results.rows import MemoryRow
from perfscope.results.tables import OperatorRow
from tests.analyzers.rules.jobs import GIB, breakdown, context


def case(copies_us: float = 0.0, free_gib: float = 40.0, **ddp: Any) -> RuleContext:
    """Steps of 100 ms; 4 GiB of gradients on a device of 80 GiB."""
    recorded = {"gradient_as_bucket_view": False, "total_parameter_size_bytes": 4 * GIB, **ddp}
    runs = {0: RunMetadata(settings={"ddp": recorded}, device=DeviceMetadata(type="cuda"))}
    copy = OperatorRow(
        name=bucket_view.COPIES, operator_class="copy", count_per_step=10.0, device_us_per_step=copies_us,
        host_us_per_step=9_000.0, kernels_per_step=10.0, flops_per_step=None, tflops=None,
        share_of_peak=None, dtype=None,
    )  # fmt: skip
    memory = MemoryRow(rank=0, peak_bytes=0, capacity_bytes=80 * GIB, headroom_bytes=int(free_gib * GIB))
    return context(breakdown(0), runs=runs, operators=(copy,), memory=(memory,))


def test_long_copies_bound_what_is_saved() -> None:
    finding = bucket_view.evaluate(case(copies_us=3_000.0))
    assert finding is not None
    assert (finding.action.old, finding.action.new) == ("False", "True")
    assert "DistributedDataParallel(model, gradient_as_bucket_view=True)" in finding.action.how
    assert finding.ceiling == pytest.approx(100 / 97 - 1)
    assert "detach_()" in (finding.action.costs or "")


def test_tight_memory_is_reason_enough_but_no_speed_up() -> None:
    finding = bucket_view.evaluate(case(free_gib=3.0))
    assert finding is not None
    assert finding.severity is Severity.INFO
    assert "holds 4.00 GiB twice" in finding.title
    assert any(entry.what == "memory free on the fullest rank" for entry in finding.evidence)


def test_silent_on_short_copies_with_room_and_where_it_is_on_or_not_known() -> None:
    assert bucket_view.evaluate(case(copies_us=1_900.0)) is None
    assert bucket_view.evaluate(case(free_gib=5.0)) is None
    assert bucket_view.evaluate(case(free_gib=3.0, total_parameter_size_bytes=GIB)) is None
    assert bucket_view.evaluate(case(copies_us=3_000.0, gradient_as_bucket_view=True)) is None
    assert bucket_view.evaluate(case(copies_us=3_000.0, gradient_as_bucket_view=None)) is None


def test_a_job_without_metadata_is_left_alone() -> None:
    assert bucket_view.evaluate(context(breakdown(0))) is None
