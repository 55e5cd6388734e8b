"""Garbage collections, made on purpose, under a real profiler."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perfscope.collectors.problems import Problems
from perfscope.recording.vocabulary import GARBAGE_COLLECTION
from tests.collectors.harness import needs_torch

pytestmark = needs_torch


@pytest.fixture
def problems() -> Problems:
    return Problems()


@pytest.fixture
def ranges(problems: Problems) -> Iterator[Any]:
    """Removed again, and no collections but the test's own, which look at nothing but what the test has made."""
    from perfscope.collectors.annotate import Annotator
    from perfscope.collectors.ranges.gc_ranges import GcRanges

    before = list(gc.callbacks)
    gc.disable()
    gc.freeze()
    made = GcRanges(Annotator(nvtx=False), problems)
    yield made
    made.remove()
    gc.unfreeze()
    gc.enable()
    assert gc.callbacks == before
    assert problems.as_tuple() == ()


def _recorded_ms(folder: Path, work: Any) -> list[float]:
    """Lengths of the ranges that ``work`` leaves in a trace."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    path = folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    found = [event for event in events if event.get("name") == GARBAGE_COLLECTION]
    assert all(event["cat"] == "user_annotation" for event in found)
    return [event["dur"] / 1e3 for event in found]


def test_a_collection_is_as_long_as_it_takes(ranges: Any, tmp_path: Path) -> None:
    """Timed from before ours begins to after it ends, and from after it begins to before it ends."""
    alive = [[number] for number in range(300_000)]
    looked: list[float] = []

    def look(_phase: str, _info: object) -> None:
        looked.append(time.perf_counter() * 1e3)

    def again(phase: str, info: object) -> None:
        look(phase, info)

    def work() -> None:
        gc.callbacks.append(look)
        ranges.install()
        gc.callbacks.append(again)
        gc.collect()
        gc.callbacks.remove(look)
        gc.callbacks.remove(again)

    (found,) = _recorded_ms(tmp_path, work)
    assert len(alive) == 300_000
    before, begun, ending, ended = looked
    assert 0.95 * (ending - begun) - 0.5 <= found <= 1.05 * (ended - before) + 0.5


def test_the_middle_generation_counts_and_the_youngest_does_not(ranges: Any, tmp_path: Path) -> None:
    from perfscope.collectors.ranges.gc_ranges import YOUNGEST

    generations = (0, 1, 0, 2, 0)

    def work() -> None:
        ranges.install()
        for generation in generations:
            gc.collect(generation)

    assert len(_recorded_ms(tmp_path, work)) == sum(generation >= YOUNGEST for generation in generations)


def test_nothing_is_written_once_removed(ranges: Any, tmp_path: Path) -> None:
    def work() -> None:
        ranges.install()
        ranges.remove()
        ranges.remove()
        gc.collect()

    assert _recorded_ms(tmp_path, work) == []


def test_a_dispatch_mode_does_not_see_it(ranges: Any) -> None:
    """Fake tensors and tracing run as modes: an operator of ours among the model's would end up in its graph."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, call: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            seen.append(str(call))
            return call(*arguments, **(options or {}))

    ranges.install()
    with Mode():
        gc.collect()
    assert seen == []


def test_a_forked_child_writes_none(ranges: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even before it has had the time to remove what it inherited."""

    def work() -> None:
        ranges.install()
        monkeypatch.setattr(os, "getpid", lambda: 0)
        gc.collect()

    assert _recorded_ms(tmp_path, work) == []


def test_an_error_switches_it_off_and_stays_inside(ranges: Any, problems: Problems, capsys: Any) -> None:
    from perfscope.collectors.ranges.gc_ranges import GcRanges

    class Broken:
        def begin_aside(self, name: str) -> None:
            raise RuntimeError("no such thing")

    problems = Problems()
    broken = GcRanges(Broken(), problems)  # type: ignore[arg-type]
    broken.install()
    gc.collect()
    gc.collect()
    broken.remove()
    assert problems.as_tuple() == (
        "the range of garbage collection failed and was switched off (RuntimeError: no such thing)",
    )
    assert "Exception ignored" not in capsys.readouterr().err
