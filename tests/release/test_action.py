"""The action for GitHub: its script is run as a runner would, with inputs as variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.fixture(scope="module")
def action(root: Path) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((root / "action.yml").read_text(encoding="utf-8"))
    return document


def _run(action: dict[str, Any], folder: Path, root: Path, **inputs: str) -> tuple[int, dict[str, str]]:
    """Exit code of the step ``check``, and its outputs."""
    (step,) = (step for step in action["runs"]["steps"] if step.get("id") == "check")
    given = {name: str(each.get("default", "")) for name, each in action["inputs"].items()}
    given |= {name.replace("_", "-"): value for name, value in inputs.items()}
    variables = {
        variable: given[text.removeprefix("${{ inputs.").removesuffix(" }}")] for variable, text in step["env"].items()
    }
    program = folder / "bin" / "perfscope"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m perfscope "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    outputs, page = folder / "outputs", folder / "page"
    environment = {
        **os.environ, **variables, "PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(root),
        "GITHUB_OUTPUT": str(outputs), "GITHUB_STEP_SUMMARY": str(page), "PERFSCOPE_CACHE": "off",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert page.exists() or done.returncode not in (0, 3), done.stderr
    lines = outputs.read_text(encoding="utf-8").splitlines() if outputs.exists() else []
    return done.returncode, dict(line.split("=", 1) for line in lines)


def test_every_input_is_described_and_used(action: dict[str, Any]) -> None:
    assert all(each["description"] for each in (*action["inputs"].values(), *action["outputs"].values()))
    used = str(action["runs"])
    assert all(f"inputs.{name}" in used for name in action["inputs"])
    # An input inside a script would be run as code.
    assert not any("${{" in step.get("run", "") for step in action["runs"]["steps"])


def test_a_budget_that_holds_passes(action: dict[str, Any], root: Path, samples: Path, tmp_path: Path) -> None:
    status, outputs = _run(action, tmp_path, root, traces=str(samples / "healthy"), fail_on="high")
    assert (status, outputs["passed"]) == (0, "true")
    assert (tmp_path / "perfscope-check" / "report.html").stat().st_size > 100_000
    assert (tmp_path / outputs["summary"]).is_file()
    # The next run's baseline, and the summary itself as what is checked.
    (tmp_path / "budget.toml").write_text('[step_time]\nregression = "3 %"\n', encoding="utf-8")
    given = {"traces": outputs["summary"], "baseline": outputs["summary"], "budget": "budget.toml"}
    status, outputs = _run(action, tmp_path, root, **given, output="again")
    assert (status, outputs["passed"]) == (0, "true")


def test_a_finding_fails_it(action: dict[str, Any], root: Path, samples: Path, tmp_path: Path) -> None:
    status, outputs = _run(action, tmp_path, root, traces=str(samples / "starved"), fail_on="high")
    assert (status, outputs["passed"]) == (3, "false")
    assert "Data loading" in (tmp_path / "page").read_text(encoding="utf-8")


def test_what_cannot_be_read_ends_it(action: dict[str, Any], root: Path, tmp_path: Path) -> None:
    status, outputs = _run(action, tmp_path, root, traces="nowhere", fail_on="high")
    assert status == 2
    assert outputs == {}
