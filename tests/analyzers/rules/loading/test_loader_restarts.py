"""Workers that are started again for every epoch, and too slow as well: what each costs is told apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perfscope.analyzers.analyze import analyze
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.whatif import context_of
from perfscope.recording.metadata import DataLoaderMetadata, RunMetadata, save
from perfscope.recording.paths import run_file, trace_file
from perfscope.results.summary import Summary

EPOCH = ((30, 30), (0, 0), (0, 10), (0, 0))
"""For each step of an epoch the ms in which two workers start, and in which it waits for its batch: each takes one of
them 30 ms, and 10 ms of computing follow. So an epoch takes 110 ms."""
LOADER = DataLoaderMetadata(num_workers=2, batches_per_epoch=4, fetched_batches=8, fetch_ns=8 * 30_000_000)


def write(folder: Path, epoch: tuple[tuple[int, int], ...] = EPOCH) -> Path:
    """Three such epochs of one rank on a CPU after a step that does not count, as ``perfscope run`` records them."""
    events: list[dict[str, Any]] = []

    def add(category: str, name: str, begin: int, took: int) -> None:
        events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": begin * 1e3, "dur": took * 1e3}
        )

    now = 0
    for number, (starting, waiting) in enumerate(((0, 0), *3 * epoch)):
        add("user_annotation", f"ProfilerStep#{number}", now, starting + waiting + 10)
        if starting:
            add("user_annotation", "perfscope::dataloader_start", now, starting)
        add("user_annotation", "perfscope::dataloader", now + starting, waiting)
        add("cpu_op", "aten::mm", now + starting + waiting, 10)
        now += starting + waiting + 10
    folder.mkdir()
    trace_file(folder, 0, 0, compressed=False).write_text(
        json.dumps({"traceEvents": events, "distributedInfo": {"rank": 0}})
    )
    run = RunMetadata(rank=0, world_size=1, dataloaders=(LOADER,), cpu_count=64, local_world_size=1)
    save(run, run_file(folder, 0))
    return folder


def findings(summary: Summary) -> dict[str, Any]:
    return {finding.rule: finding for finding in summary.findings}


def test_more_workers_are_advised_for_what_they_end(tmp_path: Path) -> None:
    """With three workers an epoch starts them and waits for the first batch, 60 ms, and computes for 40."""
    folder = write(tmp_path / "t")
    assert predict(context_of(folder), {"dataloader.num_workers": "3"}).mid_ns == pytest.approx(25e6, rel=0.01)
    found = findings(analyze(folder, workers=1))
    assert list(found) == ["loader-stalls", "dataloader-workers"]
    workers = found["dataloader-workers"]
    assert workers.action.new == "3"
    assert workers.gain(27_500) == pytest.approx(27.5 / 25 - 1, rel=0.02)


def test_more_workers_are_not_advised_for_what_starting_costs(tmp_path: Path) -> None:
    found = findings(analyze(write(tmp_path / "t", epoch=((30, 30), (0, 0), (0, 0), (0, 0))), workers=1))
    assert list(found) == ["loader-stalls"]


def test_what_does_not_change_takes_as_long_as_it_did(tmp_path: Path) -> None:
    """Workers deliver a batch in 15 ms each once they have started; that they start is no part of their pace."""
    context = context_of(write(tmp_path / "t", epoch=((30, 30), (0, 20), (0, 20), (0, 20))))
    assert predict(context, {"compute": "1x"}).mid_ns == pytest.approx(context.result.step_ns, rel=1e-3)
