"""Loops without a framework's trainer: torchtitan's way, and a plain one that must stay untouched by all this."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from perfscope.recording.vocabulary import BACKWARD, COMMUNICATION, EVALUATION, FORWARD, OPTIMIZER
from tests.collectors.harness import record
from tests.frameworks.harness import SHORT, analyzed, needs, script, torchrun, train

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600), needs("torch")]


def test_a_device_mesh_with_tensor_parallel_blocks_under_fsdp2(tmp_path: Path) -> None:
    trained = train(tmp_path, *torchrun(4), script("titan_loop"), ranks=4, steps=10)
    run = trained.run(3)
    assert run.strategies == ("fsdp", "tensor")
    assert (run.settings["fsdp"]["version"], run.settings["fsdp"]["shard_degree"]) == (2, 2)
    assert (run.settings["tensor"]["degree"], run.settings["tensor"]["mesh_dimension"]) == (2, "tp")
    assert run.settings["device_mesh"]["meshes"][0]["names"] == ["dp_shard", "tp"]
    assert [trained.per_step(name) for name in (FORWARD, BACKWARD, OPTIMIZER)] == [2, 2, 1]
    assert trained.ranges()[EVALUATION] == 1
    assert trained.ranges()[COMMUNICATION] > 0
    analyzed(trained, ("fsdp", "tensor"))


def test_nothing_is_imported_that_the_script_does_not_import(tmp_path: Path) -> None:
    recording = record(tmp_path / "r", sys.executable, script("plain"), options=SHORT)
    assert recording.exit_code == 0, recording.err
    assert recording.run().steps.seen == 8
    assert recording.out.split() == ["imported:"]
