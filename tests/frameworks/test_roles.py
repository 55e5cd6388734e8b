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
