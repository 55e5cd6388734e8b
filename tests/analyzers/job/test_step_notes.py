"""What a reader is told of steps that no optimizer ended, and of a lone one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import perfscope
from perfscope.recording.metadata import StepsMetadata
from perfscope.results.notes import note
from tests.analyzers.job.recordings import record_on_cpus
from tests.analyzers.measured import measured
from tests.analyzers.readers.helpers import event, save
from tests.emulator.emulate import emulate
from tests.emulator.spec import MS, Job, Loader, Model, Recording


@pytest.mark.parametrize(("source", "noted"), [("backward", True), ("gradients", True), ("optimizer", False)])
def test_steps_that_are_backward_passes_are_named_so(tmp_path: Path, source: str, *, noted: bool) -> None:
    record_on_cpus(tmp_path, steps=StepsMetadata(seen=20, detected_by=source))
    assert ("steps_by_backward" in {note.kind for note in measured(tmp_path).notes}) == noted


@pytest.mark.parametrize(
    ("load_ms", "steps", "workers", "kind"),
    [
        (80, 1, 2, "lone_step_waits"),
        (1, 1, 2, None),
        (84, 3, 4, "first_step_waits"),
        (80, 4, 2, None),
        (1, 3, 4, None),
    ],
    ids=["slow", "quick", "several", "all wait", "several, quick"],
)
def test_a_first_wait_that_counts_as_hidden_is_told(
    load_ms: int, steps: int, workers: int, kind: str | None, tmp_path: Path
) -> None:
    """Two workers deliver a batch every 40 ms to a step of 18. Of four, one every 21 ms, several come close together.
    The device is still busy when its host is done.
    """
    loader = Loader(workers=workers, load_ns=load_ms * MS, jitter=0.0)
    job = Job(
        ranks=1, ranks_per_host=1, noise=0.0, model=Model(blocks=2, tokens=4096, width=2048), loader=loader,
        age=10, item_every=5, recording=Recording(steps=steps, first=22),
    )  # fmt: skip
    emulate(job).write(tmp_path)
    told = {note.kind: note.text for note in measured(tmp_path).notes if note.kind.endswith("_step_waits")}
    assert list(told) == ([] if kind is None else [kind])
    if kind is not None:
        assert "the host of rank 0 waited for a batch" in told[kind]


def write_steps(folder: Path, takes_us: list[int], first: int = 0, rows: list[int] | None = None) -> None:
    """A trace of one rank whose device computes all through steps that take so long, numbered from ``first`` on;
    ``rows`` are those of the matrix that each multiplies, where that is recorded.
    """
    events, now = [], 0
    for step, takes in enumerate(takes_us, first):
        for cat, name, ts, dur, args in (
            ("user_annotation", f"ProfilerStep#{step}", now, takes, {}),
            ("cuda_runtime", "cudaLaunchKernel", now + 5, 5, {"correlation": step + 1}),
            ("kernel", "gemm", now + 10, takes - 1, {"correlation": step + 1, "stream": 7, "device": 0}),
        ):
            if rows is not None and cat != "user_annotation":
                args["External id"] = step + 1
            tid = 7 if cat == "kernel" else 1
            events.append(
                {"ph": "X", "cat": cat, "name": name, "pid": tid, "tid": tid, "ts": ts, "dur": dur, "args": args}
            )
        if rows is not None:
            shapes = {"Input Dims": [[rows[step - first], 64], [64, 64]], "Input type": ["float", "float"]}
            args = {"External id": step + 1, **shapes}
            events.append(
                {
                    "ph": "X",
                    "cat": "cpu_op",
                    "name": "aten::mm",
                    "pid": 1,
                    "tid": 1,
                    "ts": now + 4,
                    "dur": 8,
                    "args": args,
                }
            )
        now += takes
    device = {"id": 0, "name": "NVIDIA A100-SXM4-80GB"}
    (folder / "trace.json").write_text(json.dumps({"deviceProperties": [device], "traceEvents": events}))


@pytest.mark.parametrize(
    ("first", "takes_us", "left_out"),
    [
        (0, [90_000, *[1_000] * 9], [0]),
        (1, [90_000, 9_000, *[1_000] * 8], [1, 2]),
        (0, [2_000, *[1_000] * 9], []),  # no start takes so little
        (40, [90_000, *[1_000] * 9], []),  # the job has run for long
        (0, [1_000, 90_000, *[1_000] * 8], []),
        (0, [90_000, 1_000, 1_000], []),  # too few to tell
        (1, [90_000, 1_000, 1_000, 90_000, 1_000, 1_000], []),  # parameters are averaged in every third step
    ],
)
def test_the_jobs_start_is_no_usual_step(first: int, takes_us: list[int], left_out: list[int], tmp_path: Path) -> None:
    write_steps(tmp_path, takes_us, first)
    summary = measured(tmp_path)
    told = [note for note in summary.notes if note.kind == "starting_left_out"]
    assert [note.values["steps"] for note in told] == ([left_out] if left_out else [])
    assert summary.job.steps == tuple(range(first + len(left_out), first + len(takes_us)))
    if left_out:
        assert summary.job.step_time_us == pytest.approx(1_000, rel=0.01)


@pytest.mark.parametrize(
    ("long", "takes_us", "kind"),
    [
        ((3,), 3_000, "long_step"),
        ((3, 7), 3_000, "long_steps"),
        ((3,), 1_300, None),  # no long step
        ((1, 3, 5, 7), 3_000, None),  # no exception
    ],
)
def test_few_steps_that_take_far_longer_are_told(
    long: tuple[int, ...], takes_us: int, kind: str | None, tmp_path: Path
) -> None:
    """Of ten steps whose device computes all the time, for a millisecond each."""
    write_steps(tmp_path, [takes_us if step in long else 1_000 for step in range(10)])
    summary = perfscope.analyze(tmp_path)
    told = {note.kind: note for note in summary.notes if note.kind in ("long_step", "long_steps")}
    assert list(told) == ([] if kind is None else [kind])
    if kind is not None:
        share = len(long) * 2 / (10 + len(long) * 2)
        assert told[kind].values["share"] == pytest.approx(share, abs=0.01)
        assert told[kind].text.startswith("Step 3 takes 3.0 times" if len(long) == 1 else "Steps 3, 7 take 3.0 times")
        assert told[kind].text in summary.verdict.headline
        assert not summary.verdict.healthy


def test_long_steps_that_communicate_are_not_told_of_evaluations() -> None:
    """As where parameters are averaged every four steps."""
    values = {"steps": [3, 7], "times": 6.8, "share": 0.63, "category": "exposed transfer"}
    text = note("steps", "long_steps_of_communication", **values).text
    assert text.startswith(
        "Steps 3, 7 take 6.8 times as long as the others: 63% of the recorded time, most of it exposed"
    )
    assert "local SGD" in text
    assert "valuating" not in text


@pytest.mark.parametrize(("rows", "more"), [(300, True), (220, True), (150, False)])
def test_few_long_steps_that_have_more_to_compute_are_told_so(rows: int, more: bool, tmp_path: Path) -> None:
    """A step of three times the time: by as many FLOPs, by most of them, or by hardly any more."""
    write_steps(tmp_path, [1_000] * 4 + [3_000] + [1_000] * 5, rows=[100] * 4 + [rows] + [100] * 5)
    summary = perfscope.analyze(tmp_path)
    (note,) = (note for note in summary.notes if note.kind.startswith("long_step"))
    assert (note.kind == "long_step_of_more_work") is more
    assert (f"{rows / 100:.1f} times their FLOPs" in note.text) is more
    assert note.text in summary.verdict.headline
    assert summary.verdict.healthy is more


def test_a_long_step_that_waits_for_its_batch_is_told_so(tmp_path: Path) -> None:
    """Ten steps of 1 ms, of which one has 2 ms in the loader before it."""
    events, now = [], 0
    for step in range(10):
        waits = 2_000 if step == 4 else 10
        for cat, name, ts, dur, args in (
            ("user_annotation", f"ProfilerStep#{step}", now, waits + 990, {}),
            ("user_annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", now, waits, {}),
            ("cuda_runtime", "cudaLaunchKernel", now + waits + 1, 5, {"correlation": step + 1}),
            ("kernel", "gemm", now + waits + 10, 975, {"correlation": step + 1, "stream": 7, "device": 0}),
        ):
            tid = 7 if cat == "kernel" else 1
            events.append(
                {"ph": "X", "cat": cat, "name": name, "pid": tid, "tid": tid, "ts": ts, "dur": dur, "args": args}
            )
        now += waits + 990
    device = {"id": 0, "name": "NVIDIA A100-SXM4-80GB"}
    (tmp_path / "trace.json").write_text(json.dumps({"deviceProperties": [device], "traceEvents": events}))
    (note,) = (note for note in measured(tmp_path).notes if note.kind.startswith("long_step"))
    assert note.kind == "long_step_of_loading"
    assert "waiting for a batch that took longer to load" in note.text


@pytest.mark.parametrize("stacks", [True, False])
def test_recorded_python_functions_are_said_to_make_python_slower(stacks: bool, tmp_path: Path) -> None:
    """In each of six steps of 30 ms the host is in one function for 20 ms between two operators."""
    events = []
    for step in range(6):
        at = 30_000 * step
        events.append(event(f"ProfilerStep#{step}", cat="user_annotation", ts=at, dur=30_000))
        events += [event("aten::mm", ts=at + start, dur=4_000) for start in (100, 25_000)]
        if stacks:
            events.append(event("train.py(70): log", cat="python_function", ts=at + 4_200, dur=20_000))
    save(tmp_path, json.dumps({"traceEvents": events}), "rank0.json")
    notes = [note for note in perfscope.analyze(tmp_path).notes if note.kind == "stacks"]
    assert [note.ranks for note in notes] == [(0,)] * stacks
