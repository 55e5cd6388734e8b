"""A small GRPO-like loop, recorded for real: who waits for whom, beside what the processes wrote down themselves."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from perfscope import analyze
from tests.collectors.harness import record
from tests.frameworks.harness import needs, script
from tests.waiting import free_port

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600), needs("torch")]


def _busy(log: Path, role: str, cells_ns: np.ndarray) -> np.ndarray:
    """For each moment: did any process of the role work, by its own clock?"""
    busy = np.zeros(len(cells_ns), dtype=bool)
    for number in range(2):
        for start, end in json.loads((log / f"{role}-{number}.json").read_text()):
            busy |= (cells_ns >= start) & (cells_ns < end)
    return busy


@pytest.mark.parametrize(("rollout", "update", "bound"), [(0.4, 0.1, "rollout"), (0.1, 0.4, "learner")])
def test_the_slow_role_bounds_the_iteration(tmp_path: Path, rollout: float, update: float, bound: str) -> None:
    log = tmp_path / "log"
    log.mkdir()
    options = ("--rollout", str(rollout), "--update", str(update), "--log", str(log), "--port", str(free_port()))
    planned = ("--wait", "3", "--warmup", "1", "--active", "6")
    recording = record(tmp_path / "r", sys.executable, script("grpo"), *options, options=planned)
    assert recording.exit_code == 0, recording.err
    summary = analyze(tmp_path / "r")
    roles = summary.roles
    assert roles is not None
    assert roles.main == "learner"
    assert summary.job.ranks == (0, 1)
    assert sorted((row.job, row.world_size) for row in roles.jobs) == [
        ("learner", 2),
        ("rollout-0", 1),
        ("rollout-1", 1),
    ]
    assert roles.bound == bound
    start = datetime.fromisoformat(roles.start).timestamp() * 1e9
    cells = np.arange(start, start + roles.window_us * 1e3, 1e5)
    rows = {row.role: row for row in roles.rows}
    busy = {role: _busy(log, role, cells) for role in rows}
    for role, other in (("rollout", "learner"), ("learner", "rollout")):
        assert rows[role].busy_share == pytest.approx(busy[role].mean(), abs=0.06)
        assert rows[role].waits[other] == pytest.approx((busy[other] & ~busy[role]).mean(), abs=0.06)
    other = "learner" if bound == "rollout" else "rollout"
    assert f"{other} waits for it" in summary.verdict.headline


@needs("trl")
@pytest.mark.parametrize("judge", [0.5, 0.02])
def test_trl_with_a_reward_server(tmp_path: Path, root: Path, judge: float) -> None:
    """A GRPO training of TRL and its judge, captured at the same time: the learner waits while the judge works."""
    log = tmp_path / "log"
    log.mkdir()
    options = ("--judge", str(judge), "--log", str(log), "--folder", str(tmp_path / "r"))
    programs = ("--programs", str(root / "tests" / "codebases" / "programs"))
    planned = ("--wait", "2", "--warmup", "1", "--active", "2")
    recording = record(tmp_path / "r", sys.executable, script("trl_grpo"), *options, *programs, options=planned)
    assert recording.exit_code == 0, recording.err
    roles = analyze(tmp_path / "r").roles
    assert roles is not None
    assert roles.main == "learner"
    assert roles.together
    assert roles.iterations >= 1
    start = datetime.fromisoformat(roles.start).timestamp() * 1e9
    cells = np.arange(start, start + roles.window_us * 1e3, 1e5)

    def share(name: str) -> float:
        inside = np.zeros(len(cells), dtype=bool)
        for begin, end in json.loads((log / f"{name}.json").read_text()):
            inside |= (cells >= begin) & (cells < end)
        return float(inside.mean())

    rows = {row.role: row for row in roles.rows}
    assert rows["reward"].busy_share == pytest.approx(share("reward"), abs=0.06)
    assert rows["learner"].waits.get("reward", 0) == pytest.approx(share("waits"), abs=0.08)
    assert (roles.bound == "reward") == (judge > 0.1)
