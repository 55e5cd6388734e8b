"""Runs a framework's training under ``perfscope run`` and compares what was recorded with what the script printed."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from perfscope import analyze
from perfscope.recording.metadata import RunMetadata
from perfscope.recording.vocabulary import GARBAGE_COLLECTION
from perfscope.results.summary import Summary
from tests.collectors.harness import Recording, record

SCRIPTS = Path(__file__).parent / "scripts"
SHORT = ("--wait", "1", "--warmup", "1", "--active", "3")
"""Options that record steps 2 to 4."""
RECORDED = 3
PRINTED = "the truth: "
"""What ``scripts/witness.py`` prints before what it knows."""


def torchrun(ranks: int) -> tuple[str, ...]:
    return (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))


def script(name: str) -> str:
    return str(SCRIPTS / f"{name}.py")


def launcher(name: str) -> str:
    """The command of that name beside the interpreter."""
    return str(Path(sys.executable).with_name(name))


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skips, with the reason, where a package is not installed."""
    missing = [package for package in packages if not _installed(package)]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package around it
        return False


@dataclass
class Trained:
    """A recorded training that went well: see :func:`train`."""

    recording: Recording
    outcomes: list[dict[str, Any]]
    """What each rank's script printed about itself, by rank."""
    _ranges: dict[int, Counter[str]] = field(default_factory=dict)

    def run(self, rank: int = 0) -> RunMetadata:
        return self.recording.run(rank)

    def ranges(self, rank: int = 0) -> Counter[str]:
        """Ranges of ours and of the frameworks' timers in the recorded steps, without collectives' own and garbage
        collections.
        """
        if rank in self._ranges:
            return self._ranges[rank]
        trace = self.recording.trace(rank)
        first = f"ProfilerStep#{trace.recorded_steps()[0]}"
        begin = min(event["ts"] for event in trace.events if event["name"] == first)
        self._ranges[rank] = Counter(
            event["name"]
            for event in trace.events
            if event["name"].startswith(("perfscope::", "megatron::"))
            and not event["name"].startswith(("perfscope::collective#", GARBAGE_COLLECTION))
            and event.get("cat") == "user_annotation"
            and event["ts"] >= begin
        )
        return self._ranges[rank]

    def per_step(self, name: str, rank: int = 0) -> float:
        return self.ranges(rank)[name] / RECORDED


def train(
    folder: Path,
    *command: str,
    ranks: int,
    steps: int,
    backend: str = "gloo",
    detected_by: str = "optimizer",
    world: int | None = None,
    **options: Any,
) -> Trained:
    """Record a command and check what every framework's recording must be.

    ``world`` is what the framework itself takes for the number of ranks, where that is not the truth.
    """
    recording = record(folder / "recording", *command, options=SHORT, timeout=560, **options)
    assert recording.exit_code == 0, recording.err[-4000:]
    lines = [line.partition(PRINTED)[2] for line in recording.out.splitlines() if PRINTED in line]
    outcomes = sorted(map(json.loads, lines), key=_rank)
    assert len(outcomes) == ranks, recording.out
    for each in outcomes:
        assert (each["world"], each["steps"]) == (world or ranks, steps)
        assert each["replaced"], "nothing was replaced while it trained: the test would show nothing"
        assert each["left"] == []
    for rank in range(ranks):
        run = recording.run(rank)
        assert (run.rank, run.world_size, run.local_rank, run.local_world_size) == (rank, ranks, rank, ranks)
        assert (run.steps.seen, run.steps.detected_by) == (steps, detected_by)
        assert (run.backend, run.outcome) == (backend, "finished")
        assert [(each.first_step, each.last_step, each.complete) for each in run.captures] == [(2, 4, True)]
        assert recording.trace(rank).recorded_steps() == [2, 3, 4]
    assert {name for name in recording.traces() if not name.endswith(".trace.json.gz")} == set()
    return Trained(recording, outcomes)


def _rank(outcome: dict[str, Any]) -> int:
    return int(outcome["rank"])


def analyzed(trained: Trained, strategy: str | tuple[str, ...]) -> Summary:
    """Analyze the recording: every rank is there, its categories add up to its step, the strategy is the right one."""
    summary = analyze(trained.recording.folder)
    assert summary.job.strategy == strategy
    assert summary.job.failures == ()
    assert len(summary.time_breakdown) == summary.job.world_size == len(trained.outcomes)
    for row in summary.time_breakdown:
        parts = vars(row)
        rows = sum(value for name, value in parts.items() if name.startswith(("compute_us", "exposed_", "idle_")))
        assert rows == pytest.approx(row.step_time_us, rel=1e-6)
        assert row.compute_us > 0
        assert row.idle_unknown_us < 0.02 * row.step_time_us
    return summary
