"""``perfscope tune`` as a user calls it, without a training: its refusals, its table, its JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from perfscope.analyzers.whatif.predict import WhatIfAnswer
from perfscope.cli.main import main
from perfscope.tune.candidates import Candidate
from perfscope.tune.measuring import Measurement, TrialGain
from perfscope.tune.result import Result, as_json, as_text
from perfscope.tune.search import Decision, SearchOutcome, Trial
from tests.collectors.harness import PERFSCOPE
from tests.schemas import follows
from tests.waiting import PATIENCE_S, until


def tune(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["tune", *(str(argument) for argument in arguments)])
    return result.exit_code, result.output


def test_a_command_is_needed() -> None:
    code, output = tune("--budget", "3")
    assert code == 2
    assert "COMMAND" in output


@pytest.mark.parametrize("setting", ["bucket_cap_mb=4", "ddp.nothing=1", "ddp.bucket_cap_mb="])
def test_a_setting_that_is_not_understood(setting: str) -> None:
    code, output = tune("--try", setting, "--", "true")
    assert code == 2
    assert "--try" in output


def test_an_earlier_tuning_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "tune.json").write_text("{}", encoding="utf-8")
    code, output = tune("-o", tmp_path, "--", "true")
    assert code == 2
    assert "--overwrite" in output
    assert (tmp_path / "tune.json").read_text(encoding="utf-8") == "{}"


def test_a_command_that_does_not_train_is_refused_with_what_to_do(tmp_path: Path) -> None:
    code, output = tune("-o", tmp_path, "--", sys.executable, "-c", "print('hello')")
    assert code == 2
    assert "recording" in output


def test_a_command_that_fails(tmp_path: Path) -> None:
    code, output = tune("-o", tmp_path, "--", sys.executable, "-c", "raise SystemExit('no such data')")
    assert code == 2
    assert "no such data" in output


def test_a_signal_ends_the_command_too(tmp_path: Path) -> None:
    code = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(600)"
    process = subprocess.Popen(
        [*PERFSCOPE, "tune", "-o", "tuning", "--", sys.executable, "-c", code],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    pid = tmp_path / "pid"
    until(lambda: pid.exists() and pid.read_text(), "the command runs", process)
    process.terminate()
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def _result(*, kept: bool) -> Result:
    """Workers that bring a fifth; an untried static graph; a bf16 hook that nobody allowed."""
    workers = Candidate(
        name="dataloader.num_workers", new=2, old=0, why="starved", recommended=True,
        predicted=WhatIfAnswer({}, 110e6, 110e6, 75e6, 80e6, 95e6, 0.0),
    )  # fmt: skip
    graph = Candidate(name="ddp.static_graph", new=True, old=False, why="the same parameters in every step")
    hook = Candidate(name="ddp.comm_dtype", new="bf16", old=None, why="half the bytes", numerics=True)
    saved = Trial(changes=(workers,), measurement=Measurement(80e6, 1e6, 24), gain=TrialGain(0.2, 0.03))
    failed = Trial(changes=(graph,), failed="RuntimeError: unused")
    outcome = SearchOutcome(
        baselines=[Measurement(100e6, 1e6, 24), Measurement(100e6, 1e6, 24)],
        trials=[saved, failed],
        decisions=[
            Decision(candidate=workers, kept=kept, why="saves time, measured twice" if kept else "gone", trial=saved),
            Decision(candidate=graph, kept=False, why="failed: RuntimeError: unused", trial=failed),
        ],
        confirmed=Trial(changes=(workers,), measurement=Measurement(81e6, 1e6, 24), gain=TrialGain(0.19, 0.03)),
    )
    return Result(
        outcome=outcome, left=((hook, "changes what is computed"),), together=workers.predicted if kept else None,
        keep=("DataLoader(…, num_workers=2)",) if kept else (), command=("train.py",),
    )  # fmt: skip


def test_the_table_shows_what_was_predicted_measured_and_kept() -> None:
    text = as_text(_result(kept=True))
    row = next(line for line in text.splitlines() if line.startswith("dataloader.num_workers"))
    assert row.split() == [
        "dataloader.num_workers", "0", "2", "65.00", "..", "86.36", "80.00", "-20.0%", "±3.0%",
        "kept:", "saves", "time,", "measured", "twice",
    ]  # fmt: skip
    assert "With dataloader.num_workers=2: 81.00 ms, measured again (-19.0% ±3.0%; predicted 65.00 .. 86.36)." in text
    assert "    DataLoader(…, num_workers=2)" in text
    assert "not tried: ddp.comm_dtype=bf16 (changes what is computed)" in text
    assert "failed: RuntimeError: unused" in text


def test_without_a_gain_nothing_is_recommended() -> None:
    text = as_text(_result(kept=False))
    assert "No change is kept" in text
    assert "DataLoader(" not in text
    assert "a quieter machine" not in text


def test_on_an_unsteady_machine_it_names_what_would_show_more() -> None:
    result = _result(kept=False)
    shaky = [Measurement(100e6, 1e6, 24), Measurement(125e6, 1e6, 24), Measurement(100e6, 1e6, 24)]
    text = as_text(replace(result, outcome=replace(result.outcome, baselines=shaky)))
    assert "Runs of the unchanged job differ by" in text
    assert "a quieter machine" in text


def test_the_json_has_the_same() -> None:
    document = json.loads(json.dumps(as_json(_result(kept=True))))
    follows("tune", document)
    follows("tune", json.loads(json.dumps(as_json(_result(kept=False)))))
    assert document["schema"] == "perfscope.tune/1"
    assert document["baseline"]["step_us"] == 100_000
    workers, graph, hook = document["settings"]
    assert (workers["from"], workers["to"], workers["kept"], workers["measured_step_us"]) == (0, 2, True, 80_000)
    assert workers["predicted_step_us"]["low"] == pytest.approx(65_000)
    assert (graph["measured_step_us"], graph["predicted_step_us"]) == (None, None)
    assert (hook["changes_numerics"], hook["kept"]) == (True, False)
    assert document["kept"]["settings"] == {"dataloader.num_workers": 2}
    assert document["kept"]["measured_step_us"] == pytest.approx(81_000)
    assert document["kept"]["permanent"] == ["DataLoader(…, num_workers=2)"]
