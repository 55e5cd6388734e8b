"""Real trainings, two ranks and more, with something planted in them: the analysis reports what the stopwatch measured.

``python -m tests.benchmarks.real_runs`` plants more, and shows the figures.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.collectors.harness import needs_torch
from tests.real import causes, checks, network
from tests.real.jobs import Job, Result, run

pytestmark = [pytest.mark.alone, needs_torch]


def _failures(results: list[Result]) -> list[str]:
    return [failure for result in results for failure in result.failures()]


def test_what_is_planted_is_found_and_nothing_else(tmp_path: Path) -> None:
    """One job, healthy and not by turns."""
    results = run(causes.PAIR, tmp_path)
    assert _failures(results) == []
    healthy = [result for result in results if result.case is causes.HEALTHY]
    if not any(checks.is_calm(result.truth) for result in healthy):
        pytest.skip("the machine's other work delayed one rank in every healthy recording; the rest was checked")


def test_ranks_that_take_turns_are_one_cause(tmp_path: Path) -> None:
    job = Job("trio", 3, (causes.COLLECT_IN_TURN, causes.PRODUCTS))
    assert _failures(run(job, tmp_path)) == []


def test_a_slow_link_is_attributed_to_the_link_and_to_no_rank(tmp_path: Path) -> None:
    if reason := network.why_not():
        pytest.skip(f"no network namespace can be made here: {reason}")
    assert _failures(run(causes.SLOW_LINK, tmp_path)) == []
