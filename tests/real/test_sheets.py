"""Every recording of other projects, where they lie beside the checkout, against a sheet made from its raw events."""

from __future__ import annotations

import functools
import gzip
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import pytest

import perfscope
from perfscope.execution.engine import Serial
from perfscope.results.summary import Summary
from tests.real.sheets import Interval, Sheet, common, length, of_chrome, of_nsys, raw_events

TRACES = Path(__file__).parents[3] / "shared" / "traces"
pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason="no folder of real traces beside the checkout")

RECORDINGS = (
    "a100_ddp_rank0of2/rank0", "a100_rank3of8/rank3", "h100_eager_single/trace", "mi300x_ddp_ckpt_rank0of8/rank0",
    "mi300x_eager_single/trace", "recsys_ranks0-1of128/rank0", "recsys_ranks0-1of128/rank1",
    "resnet50_workers_0/worker0.pt.trace", "resnet50_workers_4/worker0.pt.trace", "timesformer_h100/trace",
    "v100_ddp_rank1of2/rank1", *(f"quirks/{name}" for name in (
        "cpu_only_rank34", "cuda_event_sync", "gpu_events_only", "mi250_rocm62", "no_distributed_info",
        "rank_missing_in_distributed_info", "triton_kernels",
    )),
)  # fmt: skip
NS = 0.0011
"""A nanosecond, in the µs of a summary."""


@functools.cache
def sheet(name: str) -> Sheet:
    return of_chrome(TRACES / f"{name}.json.gz")


@functools.cache
def analyzed(name: str) -> Summary:
    return perfscope.analyze(TRACES / name, executor=Serial())


def of_file(name: str) -> Summary:
    return analyzed(f"{name}.json.gz")


def check_device(summary: Summary, index: int, own: Sheet) -> None:
    """Step, busy, compute and communication of one rank, to the nanosecond."""
    windows, row = own.windows(), summary.time_breakdown[index]

    def mean(intervals: list[Interval]) -> float:
        return length(common(windows, intervals)) / len(windows) / 1e3

    assert row.step_time_us == pytest.approx(length(windows) / len(windows) / 1e3, abs=NS)
    assert row.compute_us == pytest.approx(mean(own.running(lambda w: w.kind == "kernel" and not w.communicates)), abs=NS)
    assert row.comm_us == pytest.approx(mean(own.running(lambda work: work.communicates)), abs=NS)
    idle = sum(us for category, us in row.categories().items() if category.startswith("idle_"))
    assert row.step_time_us - idle == pytest.approx(mean(own.running(lambda work: True)), abs=NS)


@pytest.mark.parametrize("name", RECORDINGS)
def test_steps_and_what_the_device_did_in_them_are_the_sheet_s(name: str) -> None:
    own, summary = sheet(name), of_file(name)
    windows = own.windows()
    if own.work:
        check_device(summary, 0, own)
        assert len(summary.job.steps) == len(windows) * bool(own.marks)
    assert summary.job.step_time_us_per_step == pytest.approx([(end - begin) / 1e3 for begin, end in windows], abs=NS)


@pytest.mark.parametrize("index", [0, 1])
def test_both_devices_of_the_report_of_nsight_are_the_sheet_s(index: int) -> None:
    own = list(of_nsys(TRACES / "nsys_h100_2gpu" / "report.sqlite"))[index]
    check_device(analyzed("nsys_h100_2gpu"), index, own)


@pytest.mark.parametrize("name", RECORDINGS)
def test_the_loader_s_wait_is_the_sheet_s(name: str) -> None:
    own, summary = sheet(name), of_file(name)
    hosts = [(begin, end) for _, begin, end in own.marks]
    waited = length(common(hosts, own.loading)) / max(len(hosts), 1) / 1e3
    if not waited:
        assert summary.dataloader == ()
        return
    (row,) = summary.dataloader
    assert row.wait_us == pytest.approx(waited, abs=NS)
    if own.work:
        blocking = length(common(own.starved(), own.loading)) / len(hosts) / 1e3
        assert row.blocking_us == pytest.approx(blocking, abs=0.001 * summary.job.step_time_us)


def cut(name: str, first: int, last: int, folder: Path) -> Path:
    """The trace that a profiler would have written of these steps alone, which it began with an idle device."""
    marks = {number: (begin, end) for number, begin, end in sheet(name).marks}
    begin, end = marks[first][0], marks[last][1]
    events = [event for event in raw_events(TRACES / f"{name}.json.gz") if event.get("ph") == "X"]
    calls = [event for event in events if event.get("cat") == "Runtime" and begin <= 1000 * event["ts"] < end]
    launched = {event["args"]["correlation"] for event in calls if "correlation" in event["args"]}
    kept = [
        event
        for event in events
        if (event["args"].get("correlation") in launched if "stream" in event.get("args", {}) else begin <= 1000 * event["ts"] < end)
    ]  # fmt: skip
    path = folder / "cut.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": kept}, default=float).encode(), 1))
    return path


@pytest.mark.parametrize(("first", "last"), [(5, 7), (8, 10), (6, 7), (5, 5), (7, 7), (10, 10)])
def test_loading_takes_its_share_however_few_steps_are_recorded(first: int, last: int, tmp_path: Path) -> None:
    """All six steps: the device waits 56.8 of 175.6 ms for the loader, 32 %; 29 to 34 % in each of them."""
    summary = perfscope.analyze(cut("resnet50_workers_0/worker0.pt.trace", first, last, tmp_path), executor=Serial())
    (row,) = summary.time_breakdown
    assert summary.job.steps == tuple(range(first, last + 1))
    assert row.idle_dataloader_us / row.step_time_us == pytest.approx(0.32, abs=0.04)
    assert row.step_time_us == pytest.approx(175_600, rel=0.07)
