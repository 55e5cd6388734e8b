"""Runs each program of the catalog bare and recorded, and prints what was recorded beside the truth, as two tables.

``python -m tests.codebases.table [--only REGEX] [--output FOLDER] [--turns N]``: the truth is what the program prints
after each of its steps. Where something is planted, the first advice is followed, and its gain measured: without a
profiler, in ``--turns`` turns with the program as it is (0: not at all).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from perfscope import analyze
from perfscope.recording.metadata import RunMetadata, load_run
from perfscope.recording.paths import further_jobs, rank_of_run_file
from perfscope.results.findings import Finding
from perfscope.results.summary import Summary
from tests.codebases.catalog import ASSETS, PLAIN, PLANTED, PROGRAMS, Program
from tests.collectors.harness import PERFSCOPE, kill_all

LIMIT_S = 150
STEP_TIME, STEP_TIME_S = 0.1, 0.01
"""Difference from the program's own stopwatch up to which a step time is right, relative and in s: the collector's work
between steps is in the one and not in the other.
"""

CONTENTION = ("cpu-contention", "cpu-oversubscription")
"""What other processes of this machine cause: these findings may stand before the one that is planted."""


@dataclass
class Printed:
    """What a run of a program printed: a loss and a time for each step."""

    losses: list[str] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    code: int = 0
    out: str = ""

    def step_s(self, steps: range) -> float:
        """Median seconds of these steps; 0 without any."""
        times = [self.ends[each] - self.ends[each - 1] for each in steps if 0 < each < len(self.ends)]
        return median(times) if times else 0.0

    @property
    def failure(self) -> str:
        """Its first line that names an error, or what it printed last."""
        named = re.search(r"^(?:\[rank\d\]: ?)?(\w*(?:Error|Exception): .*)", self.out, re.MULTILINE)
        return f"exit code {self.code}: {named[1] if named else self.out[-300:]}"


def run(command: tuple[str, ...], program: Program, assets: Path) -> Printed:
    """Run a command in a folder of its own, to its end or the limit."""
    command = tuple(word.replace(ASSETS, str(assets)) for word in command)
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "RAY_DEDUP_LOGS": "0", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    printed, until, lines = Printed(), time.monotonic() + LIMIT_S, []
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=folder, env=environment, start_new_session=True
        )
        with open(log.name, "rb") as reader:  # noqa: PTH123
            while (ended := process.poll() is not None) or time.monotonic() < until:
                now = time.perf_counter()
                for line in reader:
                    if not line.endswith(b"\n"):
                        reader.seek(-len(line), os.SEEK_CUR)  # the rest is about to come
                        break
                    lines.append(line.decode(errors="replace"))
                    if found := re.search(program.log, lines[-1]):
                        printed.losses.append(found[1])
                        printed.ends.append(float(found[2]) if found.re.groups > 1 else now)
                if ended:
                    break
                time.sleep(0.005)
            else:
                kill_all(process)
                lines.append(f"stopped after {LIMIT_S} s")
        printed.code = process.wait()
    printed.out = "".join(lines)
    return printed


def runs_in(folder: Path) -> list[RunMetadata]:
    """What the ranks that recorded something say of their runs."""
    runs = [load_run(path) for path in sorted(folder.iterdir()) if rank_of_run_file(path) is not None]
    return [each for each in runs if each.captures]


@dataclass
class Row:
    """A program, what was recorded of it, and what differs from the truth."""

    program: Program
    wrong: list[str]
    cells: list[str] = field(default_factory=list)
    summary: Summary | None = None


def judge(program: Program, folder: Path, assets: Path) -> Row:
    """Run a program bare and recorded, and compare."""
    bare = run(program.command, program, assets)
    if bare.code:
        return Row(program, [f"the bare run failed: {bare.failure}"])
    recorded = run((*PERFSCOPE, "run", "--output", str(folder), "--", *program.command), program, assets)
    runs = runs_in(folder) if folder.is_dir() else []
    if recorded.code or not runs:
        return Row(program, [recorded.failure])
    row = Row(program, [f"problem: {problem}" for each in runs for problem in each.problems])
    ranks = [len(runs), *(len(runs_in(each)) for each in further_jobs(folder))]
    if ranks != [program.ranks, *program.jobs]:
        row.wrong.append(f"ranks {ranks}, not {[program.ranks, *program.jobs]}")
    if (seen := {each.steps.seen for each in runs}) != {program.steps}:
        row.wrong.append(f"steps {seen}, not {program.steps}")
    same = bare.losses == recorded.losses and len(bare.losses) >= program.steps
    if program.repeatable and not same:
        row.wrong.append(f"losses differ: {bare.losses[:3]} … {recorded.losses[:3]} …")
    row.summary = summary = analyze(folder)
    row.wrong += [f"not analyzed: {each.reason}" for each in summary.job.failures]
    if tuple(sorted(summary.job.strategies)) != program.strategy:
        row.wrong.append(f"strategy {summary.job.strategies}, not {program.strategy}")
    theirs = recorded.step_s(range(summary.job.steps[0], summary.job.steps[-1] + 1)) if summary.job.steps else 0.0
    # Where a capture begins, the program's own step is longer: medians.
    mine = median(summary.job.step_time_us_per_step) / 1e6 if summary.job.steps else 0.0
    if not theirs or abs(mine - theirs) > max(STEP_TIME * theirs, STEP_TIME_S):
        row.wrong.append(f"step time {mine:.4f} s, not {theirs:.4f}")
    found = advice(summary)
    if program.rule and (found is None or found.rule != program.rule):
        row.wrong.append(f"first finding {found.rule if found else None}, not {program.rule}")
    row.cells = [
        " + ".join(map(str, ranks)),
        ", ".join(map(str, sorted(seen))),
        "equal" if same else "differ" if program.repeatable else "-",
        ", ".join(summary.job.strategies),
        f"{mine * 1e3:.1f} / {theirs * 1e3:.1f} ms",
        ", ".join(sorted(runs[0].settings)),
    ]
    return row


def advice(summary: Summary) -> Finding | None:
    """The first finding that is not about other processes of the machine."""
    return next((each for each in summary.findings if each.rule not in CONTENTION), None)


def follow(row: Row, turns: int, assets: Path) -> list[str]:
    """The headline's finding, what its advice is to bring, and what following it brings, in turns with the bare run."""
    assert row.summary is not None
    found = advice(row.summary)
    if found is None:
        return ["nothing", "-", "-"]
    low, high = 1 / (1 + (found.ceiling or 0.0)), 1.0
    if found.predicted_step_us is not None:
        now = row.summary.job.step_us
        low, high = found.predicted_step_us.low / now, found.predicted_step_us.high / now
    expected = f"{low:.2f} to {high:.2f}"
    ratios = []
    for _ in range(turns):
        one, other = (run(each, row.program, assets) for each in (row.program.command, row.program.followed))
        spans = [each.step_s(range(5, row.program.steps)) for each in (one, other)]
        if not all(spans):
            row.wrong.append(f"the advice followed does not run: {other.failure}")
            return [found.rule, expected, "-"]
        ratios.append(spans[1] / spans[0])
    return [found.rule, expected, ", ".join(f"{each:.2f}" for each in sorted(ratios)) or "-"]


def print_table(title: str, programs: list[Program], options: argparse.Namespace, assets: Path) -> list[Row]:
    """One program after the other; rows as they come."""
    columns = ["program", "ranks", "steps", "losses", "strategy", "step time, here / its own", "settings"]
    planted = any(each.planted for each in programs)
    columns[1:1] = ["planted"] * planted
    columns += ["first finding", "predicted / now", "measured / now"] * planted
    print(f"\n{title}\n\n| {' | '.join([*columns, ''])} |\n|{'---|' * (len(columns) + 1)}", flush=True)
    rows = []
    for program in programs:
        folder = options.output / re.sub(r"\W+", "-", f"{program.name} {program.planted}").strip("-")
        shutil.rmtree(folder, ignore_errors=True)
        row = judge(program, folder, assets)
        if planted:
            row.cells.insert(0, program.planted)
            row.cells += follow(row, options.turns, assets) if row.summary else []
        rows.append(row)
        verdict = "right" if not row.wrong else "; ".join(row.wrong)
        print(f"| {' | '.join([program.name, *row.cells, verdict])} |", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--output", type=Path, default=None, help="keep the recordings here")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    options.output = (options.output or Path(tempfile.mkdtemp(prefix="codebases-"))).absolute()
    options.output.mkdir(parents=True, exist_ok=True)
    assets = options.output / "assets"
    if not assets.exists():
        assets.mkdir()
        subprocess.run([sys.executable, str(PROGRAMS / "assets.py"), str(assets)], check=True)
    rows = []
    for title, programs in (("As they are", PLAIN), ("With something planted", PLANTED)):
        chosen = [each for each in programs if re.search(options.only, f"{each.name}, {each.planted}")]
        rows += print_table(title, chosen, options, assets) if chosen else []
    right = sum(not each.wrong for each in rows)
    print(f"\n{right} of {len(rows)} right; recordings in {options.output}")
    sys.exit(right < len(rows))


if __name__ == "__main__":
    main()
