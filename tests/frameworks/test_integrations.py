"""Recordings that frameworks' own hooks start, and programs that start them: for real, with unchanged losses."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import setuptools

from perfscope import analyze
from perfscope.recording.vocabulary import BACKWARD, COMMUNICATION, DATALOADER, FORWARD, OPTIMIZER
from tests.collectors.harness import Recording
from tests.frameworks.harness import PRINTED, needs, script, torchrun
from tests.frameworks.test_trainers import ACCELERATE, TRAINER

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]


def run(command: tuple[str, ...], folder: Path, root: Path, **environment: str) -> list[Any]:
    """Run a program as it is; the losses that its ranks print."""
    path = os.pathsep.join((str(root), os.environ.get("PYTHONPATH", ""))).strip(os.pathsep)
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [line.partition(PRINTED)[2] for line in done.stdout.splitlines() if PRINTED in line]
    return [each["loss"] for each in sorted(map(json.loads, lines), key=lambda each: int(each["rank"]))]


def recorded(folder: Path, ranks: int = 2, strategy: str = "ddp", *, killed: bool = False) -> Recording:
    """The recording in ``folder``, every rank of it checked; ``killed``: nobody let the ranks end by themselves."""
    recording = Recording(folder, 0, "", "")
    for rank in range(ranks):
        metadata = recording.run(rank)
        assert (metadata.rank, metadata.world_size, metadata.outcome) == (
            rank,
            ranks,
            "running" if killed else "finished",
        )
        assert metadata.problems == ()
        assert [(each.first_step, each.last_step, each.complete) for each in metadata.captures] == [(2, 4, True)]
        assert {FORWARD, BACKWARD, OPTIMIZER} <= set(recording.trace(rank).ranges())
    summary = analyze(folder)
    assert (summary.job.ranks, summary.job.strategy) == (tuple(range(ranks)), strategy)
    assert recording.launch.has_ended is not killed
    return recording


@needs("transformers", "accelerate")
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_the_trainers_callback(launcher: str, tmp_path: Path, root: Path) -> None:
    started: Any = {"torchrun": torchrun(2), "accelerate": (*ACCELERATE, "--multi_gpu", "--mixed_precision", "no")}
    command = (*started[launcher], script("transformers_trainer"), "--output_dir", str(tmp_path / "out"), *TRAINER)
    plain = run(command, tmp_path, root)
    losses = run(command, tmp_path, root, TEST_CALLBACK=str(tmp_path / "r"))
    assert len(losses) == 2
    assert losses == plain
    recording = recorded(tmp_path / "r")
    assert recording.run(1).settings["transformers"]["gradient_accumulation_steps"] == 2
    assert {DATALOADER, COMMUNICATION} <= set(recording.trace(1).ranges())
    # A second training has a folder of its own.
    run(command, tmp_path, root, TEST_CALLBACK=str(tmp_path / "r"))
    recorded(tmp_path / "r-2")


@needs("lightning")
@pytest.mark.parametrize("hook", ["TEST_CALLBACK", "TEST_PROFILER"])
def test_lightnings_callback_and_profiler(hook: str, tmp_path: Path, root: Path) -> None:
    command = (sys.executable, script("lightning_fit"), "--root", str(tmp_path))
    plain = run(command, tmp_path, root)
    losses = run(command, tmp_path, root, **{hook: str(tmp_path / "r")})
    assert len(losses) == 2
    assert losses == plain
    recording = recorded(tmp_path / "r")
    assert recording.run(1).settings["lightning"]["accumulate_grad_batches"] == 2
    names = {event["name"] for event in recording.trace(1).events}
    assert any(name.startswith("[Strategy]DDPStrategy.training_step") for name in names) == (hook == "TEST_PROFILER")


@needs("ray")
@pytest.mark.parametrize("how", ["decorator", "variable"])
def test_ray_train(how: str, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    line = runpy.run_path(str(root / "setup.py"))["LINE"]
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(line)  # as perfscope.pth, which is installed
    paths = os.pathsep.join((str(tmp_path / "site"), str(root)))
    run((sys.executable, script("ray_train"), str(tmp_path / "r"), how), tmp_path, root, PYTHONPATH=paths)
    recorded(tmp_path / "r", killed=how == "variable")  # as Ray ends its workers


MODEL = """
import torch, perfscope
model = torch.nn.Linear(32, 32)
optimizer = torch.optim.AdamW(model.parameters())
def train(steps):
    for _ in range(steps):
        model(torch.randn(8, 32)).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
"""
NOTEBOOK = (
    MODEL,
    "train(3)",
    "perfscope.start('r', wait=1, warmup=1, active=3); perfscope.start('r')",
    "train(4)",
    "train(4)",
    "print(perfscope.stop())",
    "perfscope.start('r', wait=1, warmup=1, active=3)",
    "train(8)",
    "perfscope.analyze(perfscope.stop())",
)


@needs("nbclient", "ipykernel")
def test_a_notebook(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(root))
    cells = [nbformat.v4.new_code_cell(cell) for cell in NOTEBOOK]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()

    def text(cell: int) -> str:
        return "".join(str(output.get("text", "")) for output in notebook.cells[cell].outputs)

    assert "what is started within is the same recording" in text(2)
    assert str(tmp_path / "r") in text(5)
    assert "recorded steps 2-4 in " in text(5)
    assert "text/html" in notebook.cells[-1].outputs[-1]["data"]  # the verdict
    for folder in ("r", "r-2"):
        recorded(tmp_path / folder, ranks=1, strategy="single")
