"""DDP ``find_unused_parameters``: fires when its walk through the graph delays a job that waits for its host.

After every forward DDP walks the autograd graph for parameters that get no gradient (``search_unused_parameters`` in
torch's ``reducer.cpp``), on the thread that launches the backward. ``static_graph=True`` does that once; where every
parameter is used it is not needed.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rank.host_activity import SEARCH
from perfscope.analyzers.rules.communication.ddp_arguments import setting, written
from perfscope.analyzers.rules.context import RuleContext
from perfscope.results.findings import Action, Confidence, Evidence, Finding

RULE: Final = "ddp-unused-parameters"
SHARE: Final = 0.02
"""Least share of the step that the search costs."""
NO_SEARCH: Final = {"ddp.find_unused_parameters": "false"}


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: no search, or the device has enough queued work."""
    lost_us = lost_in_search_us(job)
    if lost_us < SHARE * job.step_time_us:
        return None
    step = job.replayed(NO_SEARCH, SHARE)
    walk_us, waiting_us = _walk_us(job), _waiting_us(job)
    unused = setting(job, "unused_parameter_size")
    none_unused = unused == 0
    how = (
        written(job.framework, find_unused_parameters=False) + "\nEvery parameter got a gradient in the recorded run."
        if none_unused
        else written(job.framework, static_graph=True)
        + "\nWhere the same parameters are used in every step, the graph is then searched once."
    )
    return job.finding(
        RULE,
        f"DDP searches for unused parameters during {job.share(walk_us):.0%} of the step while the device waits",
        lost_us,
        evidence=(
            Evidence("search through the autograd graph, per step", walk_us, "us", job.ranks),
            Evidence("device idle while it waits for its host, per step (median)", waiting_us, "us", job.ranks),
        ),
        action=Action(
            setting="find_unused_parameters" if none_unused else "static_graph",
            old="True" if none_unused else "False",
            new="False" if none_unused else "True",
            how=how,
            costs="A step in which a parameter gets no gradient then fails or hangs."
            if none_unused
            else "The set of used parameters must not change from step to step.",
        ),
        confidence=job.confidence(Confidence.MEDIUM if isinstance(unused, int) or step is not None else Confidence.LOW),
        predicted=None if step is None else step[0],
        whatif={} if step is None else NO_SEARCH,
    )


def lost_in_search_us(job: RuleContext) -> float:
    """What the search costs a step at most; 0 without any. A device with queued work does not wait for it; without a
    device the step does.
    """
    if not job.torch_ddp or setting(job, "static_graph") is True:
        return 0.0
    return min(_walk_us(job), _waiting_us(job)) if job.on_devices else _walk_us(job)


def _walk_us(job: RuleContext) -> float:
    return sum(row.host_us_per_step for row in job.summary.operators if row.name == SEARCH)


def _waiting_us(job: RuleContext) -> float:
    """Idle time of the device that its host causes: behind a synchronization it waits for the search as well."""
    return sum(job.typical_us(category) for category in ("idle_launch", "idle_host", "idle_sync"))
