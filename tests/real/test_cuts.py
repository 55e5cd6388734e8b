"""Recordings of other projects, cut to what other settings of the profiler would have written: they hold something
else, and show the same. The figures are the sheets', from the raw events of each cut.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import perfscope
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.whatif import context_of
from perfscope.execution.serial import Serial
from perfscope.results.summary import Summary
from tests.real import cuts
from tests.real.sheets import common, length, of_chrome
from tests.real.test_sheets import NS, TRACES, check_device

pytestmark = [
    pytest.mark.scale,
    pytest.mark.skipif(not TRACES.is_dir(), reason="no folder of real traces beside the checkout"),
]

RESNET = "resnet50_workers_0/worker0.pt.trace"
RESNET_DDP = "a100_ddp_rank0of2/rank0"
VIDEO = "timesformer_h100/trace"
RECSYS = "recsys_ranks0-1of128/rank0"
ROCM = "mi300x_ddp_ckpt_rank0of8/rank0"

Cut = Callable[[cuts.Document], Any]


@functools.cache
def recorded(name: str) -> cuts.Document:
    return cuts.read(TRACES / f"{name}.json.gz")


@functools.cache
def whole(name: str) -> Summary:
    return perfscope.analyze(TRACES / f"{name}.json.gz", executor=Serial())


def analyzed(name: str, folder: Path, *changes: Cut) -> tuple[Summary, Path]:
    document: Any = recorded(name)
    for change in changes:
        document = change(document)
    path = cuts.written(document, folder)
    return perfscope.analyze(path, executor=Serial()), path


@pytest.mark.parametrize("name", [RESNET_DDP, VIDEO, RECSYS])
def test_kernels_alone_are_one_window_and_their_idle_time_is_unknown(name: str, tmp_path: Path) -> None:
    summary, path = analyzed(name, tmp_path, cuts.of_device)
    check_device(summary, 0, of_chrome(path))
    idle = sum(us for kind, us in summary.time_breakdown[0].categories().items() if kind.startswith("idle_"))
    assert summary.time_breakdown[0].idle_unknown_us >= 0.9 * idle
    assert not summary.job.steps
    assert not summary.findings
    assert not summary.stragglers
    assert not summary.verdict.healthy


def test_without_operators_the_device_s_figures_are_the_sheet_s(tmp_path: Path) -> None:
    summary, path = analyzed(VIDEO, tmp_path, cuts.without_operators)
    check_device(summary, 0, of_chrome(path))
    assert not summary.stragglers
    assert not summary.verdict.healthy


def test_without_operators_a_rank_that_communicates_has_the_steps_of_its_kernels(tmp_path: Path) -> None:
    summary, _ = analyzed(RESNET_DDP, tmp_path, cuts.without_operators)
    known = whole(RESNET_DDP)
    assert "steps_by_repetition" in {note.kind for note in summary.notes}
    assert len(summary.job.steps) == len(known.job.steps) == 3
    assert summary.job.step_time_us == pytest.approx(known.job.step_time_us, rel=0.01)
    assert summary.time_breakdown[0].compute_us == pytest.approx(known.time_breakdown[0].compute_us, rel=0.01)
    assert summary.time_breakdown[0].comm_us == pytest.approx(known.time_breakdown[0].comm_us, rel=0.01)
    assert not summary.stragglers
    assert not summary.verdict.healthy


def test_without_operators_what_a_host_does_without_a_call_is_not_said(tmp_path: Path) -> None:
    """The device waits a third of each step for the host, most of it while that loads a batch: which nothing shows."""
    summary, _ = analyzed(RESNET, tmp_path, cuts.without_operators)
    assert summary.job.step_time_us == pytest.approx(whole(RESNET).job.step_time_us, rel=0.01)
    headline = summary.verdict.headline
    assert headline.startswith("33% of the step is host time without a call to the devices.")
    assert "record its operators too" in (summary.verdict.first_action or "")


@pytest.mark.parametrize("name", [VIDEO, "mi300x_eager_single/trace", "h100_eager_single/trace"])
def test_a_recording_that_nothing_marks_lasts_from_its_host_s_begin(name: str, tmp_path: Path) -> None:
    """The video model's host prepares for 218 of 383 ms before its first copy."""
    summary, path = analyzed(name, tmp_path, cuts.without_marks)
    check_device(summary, 0, of_chrome(path))
    if name == VIDEO:
        assert summary.verdict.headline.startswith("58% of the recording is host time")


@pytest.mark.parametrize("name", [RECSYS, "recsys_ranks0-1of128/rank1"])
def test_two_optimizers_in_turn_end_one_step(name: str, tmp_path: Path) -> None:
    """``Shampoo`` and, right after it, ``EMAOptimizer``: two steps, the first of which is cut without its marks."""
    summary, _ = analyzed(name, tmp_path, cuts.without_marks)
    assert summary.job.step_time_us_per_step == pytest.approx([whole(name).job.step_time_us_per_step[-1]], rel=0.02)


@pytest.mark.parametrize("name", [RESNET_DDP, ROCM, RESNET])
def test_whose_devices_are_not_recorded_is_a_job_with_devices(name: str, tmp_path: Path) -> None:
    """NCCL, or operators of cuDNN and MIOpen, show it."""
    summary, _ = analyzed(name, tmp_path, cuts.without_device, cuts.without_distributed)
    assert any(note.kind == "no_device_events" for note in summary.notes)
    assert summary.verdict.headline.startswith("What the devices do, and what limits them, is not known")
    assert summary.verdict.unsure
    loading = "What it shows of the hosts: Data loading blocks 40% of the step" in summary.verdict.headline
    assert loading is (name == RESNET)


@pytest.mark.parametrize("change", [cuts.without_distributed, cuts.without_descriptions, cuts.with_loader_process])
@pytest.mark.parametrize("name", [RESNET_DDP, ROCM])
def test_what_describes_the_job_does_not_change_its_figures(change: Cut, name: str, tmp_path: Path) -> None:
    summary, _ = analyzed(name, tmp_path, change)
    assert summary.job.step_time_us_per_step == pytest.approx(whole(name).job.step_time_us_per_step, abs=NS)
    assert summary.time_breakdown[0].categories() == pytest.approx(whole(name).time_breakdown[0].categories(), abs=NS)
    assert summary.verdict.headline == whole(name).verdict.headline
    assert not summary.stragglers


@pytest.mark.parametrize("name", [RESNET_DDP, RESNET])
def test_names_of_rocm_are_the_same_to_it(name: str, tmp_path: Path) -> None:
    summary, path = analyzed(name, tmp_path, cuts.on_amd)
    check_device(summary, 0, of_chrome(path))
    own, other = (one.time_breakdown[0] for one in (summary, whole(name)))
    # hipMemcpyWithStream blocks, which cudaMemcpyAsync did not always.
    assert own.idle_launch_us + own.idle_sync_us == pytest.approx(
        other.idle_launch_us + other.idle_sync_us, abs=0.01 * own.step_time_us
    )
    assert own.idle_dataloader_us == pytest.approx(other.idle_dataloader_us, abs=0.01 * own.step_time_us)


@pytest.mark.parametrize(("first", "last"), [(0, 0), (2, 3), (5, 5)])
def test_what_workers_bring_is_known_from_a_step_or_two(first: int, last: int, tmp_path: Path) -> None:
    """Of all six steps the device waits 32 % for batches: a step is predicted 32 to 33 % shorter with a worker."""
    path = cuts.written(cuts.of_steps(recorded(RESNET), first, last), tmp_path)
    summary = perfscope.analyze(path, executor=Serial())
    own = of_chrome(path)
    loading = length(common(own.starved(), own.loading)) / length(own.windows())
    found = predict(context_of(path), {"dataloader.num_workers": "1"})
    assert found.saved == pytest.approx(loading, abs=0.03)
    assert "dataloader-workers" in {finding.rule for finding in summary.findings[:1]}


def test_a_recording_that_begins_in_a_step_has_the_later_ones(tmp_path: Path) -> None:
    marks = sorted(
        (event["ts"], event["dur"])
        for event in recorded(RESNET)["traceEvents"]
        if event.get("name", "").startswith("ProfilerStep#")
    )
    begin, end = marks[0][0] + 0.4 * marks[0][1], marks[-1][0] + 0.6 * marks[-1][1]
    summary, _ = analyzed(RESNET, tmp_path, lambda document: cuts.between(document, begin, end), cuts.without_marks)
    assert len(summary.job.steps) == 4
    assert summary.job.step_time_us == pytest.approx(whole(RESNET).job.step_time_us, rel=0.02)
    assert summary.verdict.headline.startswith("Data loading blocks")


def test_a_step_that_would_take_no_time_without_its_launches_gives_no_prediction(tmp_path: Path) -> None:
    """The second half of this recording: a step of 49 µs, whose kernels run after it."""
    document = recorded("quirks/mi250_rocm62")
    times = [event["ts"] for event in document["traceEvents"] if "ts" in event]
    middle, end = (min(times) + max(times)) / 2, max(times) + 1
    summary, _ = analyzed("quirks/mi250_rocm62", tmp_path, lambda cut: cuts.between(cut, middle, end))
    assert summary.job.step_time_us == pytest.approx(49.073, abs=NS)
    assert all(finding.predicted_step_us is None for finding in summary.findings)


@pytest.mark.parametrize("name", [RECSYS, "v100_ddp_rank1of2/rank1"])
def test_embedding_tables_are_not_taken_for_experts(name: str, tmp_path: Path) -> None:
    """Both are recommendation models: ranks exchange indices, then vectors."""
    summary, _ = analyzed(name, tmp_path, cuts.without_device)
    assert summary.job.strategy == "ddp"
