"""What was recorded of a program beside the truth: what the program prints itself after each of its steps."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median

from perfscope import analyze
from perfscope.recording.metadata import RunMetadata, load_run
from perfscope.recording.paths import further_jobs, rank_of_run_file
from perfscope.results.findings import Finding
from perfscope.results.summary import Summary
from tests.codebases.catalog import ADVISED, Program
from tests.codebases.running import Printed, run, run_in_turns
from tests.collectors.harness import PERFSCOPE

STEP_TIME, STEP_TIME_S = 0.1, 0.01
"""Difference from the program's own stopwatch up to which a step time is right, relative and in s: the collector's work
between steps is in the one and not in the other.
"""

CONTENTION = ("cpu-contention", "cpu-oversubscription")
"""What other processes of this machine cause: these findings may stand before the one that is planted."""

KEPT = "row.json"
"""In a program's folder: its row."""


@dataclass
class Row:
    """A program, what was recorded of it, and what differs from the truth."""

    wrong: list[str] = field(default_factory=list)
    ranks: str = ""
    steps: str = ""
    losses: str = ""
    strategy: str = ""
    step_time: str = ""
    finding: str = ""
    expected: str = ""
    measured: str = ""
    inside: bool | None = None
    """Is the gain of the first advice, followed, in its range? None where it was not measured."""
    others: list[float] = field(default_factory=list)
    """Cores that other processes used during each run."""
    tries: int = 1

    @property
    def busy(self) -> float:
        """Cores that other processes of the machine used meanwhile."""
        return mean(self.others) if self.others else 0.0

    def keep(self, folder: Path) -> None:
        """Write it into the program's folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / KEPT).write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")


def kept(folder: Path) -> Row | None:
    """The row of an earlier run; None where there is none."""
    path = folder / KEPT
    return Row(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def runs_in(folder: Path) -> list[RunMetadata]:
    """What the ranks that recorded something say of their runs."""
    runs = [load_run(path) for path in sorted(folder.iterdir()) if rank_of_run_file(path) is not None]
    return [each for each in runs if each.captures]


def judge(program: Program, folder: Path, assets: Path, turns: int) -> Row:
    """Run a program bare and recorded, and compare; where something is planted, follow the first advice."""
    row = Row()
    bare = _run(row, program.command, program, assets)
    if bare.code:
        row.wrong.append(f"the bare run failed: {bare.failure}")
        return row
    recorded = _run(row, (*PERFSCOPE, "run", "--output", str(folder), "--", *program.command), program, assets)
    runs = runs_in(folder) if folder.is_dir() else []
    if recorded.code or not runs:
        row.wrong.append(recorded.failure)
        return row
    _compare(row, program, runs, [len(runs), *(len(runs_in(each)) for each in further_jobs(folder))])
    same = bare.losses == recorded.losses and len(bare.losses) >= program.steps
    row.losses = "equal" if same else "differ" if program.repeatable else "-"
    if program.repeatable and not same:
        row.wrong.append(f"losses differ: {bare.losses[:3]} … {recorded.losses[:3]} …")
    summary = analyze(folder)
    _judge_summary(row, program, summary, recorded)
    if program.planted and turns:
        _follow(row, program, summary, turns, assets)
    return row


def _run(row: Row, command: tuple[str, ...], program: Program, assets: Path) -> Printed:
    printed = run(command, program, assets)
    row.others.append(printed.others)
    return printed


def _compare(row: Row, program: Program, runs: list[RunMetadata], ranks: list[int]) -> None:
    """Ranks and steps."""
    row.wrong += [f"problem: {problem}" for each in runs for problem in each.problems]
    if ranks != [program.ranks, *program.jobs]:
        row.wrong.append(f"ranks {ranks}, not {[program.ranks, *program.jobs]}")
    seen = {each.steps.seen for each in runs}
    if seen != {program.steps}:
        row.wrong.append(f"steps {seen}, not {program.steps}")
    row.ranks, row.steps = " + ".join(map(str, ranks)), ", ".join(map(str, sorted(seen)))


def _judge_summary(row: Row, program: Program, summary: Summary, recorded: Printed) -> None:
    """Strategy, step time and first finding."""
    row.wrong += [f"not analyzed: {each.reason}" for each in summary.job.failures]
    row.strategy = ", ".join(summary.job.strategies)
    if tuple(sorted(summary.job.strategies)) != program.strategy:
        row.wrong.append(f"strategy {summary.job.strategies}, not {program.strategy}")
    theirs = recorded.step_s(range(summary.job.steps[0], summary.job.steps[-1] + 1)) if summary.job.steps else 0.0
    # Where a capture begins, the program's own step is longer: medians.
    mine = median(summary.job.step_time_us_per_step) / 1e6 if summary.job.steps else 0.0
    row.step_time = f"{mine * 1e3:.1f} / {theirs * 1e3:.1f} ms"
    if not theirs or abs(mine - theirs) > max(STEP_TIME * theirs, STEP_TIME_S):
        row.wrong.append(f"step time {mine:.4f} s, not {theirs:.4f}")
    found = advice(summary)
    row.finding = f"`{found.rule}`" if found else "none"
    if program.rule and (found is None or found.rule != program.rule):
        row.wrong.append(f"first finding {row.finding}, not {program.rule}")


def advice(summary: Summary) -> Finding | None:
    """The first finding that is not about other processes of the machine."""
    return next((each for each in summary.findings if each.rule not in CONTENTION), None)


def _follow(row: Row, program: Program, summary: Summary, turns: int, assets: Path) -> None:
    """What the first advice is to bring, and what following it brings, in turns with the program as it is."""
    found = advice(summary)
    if found is None:
        return
    low, high = 1 / (1 + (found.ceiling or 0.0)), 1.0
    if found.predicted_step_us is not None:
        low, high = (each / summary.job.step_us for each in (found.predicted_step_us.low, found.predicted_step_us.high))
    row.expected = f"{low:.2f} to {high:.2f}"
    if found.rule != program.rule:
        return
    followed = tuple(word.replace(ADVISED, found.action.new or "") for word in program.followed)
    ratios, printed = run_in_turns((program.command, followed), program, assets, turns)
    if not ratios:
        row.wrong.append(f"the advice followed does not run: {printed[-1].failure}")
        return
    row.measured = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)})"
    row.inside = low <= round(median(ratios), 2) <= high
    if not row.inside:
        row.wrong.append(f"gain {row.measured}, not {row.expected}")
