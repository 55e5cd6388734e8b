"""Traces recorded on real accelerators by other projects, where they lie beside the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfscope import analyze
from perfscope.execution.serial import Serial
from perfscope.results.summary import Summary

TRACES = Path(__file__).parents[3] / "shared" / "traces"
pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason="no folder of real traces beside the checkout")

FOLDERS = (
    "a100_ddp_rank0of2", "a100_rank3of8", "h100_eager_single", "mi300x_ddp_ckpt_rank0of8", "mi300x_eager_single",
    "quirks", "recsys_ranks0-1of128", "v100_ddp_rank1of2",
)  # fmt: skip
QUIRKS = (
    "cpu_only_rank34", "cuda_event_sync", "gpu_events_only", "mi250_rocm62", "no_distributed_info",
    "rank_missing_in_distributed_info", "triton_kernels",
)  # fmt: skip


def read(name: str) -> Summary:
    return analyze(TRACES / name, executor=Serial())


def about(summary: Summary) -> set[str]:
    return {note.about for note in summary.notes}


@pytest.mark.parametrize("name", [*FOLDERS, *(f"quirks/{name}.json.gz" for name in QUIRKS)])
def test_every_time_breakdown_adds_up_and_explains_idle_time(name):
    summary = read(name)
    summary.self_check()
    assert summary.time_breakdown
    for row in summary.time_breakdown:
        # Of this one only a sample of the kernels is stored: much is queued behind work that is not there.
        most = 0.30 if name == "recsys_ranks0-1of128" else 0.02
        assert row.idle_unknown_us <= most * row.step_time_us
        assert min(row.categories().values()) >= 0
    if summary.critical_path is not None:
        assert sum(row.us for row in summary.critical_path) == pytest.approx(summary.job.step_time_us)


def test_the_device_window_is_the_one_that_kineto_drew_and_the_wait_for_its_first_work():
    """Kineto's own gpu_user_annotation of ProfilerStep#6 covers 34892.421 us of the H100, 33131.336 of the MI300X. Each
    device had done the step before 290.941 and 624.035 us earlier, and waited for the copy that the host blocked on.
    """
    assert read("h100_eager_single").job.step_time_us == pytest.approx(34892.421 + 290.941, abs=0.01)
    assert read("mi300x_eager_single").job.step_time_us == pytest.approx(33131.336 + 624.035, abs=0.01)


def test_rocm_s_nameless_kernels_are_described_by_the_operator_that_launched_them():
    rows = read("mi300x_ddp_ckpt_rank0of8").collectives
    found = {(row.kind, row.dtype, row.bytes, row.count) for row in rows}
    assert ("all_reduce", "bfloat16", 2 * 2873320, 3) in found
    assert ("all_reduce", "bfloat16", 2 * 8816192, 3) in found
    assert "unknown" not in {row.kind for row in rows}


def test_one_rank_of_many_claims_no_wait_and_no_bandwidth():
    summary = read("a100_ddp_rank0of2")
    assert summary.job.missing_ranks == (1,)
    assert {"ranks", "collectives"} <= about(summary)
    assert all(row.busbw_gbps is None and row.wait_us is None for row in summary.collectives)
    assert all(row.wait_is_bound for row in summary.time_breakdown)


def test_a_gpu_job_recorded_without_its_device_is_noted():
    summary = read("quirks/no_distributed_info.json.gz")
    assert any(note.kind == "no_device_events" for note in summary.notes)


def test_a_mixed_folder_is_separated_and_every_file_left_out_is_named():
    summary = read("quirks")
    assert len(summary.job.failures) + len(summary.job.ranks) == len(QUIRKS)
    assert all(failure.path and failure.error for failure in summary.job.failures)


def test_an_unknown_device_gets_no_peak():
    utilisation = read("quirks/mi250_rocm62.json.gz").utilisation
    assert utilisation.mfu is None
    assert utilisation.why_absent
