"""DDP ``find_unused_parameters``: fires when its walk through the graph holds up a job that waits for its host.

After every forward DDP walks the autograd graph for parameters that get no gradient (``search_unused_parameters`` in
torch's ``reducer.cpp``), on the thread that launches the backward. ``static_graph=True`` does that once; where every
parameter is used it is for nothing.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules.ddp_arguments import setting, written
from perfscope.analyzers.rules.traffic import on_devices, sure
from perfscope.findings import Action, Confidence, Evidence, Finding, Obtained, Severity, ceiling

RULE: Final = "ddp-unused-parameters"
SHARE: Final = 0.02
"""Share of the step that the walk must cost."""
WALK: Final = "torch.distributed.ddp.reducer::search_unused_parameters"


def evaluate(facts: JobFacts) -> Finding | None:
    """The finding, or None: no walk, or a device that has enough to do meanwhile."""
    if not facts.torch_ddp or setting(facts, "static_graph") is True:
        return None
    walk_us = sum(row.host_us_per_step for row in facts.operators if row.name == WALK)
    # A device with work in its queue does not notice; without one the walk is the step's.
    waiting_us = facts.typical_us("idle_launch") + facts.typical_us("idle_host")
    lost_us = min(walk_us, waiting_us) if on_devices(facts) else walk_us
    if lost_us < SHARE * facts.step_time_us:
        return None
    unused = setting(facts, "unused_parameter_size")
    none_unused = unused == 0
    how = (
        written(facts, find_unused_parameters=False) + ": every parameter got a gradient in the recorded run."
        if none_unused
        else written(facts, static_graph=True) + ", if the same parameters are used in every step: the graph is then "
        "walked once."
    )
    return Finding(
        rule=RULE,
        title=f"DDP looks for unused parameters for {walk_us / facts.step_time_us:.0%} of the step while the job waits "
        "for its host",
        severity=Severity.of_share(lost_us / facts.step_time_us),
        evidence=(
            Evidence(what="walking the autograd graph per step", value=walk_us, unit="us", ranks=facts.ranks),
            Evidence(what="device idle for its host per step (median)", value=waiting_us, unit="us", ranks=facts.ranks),
        ),
        action=Action(
            setting="find_unused_parameters" if none_unused else "static_graph",
            old="True" if none_unused else "False",
            new="False" if none_unused else "True",
            how=how,
            costs="A step that leaves a parameter without a gradient then fails or hangs."
            if none_unused
            else "The set of used parameters must not change from step to step.",
        ),
        confidence=sure(facts, Confidence.MEDIUM if isinstance(unused, int) else Confidence.LOW),
        obtained=Obtained.BOUNDED,
        ceiling=ceiling(facts.step_time_us, lost_us),
    )
