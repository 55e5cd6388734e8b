"""Transfers that are slow in a few steps only: fires when all collectives of these take longer than in the others.

The job sends the same bytes in each step. Where they take several times as long in some, something else uses the same
adapters, switches or storage then, or a link fails and recovers.
"""

from __future__ import annotations

from statistics import mean
from typing import Final

from perfscope.analyzers.rules.context import RuleContext
from perfscope.results.findings import Action, Evidence, Finding

RULE: Final = "slow-transfers"
SHARE: Final = 0.05
"""Least share of the step, in the mean, that the replay saves."""
_CHANGE: Final = {"network.slow_steps": "0"}
_HOW: Final = """\
Look at what else used the network at that time: other jobs on the same switches, checkpoints and data on network \
storage, this job's own saving. Counters of adapters and switches tell congestion from errors (ethtool -S: ECN and \
pause frames; perfquery: symbol errors, link downed), and whether links came up slower (ibstat)."""


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: transfers take about as long in all steps, or it costs little."""
    slow = job.slow_transfers
    replayed = job.replayed(_CHANGE, SHARE) if slow else None
    if replayed is None:
        return None
    prediction, saved_us = replayed
    times = mean(slow.values())
    lone = len(slow) == 1  # nothing says that it comes again: what it costs is a bound
    return job.finding(
        RULE,
        f"In {len(slow)} of {job.steps} steps all transfers take {times:.1f} times as long as in the others, which "
        f"costs {job.share(saved_us):.0%} of the time",
        saved_us,
        evidence=(
            *(Evidence(f"transfers of step {step}, times as long as usual", factor) for step, factor in slow.items()),
            job.exposed_transfer(),
        ),
        action=Action(setting="network in the slow steps", old=None, new=None, how=_HOW),
        confidence=job.confidence(),
        predicted=None if lone else prediction,
        whatif={} if lone else _CHANGE,
    )
