"""Who the others wait for: a rank, a host, a pipeline stage, or ranks in turn; names them and the cause.

Source: arXiv 2505.05713 (stragglers in large training jobs): worker faults are rare, uneven work comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Final

from perfscope.analyzers.job.hosts import NAMELESS
from perfscope.analyzers.job.slow_operators import SlowOperator
from perfscope.analyzers.losses import host_work
from perfscope.analyzers.rank.host_activity import BETWEEN
from perfscope.analyzers.rules.context import RuleContext, known
from perfscope.analyzers.rules.host import cpu_contention, cpu_oversubscription, garbage_collection, recompilation
from perfscope.analyzers.rules.loading import dataloader_workers
from perfscope.analyzers.rules.ranks import imbalanced_work
from perfscope.analyzers.rules.ranks.brief_recording import AT_THE_START, doubt, is_at_the_start, may_be_the_machine
from perfscope.analyzers.rules.ranks.paused_in import most_over_others, paused_in
from perfscope.analyzers.rules.ranks.remedies import (
    WAITS,
    by_cause,
    by_straggler,
    in_operator,
    knows_waits_for_cores,
    over_others,
    slow_operator,
    waits_for_cores,
    waits_longer_us,
    work_over_peers,
)
from perfscope.grouping import grouped
from perfscope.results.attribution import CAUSE_PHRASES, host_in_words, subject
from perfscope.results.findings import STRAGGLING_RANK, Action, Confidence, Evidence, Finding
from perfscope.results.rows import StragglerRow
from perfscope.text import duration, lower_first, ranks_in_words

RULE: Final = STRAGGLING_RANK
SHARE: Final = 0.05
"""Least straggler cost, as a share of the step."""
OVER_NEXT: Final = 3.0
"""Least cost over that of the next straggler, where it is neither steady nor large: ranks that take turns at that are
noise. Two healthy ranks on a busy host were seen at 2.5."""
STEADY: Final = 0.8
"""A straggler is steady when it costs the most in at least this share of the steps, or more than noise, whoever costs
the most."""
BEYOND_NOISE: Final = 0.15
"""From this share of the step the cost is not noise, whatever the other ranks cost."""

FEWEST: Final = 3
FEWEST_ON_DEVICES: Final = 2
"""Steps from which a rank is called a straggler: what is late in one, or in two where ranks share cores, may have been
so by accident. Not so kernels that take longer on one device, or transfers over one link: a step has hundreds."""
_HUNDREDS: Final = ("compute", "link")

MORE_WORK: Final = 0.05
"""Relative difference in FLOPs from which a rank has other work than its peers."""
_EXPLAINED: Final = 0.5
"""Part of what it computes for longer, at least, that its further work must be: it is slow by the rest."""

_ALSO_LATE: Final = 0.25
"""Part of a straggler's cost from which another cause on the same rank is told, too."""
_SHOWN_AS: Final = {
    "compute": "compute_us",
    "host": "idle_host_us",
    "launch": "idle_launch_us",
    "dataloader": "idle_dataloader_us",
}
"""Causes that are told beside another one, and where the time breakdown shows them."""

_FEW_STEPS: Final = 0.2
"""Share of the steps up to which a rank may have waited for its batches by chance, where all load as slowly."""
_ALSO: Final = 0.25
"""Of a rank's pauses in its loop: where its peers pause there for as long, they may wait for the same."""

_AS_LONG: Final = (
    "The other ranks pause at the same place. If they wait there for what takes as long on every rank (a queue, a "
    "thread that reads ahead), this rank is only the last one, and at its peers' pace nothing is gained: see what it "
    "waits for."
)

_FEW_BATCHES: Final = (
    "It waited in few steps, and how fast the loaders of the other ranks are is not known. If they are all as slow, "
    "this rank was only the last one, and at its peers' pace nothing is gained: more workers on all ranks help then. "
    "Record more steps, or with perfscope run, which times batches."
)

_UNPAIRED: Final = (
    "The recording does not show which ranks the messages of the pipeline go to, so nothing shows how long the others "
    "wait for these: at most for as long as these take longer than others for the same work. Record with "
    "torch.profiler (perfscope run does), whose traces name the ranks at both ends since torch 2.5."
)

_BY_ACCIDENT: Final = (
    "Record more steps (perfscope run --active 8): {steps} cannot tell a slow rank from one that was late by accident."
)
_CUT_SHORT: Final = (
    "Record again without the script's own profiler, or other steps (--wait): it ended the capture, and {steps} cannot "
    "tell a slow rank from one that was late by accident."
)

_OF_ITS_HOST: Final = (
    "Not in the recording: {missing}. Those on this host are taken to be as slow as its other ranks, and as quick once "
    "it is mended."
)

_OTHERS_AS_LATE: Final = (
    "Not in the recording: {missing}. If they come as late as {who}, nothing shows it, and less is gained."
)

_MORE_WORK: Final = (
    "Spread samples evenly (a DistributedSampler, shards of equal size, batches of equal length), and experts' tokens: "
    "{who} has more to compute than its peers, so its device is not the cause. The prediction is of all ranks at the "
    "mean of their work."
)


def evaluate(job: RuleContext) -> Finding | None:
    """That of the worst straggler; None where there is nothing to tell."""
    worst = told(job)
    if worst is None:
        return None
    operator = slow_operator(job, worst)
    work = None if operator is not None and operator.is_own_work else work_over_peers(job, worst)
    if work is not None and work - 1 >= max(MORE_WORK, _EXPLAINED * (_compute_over_peers(job, worst) - 1)):
        return _with_more_work(job, worst, work)
    unsure, accident = _doubts(job, worst), _may_be_accident(job, worst)
    if (accident or is_in_doubt(job)) and worst.lost_us < BEYOND_NOISE * job.step_time_us:
        return None
    prediction = None if accident else worst.step_without(job.step_time_us)
    if prediction is not None and (unsure or (job.info.missing_ranks and worst.scope != "host")):
        prediction = replace(prediction, high=job.step_time_us)
    return job.finding(
        RULE,
        f"{_who(job, worst)}{_cost(job, worst)}",
        worst.lost_us,
        evidence=_evidence(job, worst),
        action=Action(
            setting=_setting(job, worst),
            old=None,
            new=None,
            how="\n".join((*_again(job, worst, _remedy(job, worst)), *_not_recorded(job, worst), *unsure)),
        ),
        confidence=_confidence(job, worst, unsure=bool(unsure)),
        predicted=prediction,
        whatif={} if unsure or accident else _whatif(job, worst),
    )


def is_in_doubt(job: RuleContext) -> bool:
    """May the machine, or the profiler's start, have been what made the worst straggler slow?"""
    worst = told(job)
    return worst is not None and (may_be_the_machine(job, worst) or is_at_the_start(job, worst))


def _confidence(job: RuleContext, worst: StragglerRow, *, unsure: bool) -> Confidence:
    found = Confidence(worst.confidence)
    if unsure:
        return Confidence.LOW
    return Confidence.MEDIUM if found is Confidence.HIGH and not knows_waits_for_cores(job, worst) else found


def _may_be_accident(job: RuleContext, row: StragglerRow) -> bool:
    """Are there too few steps to tell a slow rank from one that was late by accident?"""
    if job.on_devices:
        return job.steps < FEWEST_ON_DEVICES and not {row.cause, row.scope} & set(_HUNDREDS)
    return job.steps < FEWEST


def _again(job: RuleContext, row: StragglerRow, remedy: str) -> tuple[str, ...]:
    """The remedy; where a rank may be late by accident, what comes before it."""
    if not _may_be_accident(job, row):
        return (remedy,)
    steps = "one step" if job.steps == 1 else f"{job.steps} steps"
    why = _CUT_SHORT if any(run.went_on for run in job.runs.values()) else _BY_ACCIDENT
    return why.format(steps=steps), f"If it is late again: {lower_first(remedy)}"


def told(job: RuleContext) -> StragglerRow | None:
    """The worst straggler, where it costs enough and clearly more than the next. Those whose cause has a rule of its
    own are left to it.
    """
    others = (garbage_collection, recompilation, imbalanced_work, dataloader_workers)
    mine = [row for row in job.summary.stragglers if not any(rule.explains(job, row) for rule in others)]
    mine = [row for row in mine if not _waits_for_cores(job, row)]
    if not mine:
        return None
    worst = mine[0]
    # What ranks cost in turn was told apart from what this one does: it is no other straggler.
    following = max((row.lost_us for row in mine[1:] if row.scope != "job"), default=0.0)
    if worst.lost_us < SHARE * job.step_time_us:
        return None
    much = worst.lost_us >= BEYOND_NOISE * job.step_time_us
    return worst if much or _is_steady(job, worst) or worst.lost_us >= OVER_NEXT * following else None


def _waits_for_cores(job: RuleContext, row: StragglerRow) -> bool:
    """Is a rank late because its training thread waits for a core, where the job's threads are more than the cores, or
    in the short time that was recorded other programs were on these?
    """
    waits = row.cause in ("compute", "host") and waits_longer_us(job, row) >= WAITS * row.lost_us
    if not waits or job.on_devices:
        return False
    # Of cores that all ranks share with other programs it is now one rank that waits, and now another.
    turns = may_be_the_machine(job, row) and cpu_contention.evaluate(job) is not None
    return turns or cpu_oversubscription.evaluate(job) is not None


def _is_steady(job: RuleContext, row: StragglerRow) -> bool:
    return row.share_of_steps >= STEADY or len(row.steps) >= STEADY * len(job.info.steps)


def _with_more_work(job: RuleContext, worst: StragglerRow, work: float) -> Finding | None:
    """A rank that has more to compute than its peers: what it is relieved of, they have to do."""
    settings = {"ranks.work": "even"}
    prediction = job.predict(settings) if job.predict is not None else None
    if prediction is None or prediction.mid >= job.step_time_us:
        settings = {}
        prediction = replace(worst, lost_us=worst.lost_us * (1 - 1 / len(job.ranks))).step_without(job.step_time_us)
    return job.finding(
        RULE,
        f"{subject(worst)} has {work:.2f} times the work of its peers: waiting for it{_cost(job, worst)}",
        job.step_time_us - prediction.mid,
        evidence=_evidence(job, worst),
        action=Action(
            setting=_setting(job, worst), old=None, new=None, how=_MORE_WORK.format(who=_setting(job, worst))
        ),
        confidence=Confidence(worst.confidence),
        predicted=prediction,
        whatif=settings,
    )


def _doubts(job: RuleContext, worst: StragglerRow) -> tuple[str, ...]:
    """Why nothing may be gained, in words; empty where that is not so."""
    if not worst.replayed:
        return (_UNPAIRED,)
    if _may_wait_as_long(job, worst):
        return (_AS_LONG,)
    if may_be_the_machine(job, worst) and not _may_be_accident(job, worst):
        return (doubt(job),)
    if is_at_the_start(job, worst):
        return (AT_THE_START,)
    return (_FEW_BATCHES,) if _waited_in_few_steps(job, worst) else ()


def _waited_in_few_steps(job: RuleContext, worst: StragglerRow) -> bool:
    """Did a rank wait for its loader's workers in few steps, where it is not known how fast the others' are?"""
    few = max(1.0, _FEW_STEPS * len(job.info.steps))
    if worst.cause != "dataloader" or worst.scope != "rank" or not 0 < len(worst.steps) <= few:
        return False
    rows = {row.rank: row for row in job.summary.dataloader}
    if worst.rank not in rows or rows[worst.rank].num_workers == 0:
        return False
    return len(rows) > 1 and all(row.batch_us is None for rank, row in rows.items() if rank != worst.rank)


def _may_wait_as_long(job: RuleContext, worst: StragglerRow) -> bool:
    """Does a rank mainly pause in its loop, neither at work nor in the queue for a core, where its peers pause too?

    They may wait there for what is as slow, as a thread that reads ahead, which delivers while they wait for this rank.
    """
    name, _ = most_over_others(job, worst) if worst.cause == "host" else ("", 0.0)
    named = {row.rank: row.named_host_us.get(name, 0.0) for row in job.summary.time_breakdown}
    others = [us for rank, us in named.items() if rank not in worst.members]
    if name != BETWEEN or named[worst.rank] < worst.lost_us / 2:
        return False  # it pauses elsewhere
    if not others or median(others) < _ALSO * named[worst.rank]:
        return False
    cpu = job.runs[worst.rank].cpu if worst.rank in job.runs else None
    if cpu is None or not cpu.steps:
        return True
    (mine,) = (row for row in job.summary.time_breakdown if row.rank == worst.rank)
    elsewhere_us = mine.exposed_comm_wait_us + mine.exposed_comm_transfer_us + mine.idle_dataloader_us
    return cpu.blocked_ns / 1e3 - elsewhere_us >= named[worst.rank] / 2


def _whatif(job: RuleContext, worst: StragglerRow) -> dict[str, str]:
    """The same as settings, where the cost was replayed with these ranks at their peers' pace: of a stage that is slow
    as a whole these are the others. A host's ranks that are not in the recording have no setting.
    """
    if worst.scope == "host" and job.info.missing_ranks:
        return {}
    settings = {f"rank.{rank}": "peers" for rank in worst.ranks}
    step = job.predict(settings) if job.predict is not None and worst.scope != "job" else None
    if step is None:
        return {}
    saved_us = job.step_time_us - step.mid
    return settings if abs(saved_us - worst.lost_us) <= 0.2 * worst.lost_us else {}


def _who(job: RuleContext, row: StragglerRow) -> str:
    """The beginning of the title: who the straggler is, and by what; of one or two steps only that it is late there."""
    why, steps = _causes(job, row), job.steps
    one, several = "is a straggler", "are stragglers"
    if _may_be_accident(job, row):
        late = f"late in the {'only recorded step' if steps == 1 else f'{steps} recorded steps'}"
        one, several = f"is {late}", f"are {late}"
    if row.scope == "job":
        rank = imbalanced_work.mostly_for(job, row)
        how = "in turn" if rank is None else f"now and then, mostly rank {rank}"
        return f"{ranks_in_words(row.ranks).capitalize()} {several} {how} ({why}): waiting for them"
    if row.scope == "link":
        return f"{subject(row)} is slower than those of other groups: the same transfers take longer there, which"
    if row.scope == "ranks":
        return f"{subject(row)} {several} ({why}): waiting for them"
    return f"{subject(row)} {one} ({why}): waiting for it"


def _cost(job: RuleContext, row: StragglerRow) -> str:
    """The end of the title: what that costs, and in which part of the steps where it does not in all."""
    late, used = len(row.steps), len(job.summary.job.steps)
    share = f"{'' if row.replayed else 'up to '}{job.share(row.lost_us):.0%}"
    if 0 < late < used:
        return f" in {late} of {used} steps costs {share} of the time"
    if row.longest_steps:
        few = len(row.longest_steps)
        others_us = (used * row.lost_us - few * row.longest_us) / (used - few)
        how = f"{duration(row.longest_us)} in {_how_often(row.longest_steps, job.summary.job.steps)}"
        return f" costs {share} of the time ({how}, {duration(others_us)} in the others)"
    return f" costs {share} of {'the' if used == 1 else 'each'} step"


def _how_often(steps: Sequence[int], used: Sequence[int]) -> str:
    """``3 of 8 steps``; ``one of every 3 steps`` where three or more (two are always some steps apart) are all that
    such a rhythm has.
    """
    period = steps[1] - steps[0]
    in_rhythm = list(steps) == [step for step in used if (step - steps[0]) % period == 0]
    return f"one of every {period} steps" if in_rhythm and len(steps) > 2 else f"{len(steps)} of {len(used)} steps"


def _causes(job: RuleContext, row: StragglerRow) -> str:
    """Why: of each rank where they hide each other by several causes; else with what they do then, if that is known."""
    if len(set(row.causes)) < 2:
        name, operator = paused_in(job, row), slow_operator(job, row)
        more = f", mostly in {host_work(name)}" if name else _in_operator(operator)
        also = _also(job, row)
        return f"{CAUSE_PHRASES[row.cause]}{more}{f'; and {CAUSE_PHRASES[also]}' if also else ''}"
    return ", ".join(f"{ranks_in_words(ranks)}: {CAUSE_PHRASES[cause]}" for cause, ranks in _by_cause(row).items())


def _also(job: RuleContext, row: StragglerRow) -> str:
    """Another cause on the same rank, by what it computes, or its device idles for its host, longer than the others';
    empty where that is little beside what the rank costs, or the ranks' work differs.
    """
    rows = job.summary.time_breakdown
    mine, others = ([each for each in rows if (each.rank == row.rank) == own] for own in (True, False))
    if row.scope != "rank" or not mine or not others or "pipeline" in job.info.strategies:
        return ""
    over = {
        cause: getattr(mine[0], name) - median(getattr(each, name) for each in others)
        for cause, name in _SHOWN_AS.items()
        if (cause == "compute") != (row.cause == "compute")
    }
    most = max(over, key=over.__getitem__)
    return most if over[most] >= max(_ALSO_LATE * row.lost_us, SHARE * job.step_time_us) else ""


def _in_operator(operator: SlowOperator | None) -> str:
    if operator is None:
        return ""
    if operator.kind:
        return f", mostly in {operator.name}, while other kernels are as quick"
    less = ", which its peers call less often" if operator.others_calls else ", which its peers do not call"
    return f", mostly in {operator.name}{less if operator.is_own_work else ''}"


def _by_cause(row: StragglerRow) -> dict[str, list[int]]:
    """Cause -> the ranks with it, the costliest cause first."""
    added: dict[str, float] = {}
    for cause, adds in zip(row.causes, row.adds_us, strict=True):
        added[cause] = added.get(cause, 0.0) + adds
    ranks = grouped(zip(row.causes, row.ranks, strict=True))
    return {cause: ranks[cause] for cause in sorted(added, key=lambda cause: -added[cause])}


def _setting(job: RuleContext, row: StragglerRow) -> str:
    if row.scope in ("ranks", "stage", "job"):
        return ranks_in_words(row.ranks)
    if row.scope == "link":
        return f"link between {ranks_in_words(row.ranks)}"
    named = row.host and (len(job.info.hosts) != 1 or not row.host.startswith(NAMELESS))
    where = f" on {row.host}" if named else ""
    if row.scope == "rank":
        return f"rank {row.rank}{where}"
    return host_in_words(row.host) if row.host else "host"


def _remedy(job: RuleContext, worst: StragglerRow) -> str:
    if len(set(worst.causes)) > 1 and worst.scope not in ("job", "host", "stage"):
        lines = [by_cause(job, cause, ranks_in_words(ranks)) for cause, ranks in _by_cause(worst).items()]
        alone = job.share(max(worst.alone_us))
        who = ranks_in_words(worst.ranks)
        return "\n".join((f"Change all of {who}: the best of them alone saves {alone:.0%} of the step.", *lines))
    who = _setting(job, worst)
    usual = in_operator(job, worst, who) or by_straggler(job, worst, who)
    also = _also(job, worst)
    other = (by_cause(job, also, who),) if also else ()
    return "\n".join((*waits_for_cores(job, worst, who), usual, *other))


def _not_recorded(job: RuleContext, worst: StragglerRow) -> tuple[str, ...]:
    """What is taken of ranks that are missing: of those of its host, and of those that others may wait for, too."""
    missing = job.info.missing_ranks
    if not missing:
        return ()
    if worst.scope == "host":
        return (_OF_ITS_HOST.format(missing=ranks_in_words(missing)),)
    return (_OTHERS_AS_LATE.format(missing=ranks_in_words(missing), who=ranks_in_words(worst.ranks or (worst.rank,))),)


def _evidence(job: RuleContext, worst: StragglerRow) -> tuple[Evidence, ...]:
    mine = worst.members
    others = tuple(rank for rank in job.ranks if rank not in mine) or job.ranks
    work = work_over_peers(job, worst)
    return (
        Evidence(f"straggler cost, {'replayed' if worst.replayed else 'by its own time'}", worst.lost_us, "us", mine),
        *(
            Evidence("its part of that", adds, "us", (rank,))
            for rank, adds in zip(worst.ranks, worst.adds_us, strict=False)
        ),
        Evidence("share of steps in which it costs the most", worst.share_of_steps, "share", mine),
        Evidence("exposed wait of the others (mean)", _mean_wait(job, others), "us", others),
        Evidence("its own exposed wait (mean)", _mean_wait(job, mine), "us", mine),
        *_named_host(job, worst, mine),
        *_operator(job, worst, mine),
        *known("its model FLOPs over its peers'", work or None, "ratio", mine),
    )


def _named_host(job: RuleContext, worst: StragglerRow, mine: tuple[int, ...]) -> tuple[Evidence, ...]:
    """The named host work in which a rank that pauses spends the most time over the others, if any has a name."""
    if worst.cause != "host":
        return ()
    name, over = most_over_others(job, worst)
    return (Evidence(f"its host time in {name} over the others'", over, "us", mine),) if over else ()


def _operator(job: RuleContext, worst: StragglerRow, mine: tuple[int, ...]) -> tuple[Evidence, ...]:
    """The operators in which a rank computes longer than its peers, where these are few."""
    operator = slow_operator(job, worst)
    if operator is None:
        return ()
    if not operator.own_us:
        return (
            Evidence(f"its calls of {operator.name} per step", operator.calls, ranks=mine),
            Evidence(f"the others' calls of {operator.name} per step", operator.others_calls),
        )
    return (
        Evidence(f"its time in {operator.name}", operator.own_us, "us", mine),
        Evidence(f"the others' time in {operator.name}", operator.others_us, "us"),
    )


def _compute_over_peers(job: RuleContext, worst: StragglerRow) -> float:
    """Compute of a rank over the other ranks' median; 1 where it is not known."""
    return over_others({rank: sum(steps.compute_us) for rank, steps in job.per_step.items()}, worst.rank) or 1.0


def _mean_wait(job: RuleContext, ranks: tuple[int, ...]) -> float:
    waits = [row.exposed_comm_wait_us for row in job.summary.time_breakdown if row.rank in ranks]
    return sum(waits) / len(waits) if waits else 0.0
