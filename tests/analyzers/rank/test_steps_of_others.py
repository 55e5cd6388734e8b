"""Steps of recordings that lack something: marks that are ticks, files cut short, launches that are not recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.rank.steps import BY_REPETITION, CUT, MARKED, Steps
from perfscope.analyzers.readers import chrome
from perfscope.trace.trace import Category, ParseReport
from tests.analyzers.readers.helpers import event, save
from tests.traces import TraceBuilder


def windows(steps: Steps) -> list[tuple[int, int, int]]:
    return list(zip(steps.number.tolist(), steps.start_ns.tolist(), steps.end_ns.tolist(), strict=True))


def test_a_tick_shows_where_a_step_begins_and_not_where_the_last_one_ends() -> None:
    """ROCm writes a step's copy on the device as one tick; of three steps of 100 the last one's end is not known."""
    builder = TraceBuilder()
    for number in (1, 2, 3):
        begin = 100 * number
        builder.event(f"ProfilerStep#{number}", Category.GPU_ANNOTATION, begin, begin + 2, device=0, stream=7)
        builder.event("gemm", Category.KERNEL, begin, begin + 80, device=0, stream=7)
    assert windows(analyze_rank(builder.build()).steps) == [(1, 100, 200), (2, 200, 300)]


def test_a_range_shows_where_the_last_step_ends() -> None:
    builder = TraceBuilder()
    for number in (1, 2):
        begin = 100 * number
        builder.event(f"ProfilerStep#{number}", Category.GPU_ANNOTATION, begin, begin + 90, device=0, stream=7)
        builder.event("gemm", Category.KERNEL, begin, begin + 90, device=0, stream=7)
    assert windows(analyze_rank(builder.build()).steps) == [(1, 100, 200), (2, 200, 290)]


def test_operators_stand_for_launches_where_no_call_is_recorded() -> None:
    """The device takes 100 for what the host asks for in 40, so steps take 100 from the second on.

    ::

        host    [0 step 40)[40 step 80)[80 step 120)
        device      [5    105)[105     205)[205       305)
    """
    builder = TraceBuilder()
    for number in range(3):
        begin = 40 * number
        builder.step(number, begin, begin + 40).op("aten::mm", begin + 2, begin + 4, external_id=number + 1)
        start = 5 + 100 * number
        builder.event("gemm", Category.KERNEL, start, start + 100, device=0, stream=7, external_id=number + 1)
    found = windows(analyze_rank(builder.build()).steps)
    assert [window[1:] for window in found[1:]] == [(105, 205), (205, 305)]


CALLED = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 1}
KERNEL = {"cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "dur": 4}


def launched(number: int, ts: int) -> list[dict[str, Any]]:
    return [
        event(**CALLED, ts=ts, args={"correlation": number}),
        event(**KERNEL, ts=ts + 2, args={"correlation": number, "device": 0, "stream": 7}),
    ]


@pytest.mark.parametrize(
    ("work", "numbers", "until"),
    [
        # In time order the cut is in step 3: steps 1 and 2 are whole.
        ((11, 21, 31), [1, 2], 33_000),
        # What devices did was written in no order: after the cut something of steps 1 and 2 may be missing.
        ((31, 11), [], 13_000),
    ],
)
def test_steps_after_which_a_cut_file_lacks_work_are_left_out(
    work: tuple[int, ...], numbers: list[int], until: int, tmp_path: Path
) -> None:
    steps = [event(f"ProfilerStep#{n}", cat="user_annotation", ts=10 * n, dur=10) for n in (1, 2, 3)]
    operators = [event("aten::mm", ts=10 * n + 0.5) for n in (1, 2, 3)]
    events = [*steps, *operators, *(one for number, ts in enumerate(work) for one in launched(number, ts))]
    whole = save(tmp_path, {"traceEvents": events}).read_text()
    trace = chrome.read(save(tmp_path, whole.removesuffix("]}")))
    assert trace.parse_report.truncated
    assert trace.parse_report.complete_until_ns == min(until, 30_500)
    partial = analyze_rank(trace)
    assert (partial.steps.number.tolist() if partial.steps.marked else []) == numbers
    assert partial.steps.end_ns[-1] <= until
    assert partial.steps.source == (MARKED if numbers else CUT)
    again = analyze_rank(replace(trace, parse_report=ParseReport()))
    assert again.steps.number.tolist()[-1] == 3, "a whole file has all steps"


@pytest.mark.parametrize(
    ("other", "calls_of_all"),
    [
        pytest.param(0, False, id="device work has its operators' ids"),
        pytest.param(5000, False, id="ids of device work are other numbers than those of operators"),
        pytest.param(0, True, id="of step 2 the calls are there, and no kernel"),
        pytest.param(5000, True, id="the same, with other numbers"),
    ],
)
def test_a_step_whose_operators_launched_nothing_is_not_whole_though_later_ones_are(
    other: int, tmp_path: Path, *, calls_of_all: bool
) -> None:
    """Buffers of devices' work are in no order of time: the cut file has that of steps 1 and 3, and none of step 2."""
    steps = [event(f"ProfilerStep#{n}", cat="user_annotation", ts=100 * n, dur=100) for n in (1, 2, 3, 4)]
    operators, work = [], []
    for n in (1, 2, 3, 4):
        for at in range(3):
            number, ts = 10 * n + at, 100 * n + 10 * at
            operators.append(event("aten::mm", ts=ts, dur=8, args={"External id": number}))
            operators.append(event("aten::empty", ts=ts, dur=2, args={"External id": 1000 + number}))
            call, kernel = launched(number, ts + 3)
            call["args"]["External id"] = other + number
            work += [call, kernel] if n in (1, 3) else [call] * calls_of_all
    text = save(tmp_path, {"traceEvents": [*steps, *operators, *work, *launched(99, 401)]}).read_text()
    cut = chrome.read(save(tmp_path, text.removesuffix("]}")))
    assert analyze_rank(cut).steps.number.tolist() == [1, 3]
    assert cut.parse_report.complete_until_ns == 403_000


@pytest.mark.parametrize(
    ("ran", "numbers", "noted"),
    [
        pytest.param((4, 4, 4), [1, 2, 3], None, id="all kernels are there"),
        pytest.param((4, 4, 1), [1, 2], "step 3", id="the recording ends before the last step's have run"),
        pytest.param((4, 3, 0), [1], "steps 2, 3", id="it ends sooner"),
        pytest.param(
            (2, 2, 1), [1, 2, 3], None, id="kernels of all steps are missing, as where short ones are left out"
        ),
    ],
)
def test_steps_whose_kernels_had_not_run_when_the_recording_ended_are_left_out(
    ran: tuple[int, ...], numbers: list[int], noted: str | None, tmp_path: Path
) -> None:
    events = []
    for step, kernels in enumerate(ran, 1):
        events.append(event(f"ProfilerStep#{step}", cat="user_annotation", ts=100 * step, dur=100))
        for at in range(4):
            call, kernel = launched(10 * step + at, 100 * step + 20 * at)
            events += [call, kernel] if at < kernels else [call]
    partial = analyze_rank(chrome.read(save(tmp_path, {"traceEvents": events})))
    assert partial.steps.number.tolist() == numbers
    assert [
        f"{noted} launched kernels that are not in the recording" in text for text in partial.parse_report.notes
    ] == ([] if noted is None else [True])


@pytest.mark.parametrize(
    ("pids", "named"), [((0,), ["H100"]), ((4242,), ["H100"]), ((0, 4242), ["H100"]), ((5, 6), [])]
)
def test_kernels_that_state_no_device_run_on_the_only_one_that_is_listed(
    pids: tuple[int, ...], named: list[str], tmp_path: Path
) -> None:
    """Without an argument a kernel's process stands for its device."""
    kernels = [event(**{**KERNEL, "pid": pid}, ts=10 * at) for at, pid in enumerate(pids, 1)]
    path = save(tmp_path, {"deviceProperties": [{"id": 0, "name": "H100"}], "traceEvents": [event(), *kernels]})
    assert [device.name for device in analyze_rank(chrome.read(path)).devices] == named


def test_the_last_step_is_no_longer_than_others_where_each_begins_while_the_one_before_it_runs(tmp_path: Path) -> None:
    """The next batch is prepared on a stream of its own, beside the last work of the step before. No marks."""
    events = []
    for step in range(5):
        begin = 100 * step + 100
        for at in range(10):
            stream, starts, takes = (20, 2, 6) if at == 0 else (7, 40 + 10 * at, 10)
            ids = {"correlation": 10 * step + at + 1}
            events.append(event(**CALLED, ts=begin + 1 + at, args=ids))
            args = {**ids, "device": 0, "stream": stream}
            work = {**KERNEL, "name": f"kernel{at}", "tid": stream, "dur": takes}
            events.append(event(**work, ts=begin + starts, args=args))
    steps = analyze_rank(chrome.read(save(tmp_path, {"traceEvents": events}))).steps
    assert steps.source == BY_REPETITION
    assert (steps.end_ns - steps.start_ns)[1:].tolist() == [100_000] * (len(steps) - 1)
