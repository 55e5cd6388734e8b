"""Real trainings with one planted cause each: what the script's own stopwatch measures, and what the analysis reports.

    python -m tests.benchmarks.real_runs [--rounds 3] [--only "slow link"] [--keep FOLDER]

Two or three ranks on this machine's CPU, recorded by ``perfscope run``; tests/real/causes.py defines what is planted. A
check holds if it does so in most rounds: they follow one another, so that a minute in which the machine was busy with
other things spoils one of them. The exit code is 1 where a check does not hold.

Best on a machine with as many idle cores as ranks. A figure is compared with the stopwatch's over the same steps, which
the machine's other work lengthens alike; but a recording in which that made a rank late is not called healthy, and
is not asked to be found so.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.real import causes, checks, network
from tests.real.checks import Check
from tests.real.jobs import Job, Result, run

Key = tuple[str, str]
"""What was planted, and what was checked."""


def once(job: Job, folder: Path) -> Iterator[tuple[Key, Check]]:
    """Every check of one job and of the same job without its cause, both recorded now."""
    results = run(job, folder / _file_name(job))
    for result in results:
        yield from _checked(result)
    if job.fixed is not None:
        (fixed,) = run(job.fixed, folder / _file_name(job.fixed))
        yield from _checked(fixed)
        (planted,) = results
        for check in checks.saved(planted.truth, fixed.truth, planted.summary, fixed.summary):
            yield (planted.case.name, check.what), check


def lines(found: dict[Key, list[Check]]) -> Iterator[str]:
    """A table of all checks, each with its figures of the worst round that counts."""
    yield "| planted | checked | by the stopwatch | by PerfScope | holds |"
    yield "|---|---|---|---|---|"
    for (planted, what), rounds in found.items():
        shown = next(check for check in rounds if check.holds == holds(rounds))
        verdict = "yes" if holds(rounds) else "**no**"
        times = f" ({sum(check.holds for check in rounds)} of {len(rounds)})" if len(rounds) > 1 else ""
        yield f"| {planted} | {what} | {shown.wanted()} | {shown.got()} | {verdict}{times} |"


def holds(rounds: Sequence[Check]) -> bool:
    """In most of the rounds?"""
    return 2 * sum(check.holds for check in rounds) > len(rounds)


def main() -> int:
    """Record everything that was asked for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", action="append", choices=[job.name for job in causes.JOBS], help="may be repeated")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the recordings here")
    options = parser.parse_args()
    os.environ["PERFSCOPE_CACHE"] = "off"
    jobs = [job for job in causes.JOBS if not options.only or job.name in options.only]
    if any(job.prefix for job in jobs) and (reason := network.why_not()):
        print(f"left out, for want of a network namespace: {reason}", file=sys.stderr)
        jobs = [job for job in jobs if not job.prefix]
    found: dict[Key, list[Check]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(options.rounds):
            for job in jobs:
                print(f"round {number + 1} of {options.rounds}: {job.name}", file=sys.stderr, flush=True)
                for key, check in once(job, (options.keep or Path(scratch)) / f"round-{number}"):
                    found[key].append(check)
    for line in lines(found):
        print(line)
    if not any(what == checks.FINDINGS for _, what in found):
        print("No recording was calm enough to be called healthy.", file=sys.stderr)
    return 0 if all(holds(rounds) for rounds in found.values()) else 1


def _checked(result: Result) -> Iterator[tuple[Key, Check]]:
    for check in result.checks():
        yield (result.case.name, check.what), check


def _file_name(job: Job) -> str:
    return job.name.replace(" ", "-")


if __name__ == "__main__":
    sys.exit(main())
