"""Horovod, run for real where it is built: docs/frameworks.md describes how."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from perfscope import analyze
from perfscope.recording.vocabulary import BACKWARD, COMMUNICATION, FORWARD, OPTIMIZER, REDUCE
from tests.frameworks.harness import analyzed, launcher, needs, script, train

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600), needs("horovod")]

HOROVODRUN = (launcher("horovodrun"), "--gloo", "-np", "2", "-H", "localhost:2", sys.executable)


def test_ranks_collectives_and_its_timeline(tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    trained = train(
        tmp_path, *HOROVODRUN, script("horovod_loop"),
        ranks=2, steps=10, backend="", environment={"HOROVOD_TIMELINE": str(timeline)},
    )  # fmt: skip
    run = trained.run(1)
    # Sending the optimizer's state out takes a step, which is none of the ten.
    assert run.steps.seen == 10
    assert run.strategies == ("ddp",)
    assert run.settings["ddp"] == {"implementation": "horovod"}
    assert run.settings["horovod"] == {
        "size": 2, "local_size": 2, "backward_passes_per_step": 2, "gradient_predivide_factor": 1.0,
        "optimizer": "SGD", "compression": "NoneCompressor", "op": "Average",
    }  # fmt: skip
    assert run.environment["HOROVOD_TIMELINE"] == str(timeline)
    assert run.problems == ()
    assert [trained.per_step(name) for name in (FORWARD, BACKWARD, OPTIMIZER)] == [2, 2, 1]
    assert trained.per_step(COMMUNICATION) == 1  # the loss
    assert trained.per_step(REDUCE) == 4  # a wait for each parameter's gradient
    summary = analyzed(trained, "ddp")
    reduced = [row for row in summary.collectives if row.kind == "all_reduce"]
    assert {row.bytes for row in reduced} == {4 * 64 * 32, 4 * 64, 4 * 4 * 64, 4 * 4, 4}
    assert {row.ranks for row in reduced} == {(0, 1)}
    assert any(row.exposed_comm_wait_us + row.exposed_comm_transfer_us > 0 for row in summary.time_breakdown)
    # The timeline by itself is communication, and nothing else.
    (seen_by_horovod,) = analyze(timeline).time_breakdown
    assert seen_by_horovod.comm_us > 0
    assert seen_by_horovod.compute_us == 0
