"""Are ranks that delay a whole run found from step histories? ``python -m tests.benchmarks.delays --seeds 0:200``.

Every seed draws a job with a planted delay and a healthy one (``delayed_runs.py``), writes their step histories and has
them analyzed. A planted one counts where its slow steps are at least 5 % longer than they would be without; it is right
where the delayed ranks, their stage and nothing else are reported, a healthy one where nothing is.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from perfscope.analyzers.history.job_history import job_history
from perfscope.recording.job import open_job
from perfscope.results.history import HistoryStraggler
from tests.benchmarks.delayed_runs import PlantedDelay, RunPlan, draw, draw_eventful, simulate, write

LOSS: Final = 0.05


def reported(plan: RunPlan) -> tuple[HistoryStraggler, ...]:
    """What the analysis reports of the job's step histories."""
    with tempfile.TemporaryDirectory() as scratch:
        write(simulate(plan), plan, Path(scratch))
        history, failures = job_history(open_job(Path(scratch)))
    assert history is not None
    assert not failures, failures
    return history.stragglers


def loss(plan: RunPlan) -> tuple[float, float]:
    """What the planted delay adds: to its slow steps (as a share of them) and to the mean step, µs."""
    assert plan.cause is not None
    slow, quick = (simulate(plan, without_cause=without).step.mean(axis=1) for without in (False, True))
    share = {"intermittent": plan.cause.every, "late": 0.5}.get(plan.cause.pattern, 1.0)
    added = float((slow - quick).mean())
    return added / share / float(quick.mean()), added


def both_right(plan: RunPlan, rows: Sequence[HistoryStraggler]) -> bool:
    """Are two planted delays reported, each with its stage, and nothing else?"""
    planted = {(rank, cause.stage) for cause in plan.causes for rank in cause.ranks}
    return {(rank, row.stage) for row in rows for rank in row.ranks} == planted


def is_right(cause: PlantedDelay, rows: Sequence[HistoryStraggler]) -> bool:
    """Is the planted delay reported, and nothing else?"""
    if not rows or any(row.stage != cause.stage for row in rows):
        return False
    if cause.pattern == "rotating":
        return [row.pattern for row in rows] == ["rotating"]
    return sorted(rank for row in rows for rank in row.ranks) == sorted(cause.ranks)


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate, analyze, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:50", help="FIRST:END")
    parser.add_argument("--eventful", action="store_true", help="jobs of 8 to 256 ranks in which more happens")
    options = parser.parse_args(arguments)
    first, end = map(int, options.seeds.split(":"))
    drawn = draw_eventful if options.eventful else draw
    planted: Counter[str] = Counter()
    right: Counter[str] = Counter()
    costs = []
    healthy = accused = 0
    for seed in range(first, end):
        plan = drawn(seed, healthy=True)
        rows = reported(plan)
        healthy += 1
        if rows:
            accused += 1
            print(f"healthy {seed}: {plan}\n  {rows[0]}")
        plan = drawn(seed + 1_000_000, healthy=False)
        cause = plan.cause
        assert cause is not None
        share, added_us = loss(plan)
        if share < LOSS:
            continue
        rows = reported(plan)
        good = is_right(cause, rows) if plan.second is None else both_right(plan, rows)
        kinds = [name for name in ("second", "evaluation_every", "restart_at") if getattr(plan, name)]
        kinds += ["accumulation"] * (plan.accumulation > 1)
        turn = f"{cause.pattern} {cause.stage}"
        for key in ("all", plan.strategy, cause.pattern, cause.stage, turn, f"{plan.ranks} ranks", *kinds):
            planted[key] += 1
            right[key] += good
        if good:
            costs.append(sum(row.cost_us for row in rows) / added_us)
        else:
            print(f"planted {seed} ({share:.1%} of slow steps): {plan}\n  " + "\n  ".join(map(str, rows)))
    print(f"healthy: {healthy - accused} of {healthy} without a straggler")
    for key, count in planted.items():
        print(f"{key}: {right[key]} of {count} right ({right[key] / count:.1%})")
    if costs:
        low, middle, high = np.percentile(costs, [5, 50, 95])
        print(f"reported cost over true cost: 5 % {low:.2f}, median {middle:.2f}, 95 % {high:.2f}")


if __name__ == "__main__":
    main()
