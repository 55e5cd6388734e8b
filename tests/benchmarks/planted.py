"""Every planted cause, in every strategy, on 8 and on 64 ranks: the straggler reported and its cost, against the truth.

    python -m tests.benchmarks.planted [--ranks 8] [--only 1f1b]

The truth is the simulator's: the same job simulated without the cause.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import click

import perfscope
from perfscope.results.summary import Summary
from tests.generator import TENSORBOARD, simulate
from tests.planted.jobs import Expected, Planted, jobs


def describe(planted: Planted) -> tuple[bool, str]:
    """Simulate, analyze and compare one job: whether all is right, and a line about it."""
    job = simulate(planted.spec)
    with tempfile.TemporaryDirectory() as folder:
        job.write(Path(folder), file_template=TENSORBOARD)
        begin = time.perf_counter()
        summary = perfscope.analyze(folder)
        took = time.perf_counter() - begin
    step_us = job.truth.step_time_ns / 1e3
    costs = {expected: job.lost_ns(cause) / 1e3 for cause, expected in planted.attributed}
    due = {expected: cost for expected, cost in costs.items() if cost >= 0.05 * step_us}
    right = _right(summary, costs, due)
    stragglers = "; ".join(
        f"{row.scope} {row.rank} by {row.cause} {row.lost_us:.0f} us ({row.pattern})" for row in summary.stragglers
    )
    planted_costs = "; ".join(
        f"{expected.scope} {expected.ranks[0]} by {expected.cause} {cost:.0f} us" for expected, cost in due.items()
    )
    costs_columns = f"{planted_costs or '-':60} | {stragglers or '-':60}"
    return right, f"{planted.name:45} | {step_us / 1e3:7.2f} | {costs_columns} | {took:5.1f}"


def _right(summary: Summary, costs: dict[Expected, float], due: dict[Expected, float]) -> bool:
    """Everyone due is found within 5 %, the costliest first, and no other rank is reported."""
    matches = [
        next((e for e in costs if e.cause == row.cause and row.rank in e.ranks), None) for row in summary.stragglers
    ]
    if None in matches or not set(due) <= set(matches):
        return False
    first = max(due, key=lambda expected: due[expected], default=None)
    close = all(
        abs(row.lost_us - costs[expected]) <= 0.05 * costs[expected]
        for row, expected in zip(summary.stragglers, matches, strict=True)
        if expected in due
    )
    return close and (first is None or matches[0] == first)


@click.command()
@click.option("--ranks", type=int, multiple=True, default=(8, 64), show_default=True)
@click.option("--only", default="", help="Only jobs whose name contains this.")
def main(ranks: tuple[int, ...], only: str) -> None:
    """Print the table, and how many of its lines are right."""
    print(f"{'job':45} | step ms | {'planted, costing 5 % or more':60} | {'found':60} | analyze s")
    results = []
    for size in ranks:
        for planted in jobs(size):
            if only in planted.name:
                right, line = describe(planted)
                results.append(right)
                print(f"{'ok  ' if right else 'MISS'} {line}", flush=True)
    print(f"{sum(results)} of {len(results)} right")


if __name__ == "__main__":
    main()
