"""Every recording of other projects, where they lie beside the checkout, against a sheet made from its raw events."""

from __future__ import annotations

import functools
import gzip
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import perfscope
from perfscope.execution.serial import Serial
from perfscope.results.summary import Summary
from tests.real.sheets import Interval, Sheet, common, length, of_chrome, of_nsys, outside, raw_events

TRACES = Path(__file__).parents[3] / "shared" / "traces"
pytestmark = [
    pytest.mark.scale,
    pytest.mark.skipif(not TRACES.is_dir(), reason="no folder of real traces beside the checkout"),
]

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
    assert row.compute_us == pytest.approx(
        mean(own.running(lambda w: w.kind == "kernel" and not w.communicates)), abs=NS
    )
    assert row.comm_us == pytest.approx(mean(own.running(lambda work: work.communicates)), abs=NS)
    idle = sum(us for category, us in row.categories().items() if category.startswith("idle_"))
    assert row.step_time_us - idle == pytest.approx(mean(own.running(lambda work: True)), abs=NS)


def test_every_recording_has_its_sheet_and_its_headline() -> None:
    files = {path.relative_to(TRACES).as_posix() for path in TRACES.glob("*/*.json.gz")}
    assert files == {f"{name}.json.gz" for name in RECORDINGS}
    assert {file if file.startswith("quirks/") else file.split("/")[0] for file in files} == set(HEADLINES)


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
        if (
            event["args"].get("correlation") in launched
            if "stream" in event.get("args", {})
            else begin <= 1000 * event["ts"] < end
        )
    ]
    return written(kept, folder)


def written(events: list[dict[str, Any]], folder: Path) -> Path:
    """A trace of these events."""
    path = folder / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}, default=float).encode(), 1))
    return path


@pytest.mark.parametrize(("first", "last"), [(5, 7), (8, 10), (6, 7), (5, 5), (7, 7), (10, 10)])
def test_loading_takes_its_share_however_few_steps_are_recorded(first: int, last: int, tmp_path: Path) -> None:
    """All six steps: the device waits 56.8 of 175.6 ms for the loader, 32 %; 29 to 34 % in each of them."""
    summary = perfscope.analyze(cut("resnet50_workers_0/worker0.pt.trace", first, last, tmp_path), executor=Serial())
    (row,) = summary.time_breakdown
    assert summary.job.steps == tuple(range(first, last + 1))
    assert row.idle_dataloader_us / row.step_time_us == pytest.approx(0.32, abs=0.04)
    assert row.step_time_us == pytest.approx(175_600, rel=0.07)


@pytest.mark.parametrize("name", ["resnet50_workers_0/worker0.pt.trace", "resnet50_workers_4/worker0.pt.trace"])
@pytest.mark.parametrize("last", [5, 6, 10])
def test_without_markers_steps_are_from_batch_to_batch(name: str, last: int, tmp_path: Path) -> None:
    """The same steps, the first and a lone one too, as with ``ProfilerStep#N``: each takes its batch first."""
    marked = perfscope.analyze(cut(name, 5, last, tmp_path), executor=Serial())
    events = [
        event for event in raw_events(tmp_path / "trace.json.gz") if not event["name"].startswith("ProfilerStep#")
    ]
    unmarked = perfscope.analyze(written(events, tmp_path), executor=Serial())
    assert len(unmarked.job.steps) == last - 4
    assert unmarked.job.step_time_us == pytest.approx(marked.job.step_time_us, rel=0.01)
    one, other = (found.time_breakdown[0].idle_dataloader_us for found in (unmarked, marked))
    assert one == pytest.approx(other, abs=0.01 * marked.job.step_time_us)


def share(name: str, chosen: Callable[[Sheet], list[Interval]]) -> float:
    """Share of the steps, the mean over the recording's files."""
    sheets = [sheet(file) for file in RECORDINGS if file.startswith(name.removesuffix(".json.gz"))]
    return sum(length(common(own.windows(), chosen(own))) / length(own.windows()) for own in sheets) / len(sheets)


def loading(name: str) -> tuple[float, float]:
    """At least and at most so much of the step is idle time in the loader."""
    both = share(name, lambda own: common(own.starved(), own.loading))
    return both, both


def launching(name: str) -> tuple[float, float]:
    """Between operators Python is at work too: at least what operators and calls take, at most all not queued."""
    return share(name, lambda own: common(own.starved(), own.operating)), share(name, Sheet.starved)


def preparing(name: str) -> tuple[float, float]:
    """The device is idle and the host in no operator, no call and no loader."""
    busy = launching(name)[0] + loading(name)[0]
    return (share(name, Sheet.starved) - busy,) * 2


def communicating(name: str) -> tuple[float, float]:
    """Communication that no other kernel overlaps; on CPUs all of it."""

    def exposed(own: Sheet) -> list[Interval]:
        compute = own.running(lambda work: work.kind == "kernel" and not work.communicates)
        ran = own.running(lambda work: work.communicates) if own.work else own.host_communication
        return outside(compute, common(own.windows(), ran))

    return (share(name, exposed),) * 2


def computing(name: str) -> tuple[float, float]:
    return (share(name, lambda own: own.running(lambda work: work.kind == "kernel" and not work.communicates)),) * 2


def in_products(name: str) -> tuple[float, float]:
    """Kernels whose names say that they multiply are a part of the compute."""
    names = re.compile(r"gemm|cudnn|cutlass|conv|winograd|dgrad|wgrad", re.IGNORECASE)
    least = share(name, lambda own: own.running(lambda work: "gemm" in work.name and bool(names.search(work.name))))
    return least / 2, share(name, lambda own: own.running(lambda work: bool(names.search(work.name))))


def nothing(name: str) -> tuple[float, float]:
    return 0.0, 0.0


_MORE = r"Another (\d+)% of the step, more than this change saves, is"
"""What a headline says of a loss that is larger than what the first finding's change saves."""


@dataclass(frozen=True)
class Headline:
    """What the headline must say, with the share of the step in its group, if any, and why."""

    says: str
    share: Callable[[str], tuple[float, float]]
    because: str


HEADLINES = {
    "a100_ddp_rank0of2": Headline(
        r"^Launch-bound: devices wait (\d+)%", launching,
        "The device is idle 76 % of the step, and the host in one operator or call after the other.",
    ),
    "a100_rank3of8": Headline(
        _MORE + r" communication", communicating,
        "Compute 60 %, then NCCL alone 19 %; with one rank of eight nobody can tell waits from transfers.",
    ),
    "h100_eager_single": Headline(r"compute takes (\d+)%", computing, "Kernels run 90 % of the step."),
    "mi300x_ddp_ckpt_rank0of8": Headline(
        r"^(\d+)% of the step is communication, which may be waiting", communicating,
        "RCCL runs alone 62 % of the step, on one rank of eight.",
    ),
    "mi300x_eager_single": Headline(
        r"^Launch-bound: devices wait (\d+)%", launching,
        "Kernels run 88 % of the step; nearly all of the rest the device waits for launches.",
    ),
    "recsys_ranks0-1of128": Headline(
        _MORE + r" communication, which may be waiting", communicating,
        "All-to-all runs alone 26 %, on 2 of 128 ranks; in 25 % kernels that were not sampled ran.",
    ),
    "resnet50_workers_0": Headline(
        r"^Data loading blocks (\d+)% of the step", loading, "The device waits for __next__ a third of every step."
    ),
    "resnet50_workers_4": Headline(
        r"^Matrix products in float32 take (\d+)%", in_products,
        "The same job with workers: loading is gone, operators keep the device waiting for a sixth of the step, and "
        "half of it are convolutions in fp32 on a device whose tensor cores take fp16.",
    ),
    "timesformer_h100": Headline(
        r"^(\d+)% of the step is host time", preparing,
        "One gap of 218 ms of 382 before the first copy, in which the host prepares frames outside of all operators.",
    ),
    "v100_ddp_rank1of2": Headline(
        r"^Matrix products in float32 take (\d+)%", in_products,
        "Compute 73 %, much of it sgemm kernels, on a device whose tensor cores take fp16; it is never starved.",
    ),
    "quirks/cpu_only_rank34.json.gz": Headline(
        r"^(\d+)% of the step is communication, which may be", communicating, "gloo runs 179 of 210 ms, nothing else."
    ),
    "quirks/cuda_event_sync.json.gz": Headline(
        _MORE + r" launch-bound time", launching, "2.2 of 3.2 ms are one aten::empty."
    ),
    "quirks/gpu_events_only.json.gz": Headline(
        r"^Launch-bound: devices wait (\d+)%", launching, "Kernels run 89 %; before the others the queue was empty."
    ),
    "quirks/mi250_rocm62.json.gz": Headline(
        _MORE + r" launch-bound time",
        launching,
        "Kernels run 1 % of a toy step full of operators; the 8 % between operators is what a change can save.",
    ),
    "quirks/no_distributed_info.json.gz": Headline(
        r"^What the devices do, .* is not known", nothing, "A job on NCCL without one event of a device."
    ),
    "quirks/rank_missing_in_distributed_info.json.gz": Headline(
        r"^What the devices do, .* is not known", nothing, "The same recording."
    ),
    "quirks/triton_kernels.json.gz": Headline(
        r"^(\d+)% of the step is host time", preparing, "One kernel of 1.8 µs in a step of 13 s, and no operator."
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADLINES)
def test_the_headline_is_what_the_sheet_says(name: str) -> None:
    expected, headline = HEADLINES[name], analyzed(name).verdict.headline
    found = re.search(expected.says, headline)
    assert found is not None, f"{headline} But: {expected.because}"
    if found.groups():
        least, most = expected.share(name)
        assert least - 0.015 <= int(found[1]) / 100 <= most + 0.015, expected.because


def test_pageable_copies_are_the_headline_of_the_report_of_nsight() -> None:
    """The devices are idle 9 and 10 % of the recording, nearly always while the host is inside cudaMemcpyAsync."""
    headline = analyzed("nsys_h100_2gpu").verdict.headline
    found = re.match(r"Copies from pageable memory block (\d+)%", headline)
    assert found is not None, headline
    sheets = list(of_nsys(TRACES / "nsys_h100_2gpu" / "report.sqlite"))
    idle = [1 - length(own.running(lambda work: True)) / length(own.windows()) for own in sheets]
    assert 0.5 * sum(idle) / 2 < int(found[1]) / 100 <= max(idle)
