"""Ranks that are not in the recording: what is said of their host, and how that is judged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.analyzers.measured import advised
from tests.generator import SlowCompute, simulate
from tests.planted.advice import judge_advice
from tests.planted.jobs import data_parallel


def test_a_slow_host_is_mended_with_its_ranks_that_are_missing(tmp_path: Path) -> None:
    slow = SlowCompute(ranks=(4, 5, 6, 7), factor=1.3)
    spec, missing = replace(data_parallel(8, "ddp"), causes=(slow,), noise=0.0), (5,)
    simulate(spec).write(tmp_path, ranks=[rank for rank in range(8) if rank not in missing])
    summary = advised(tmp_path)
    (finding,) = (one for one in summary.findings if one.rule == "straggling-rank")
    # At its peers' pace each recorded rank of the host would still wait for the missing one: that is no advice.
    assert not finding.whatif
    assert finding.action is not None
    assert "Not in the recording: rank 5." in finding.action.how
    advice = judge_advice(spec, missing, summary, lambda truth: truth.step_time_ns / 1e3)
    assert advice is not None
    assert advice.wrong is None
