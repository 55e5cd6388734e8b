"""The timeline of one step: what its caption says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from perfscope.reports.page import page, timeline
from perfscope.results.rows import StepTimeline
from perfscope.results.tables import OperatorRow
from tests.reports.examples import gpu


def test_the_timeline_names_which_collective_is_longest_and_splits_it() -> None:
    reading = timeline.timeline_reading(gpu())
    assert reading.startswith("Step 17.")
    assert "all-gather of 386 MiB" in reading
    assert "waiting" in reading


def test_lanes_of_hosts_are_missing_because_they_were_ahead_or_not_recorded() -> None:
    lanes = tuple(lane for lane in gpu().lanes if lane.kind != "host")
    alone = dataclasses.replace(gpu(), lanes=(*lanes, dataclasses.replace(lanes[0], kind="copy")))
    assert "No host lanes: no host events are recorded." in timeline.timeline_reading(alone)
    row = OperatorRow(
        name="aten::mm", operator_class="matrix", count_per_step=1.0, device_us_per_step=1.0, host_us_per_step=1.0,
        kernels_per_step=1.0, flops_per_step=None, tflops=None, share_of_peak=None, dtype=None,
    )  # fmt: skip
    ahead = dataclasses.replace(alone, operators=(row,))
    assert "the hosts had launched this step's work before it began" in timeline.timeline_reading(ahead)


def test_the_command_for_perfetto_names_the_ranks_and_the_step() -> None:
    summary = dataclasses.replace(gpu(), source="my traces")
    ranks = ",".join(map(str, sorted(timeline.first_shown(summary))))
    assert timeline.merge_command(summary) == f"perfscope merge 'my traces' --ranks {ranks} --steps 17"


def test_a_merged_file_beside_the_page_is_linked(tmp_path: Path) -> None:
    for is_there in (False, True):
        page.write(gpu(), tmp_path / "report.html")
        written = (tmp_path / "report.html").read_text(encoding="utf-8")
        assert ('href="merged.pftrace"' in written) == is_there
        (tmp_path / "merged.pftrace").touch()


def test_on_cpus_operators_that_wait_do_not_compute() -> None:
    """Rank 0's operators last all of a step of which it waits for 60 µs, rank 1's do not."""
    case = gpu()
    lanes = tuple(lane for lane in case.lanes if lane.kind == "compute")[:2]
    rows = tuple(
        StepTimeline(
            rank=lane.rank, step=None, categories=("compute", "exposed_comm_wait"), start_us=(0.0, 100.0 - waits),
            duration_us=(100.0 - waits, waits),
        )
        for lane, waits in zip(lanes, (60.0, 10.0), strict=True)
    )  # fmt: skip
    job = dataclasses.replace(case.job, devices=("CPU",))
    first, second = (lane.rank for lane in lanes)
    reading = timeline.timeline_reading(dataclasses.replace(case, job=job, lanes=lanes, step_timeline=rows))
    assert f"Compute fills 90% of the time on rank {second}, 40% on rank {first}" in reading
