"""``perfscope tune`` on real trainings of two ranks: what helps is found and kept, and nothing where nothing does."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.collectors.harness import PERFSCOPE, needs_torch
from tests.tune.harness import environment, job

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900), needs_torch]


def tune(folder: Path, options: tuple[str, ...], command: tuple[str, ...]) -> tuple[dict[str, Any], str]:
    """``tune.json`` and the text on the terminal."""
    result = subprocess.run(
        [*PERFSCOPE, "tune", "--output", str(folder / "tuning"), *options, "--", *command],
        capture_output=True,
        text=True,
        timeout=800,
        env=environment(),
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads((folder / "tuning" / "tune.json").read_text(encoding="utf-8")), result.stdout


def test_a_training_that_waits_for_data_gets_workers(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint.json"
    command = job("--load-ms", 60, "--compute-ms", 40, "--checkpoint", checkpoint)
    options = ("--budget", "2", "--steps", "16", "--only", "dataloader.num_workers")
    found, text = tune(tmp_path, options, command)
    (setting,) = [each for each in found["settings"] if each["kept"]]
    assert (setting["setting"], setting["from"]) == ("dataloader.num_workers", 0)
    assert setting["to"] >= 1
    # Loading takes 60 ms of some 105, and all of it can be hidden behind 40 of sleep by two workers, a third by one.
    kept = found["kept"]
    assert kept["measured_step_us"] < 0.8 * found["baseline"]["step_us"]
    predicted = kept["predicted_step_us"]
    assert predicted["low"] * 0.9 <= kept["measured_step_us"] <= predicted["high"] * 1.1
    assert kept["permanent"] == [f"loader = DataLoader(dataset, num_workers={setting['to']})"]
    assert f"num_workers={setting['to']}" in text
    assert [len(trial["changes"]) for trial in found["trials"]] == [1, 1], "once, and once more"
    assert json.loads(checkpoint.read_text())["steps"] > 16, "its own end of a training ran"


def test_where_there_is_nothing_to_gain_nothing_is_kept(tmp_path: Path) -> None:
    # One bucket already, and what is left to try for DDP saves some microseconds of 40 ms.
    options = ("--budget", "3", "--steps", "16", "--only", "ddp.*")
    found, text = tune(tmp_path, options, job("--compute-ms", 40, "--bucket-mb", 1))
    tried = {setting["setting"] for setting in found["settings"] if setting["measured_step_us"] is not None}
    assert tried == {"ddp.gradient_as_bucket_view", "ddp.static_graph"}
    assert 2 <= len(found["trials"]) <= 3, "the third is for what looks as if it helped"
    assert all(trial["gain"] is not None for trial in found["trials"])
    assert found["kept"] == {"settings": {}, "predicted_step_us": None, "measured_step_us": None, "permanent": []}
    assert "No change is kept" in text
