"""``perfscope wandb`` and ``perfscope mlflow`` with the real packages, without a network."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import perfscope
from tests.frameworks.harness import needs

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def numbers(samples: Path) -> dict[str, float]:
    return perfscope.analyze(samples / "slow_rank", workers=1).flat("perfscope/")


def command(folder: Path, root: Path, *arguments: str) -> str:
    """The verb in a process of its own, in which no address can be reached."""
    script = (
        "import socket, sys\n"
        "real = socket.socket.connect\n"
        "def connect(self, address):\n"
        "    if self.family != socket.AF_UNIX and address[0] not in ('127.0.0.1', '::1', 'localhost'):\n"
        "        raise OSError(f'no network here: {address}')\n"
        "    return real(self, address)\n"
        "socket.socket.connect = connect\n"
        "from perfscope.cli.main import main; main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(root), "WANDB_API_KEY": "", "HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


BLOCK = 32768
HEADER = struct.Struct("<IHB")
"""Checksum, length and kind of a fragment: 1 whole, 2 first, 3 middle, 4 last (LevelDB's log format)."""


def messages(data: bytes) -> Iterator[bytes]:
    """The messages in W&B's file of a run, after the 7 bytes that it begins with."""
    position, message = 7, b""
    while position + HEADER.size <= len(data):
        if BLOCK - position % BLOCK < HEADER.size:
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = HEADER.unpack_from(data, position)
        message += data[position + HEADER.size : position + HEADER.size + length]
        position += HEADER.size + length
        if kind in (1, 4):
            yield message
            message = b""


def values(items: Any) -> dict[str, Any]:
    """What W&B writes of names and values."""
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


@needs("wandb")
@pytest.mark.filterwarnings("ignore")
def test_wandb_offline(samples: Path, tmp_path: Path, root: Path, numbers: dict[str, float]) -> None:
    from wandb.proto import wandb_internal_pb2

    arguments = ("--offline", "--dir", "wb", "--run", "trained1", "--project", "p", "--ranks", "1", "--workers", "1")
    out = command(tmp_path, root, "wandb", str(samples / "slow_rank"), *arguments)
    (file,) = (tmp_path / "wb").rglob("run-trained1.wandb")
    assert out.strip().endswith(str(file.parent.relative_to(tmp_path)))
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    projects: set[str] = set()
    for data in messages(file.read_bytes()):
        record: Any = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            rows.append(values(record.history.item))
        elif kind == "summary":
            summary.update(values(record.summary.update))
        elif kind == "run":
            projects.add(record.run.project)
    assert projects == {"p"}
    assert {name: summary[name] for name in numbers} == pytest.approx(numbers)
    steps = [row["perfscope/step"] for row in rows]
    assert steps == sorted(set(steps))
    assert any("perfscope/per_step/step_ms" in row and "perfscope/per_step/rank-1/share/compute" in row for row in rows)


@needs("mlflow", "sqlalchemy", "alembic")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("store", ["sqlite", "file"])
def test_mlflow_without_a_server(
    store: str, samples: Path, tmp_path: Path, root: Path, numbers: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = {"sqlite": f"sqlite:///{tmp_path}/mlflow.db", "file": f"file://{tmp_path}/mlruns"}[store]
    arguments = ("--tracking-uri", uri, "--experiment", "e", "--ranks", "1", "--workers", "1")
    out = command(tmp_path, root, "mlflow", str(samples / "slow_rank"), *arguments)
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("e")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id in out
    assert {name: run.data.metrics[name] for name in numbers} == pytest.approx(numbers)
    assert "Rank 1" in run.data.tags["perfscope.headline"]
    history = client.get_metric_history(run.info.run_id, "perfscope/per_step/rank-1/step_ms")
    assert [point.step for point in history] == sorted(point.step for point in history)
    assert len(history) == numbers["perfscope/steps"]
    assert {file.path for file in client.list_artifacts(run.info.run_id, "perfscope")} == {
        "perfscope/report.html",
        "perfscope/summary.json",
    }
    # Into a run that is there.
    command(tmp_path, root, "mlflow", str(samples / "slow_rank"), *arguments, "--run", run.info.run_id)
    assert len(client.search_runs([experiment.experiment_id])) == 1


@pytest.mark.parametrize("verb", ["wandb", "mlflow"])
def test_a_package_that_is_missing(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from perfscope.reports import trackers

    monkeypatch.setitem(sys.modules, verb, None)
    with pytest.raises(trackers.TrackerError, match=rf"pip install 'perfscope-profiler\[{verb}\]'"):
        trackers._package(verb)
