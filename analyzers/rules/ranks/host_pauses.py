"""Pauses of hosts: fires when devices are idle while their hosts are in no operator and no call for long, or, in a job
on CPUs, when the training threads are.

Preprocessing in the loop, batches that are made without a data loader, saving, logging and garbage collection do that.
On one rank alone it is a straggler's; where it is on several, or on a pipeline stage that has no peers, nobody is
slower than those that do the same work. Collections that are recorded have a rule of their own, and so has a thread
that waits for a core: on CPUs, that looks like a pause, and is taken off, but for what the thread slept.
"""

from __future__ import annotations

from statistics import mean
from typing import Final

from perfscope.analyzers.losses import named_host, where_to_look
from perfscope.analyzers.rank.host_activity import COMPILING, LOADER_STARTING, SAVING
from perfscope.analyzers.rank.loop_phases import LOOP
from perfscope.analyzers.rules.context import SAME_SHARE, RuleContext
from perfscope.analyzers.rules.cpu_optimizer import on_cpu_us
from perfscope.analyzers.rules.host import checkpoint_saving, garbage_collection, recompilation
from perfscope.analyzers.rules.loading.loader_startup import find_stalls
from perfscope.analyzers.rules.ranks import straggling_rank
from perfscope.analyzers.rules.ranks.pauses import pause_together, pausing_steps
from perfscope.results.findings import Action, Confidence, Evidence, Finding, Prediction
from perfscope.results.rows import StragglerRow
from perfscope.text import ranks_in_words

RULE: Final = "host-pauses"
SHARE: Final = 0.05
"""Least share of the step, of idle time and of what the replay saves."""
PAUSING: Final = 0.02
"""Share of the step in pauses from which a rank is named: less is noise."""
EXPLAINED: Final = 0.5
"""Share of the saving from which another finding is about the same pauses: what is left without them is less."""
OF_TURNS: Final = 0.8
"""The same of ranks that pause in turn: each is brought to its peers' pace, and so keeps the pauses of a step in which
half of them do. Where all pause, much more may be saved, by the same advice."""
_SMALLER: Final = 0.5
"""Part of the pauses that waits for batches take at most where the pauses are what to look at."""
_ENOUGH: Final = 4
"""Steps from which what all of them have comes of the program."""
_CHANGE: Final = {"host.pauses": "0"}


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: devices hardly wait for pauses, or another finding is about them."""
    pauses = {rank: mean(each.pausing_us) for rank, each in job.per_step.items()}
    # Ranks may pause in turn: each seldom, and one of them in every step.
    longest_us = mean(map(max, zip(*(each.pausing_us for each in job.per_step.values()), strict=True))) if pauses else 0
    computing_us = on_cpu_us(job)
    if longest_us - computing_us < SHARE * job.step_time_us:
        return None
    if job.typical_us("idle_unknown") >= SHARE * job.step_time_us:
        return None  # where events are missing, a host that seems to pause may run operators
    step = job.replayed(_CHANGE, SHARE)
    if step is None:
        prediction, saved_us = None, _if_workers_are_faster(job, longest_us) - computing_us
    else:
        prediction, saved_us = step[0].plus(computing_us), step[1] - computing_us
    if _is_told(job, saved_us):
        return None
    # Where the replay saves less than the pauses take, it saves less of what they wait for a core, too.
    waited_us = _waited_us(job) * min(saved_us / longest_us, 1.0)
    if saved_us - waited_us < SHARE * job.step_time_us:
        return None
    lone = pausing_steps(job, job.ranks) == 1
    ranks = tuple(rank for rank, us in pauses.items() if us >= PAUSING * job.step_time_us) or tuple(
        rank for rank, each in job.per_step.items() if max(each.pausing_us) >= SHARE * job.step_time_us
    )
    name, look = named_host(job.summary), where_to_look("idle_host", job.summary)
    together = pause_together(job, ranks)
    fewer = "or do them in fewer steps" if together else "do them in fewer steps, or at the same step on all ranks"
    if name == LOADER_STARTING and find_stalls(job) is not None:
        return None
    if name == COMPILING and recompilation.evaluate(job) is not None:
        return None
    if name == SAVING and checkpoint_saving.is_most_of(job, saved_us):
        return None
    return job.finding(
        RULE,
        _title(job, ranks, name, saved_us, _less(job, prediction), together=together),
        saved_us,
        evidence=(
            Evidence(
                "longest idle time of a device while its host pauses" if job.on_devices else "longest pauses of a rank",
                longest_us,
                "us",
                ranks,
            ),
            Evidence("step time", job.step_time_us, "us", job.ranks),
        ),
        action=Action(
            setting="host work between operators",
            old=None,
            new=None,
            how=f"{look[0].upper()}{look[1:]}. {_own_loader(job, name)}Preprocessing, saving and logging in the loop "
            "pause the host, as does Python's garbage collector: move them into DataLoader workers or a thread, "
            f"{fewer}.",
        ),
        confidence=Confidence.LOW if lone or prediction is None else job.confidence(),
        # Without steps, or by one of them, nothing says that a pause comes again: what it costs is a bound.
        predicted=prediction if job.steps and not lone else None,
        # What an optimizer computes on the CPU looks like a pause, too, and stays.
        whatif=_CHANGE if prediction is not None and job.steps and not lone and not computing_us else None,
    )


def _if_workers_are_faster(job: RuleContext, longest_us: float) -> float:
    """What pauses cost at most where it is not known how fast loader workers are, and these may set the job's pace
    whatever the hosts do: as much as a prediction leaves open. 0 where nothing is left open, or waits for batches are
    no smaller.
    """
    prediction = job.predict(_CHANGE) if job.predict is not None else None
    loading_us = job.typical_us("idle_dataloader")
    if prediction is None or not 0 < loading_us <= _SMALLER * longest_us:
        return 0.0
    return max(min(job.step_time_us - prediction.low, longest_us), 0.0)


def _less(job: RuleContext, prediction: Prediction | None) -> float | None:
    """By which share the step is shorter without its pauses: that without the profiler, where it is known. None where
    it is not predicted.
    """
    if prediction is None:
        return None
    return 1 - job.without_profiler(prediction, _CHANGE)[0].mid / job.info.step_us


def _title(
    job: RuleContext, ranks: tuple[int, ...], name: str, saved_us: float, shorter: float | None, *, together: bool
) -> str:
    """What pauses, in few steps or in most, and what the step takes less without, where that is known: less than
    devices are idle where these are behind their hosts, and more where ranks pause in turn, for each of which all wait,
    or together, now one for longest and now another.
    """
    between = "host time between operators" if job.summary.operators else "host time without a call to the devices"
    where = f", mostly in {name}" if name else ""
    saved = job.share(saved_us)
    idle = job.share(mean(row.idle_host_us for row in job.summary.time_breakdown if row.rank in ranks))
    more = shorter is not None and saved - idle >= SAME_SHARE and len(ranks) > 1
    if more and not together:
        who = ranks_in_words(ranks).capitalize()
        return f"{who} pause in turn ({between}{where}); without these pauses the step takes {shorter:.0%} less"
    who = "" if len(ranks) == len(job.ranks) else f" of {ranks_in_words(ranks)}"
    differs = shorter is not None and (more or idle - saved >= SAME_SHARE)
    less = f"; without its pauses the step takes {shorter:.0%} less" if differs else ""
    few, steps = pausing_steps(job, ranks), len(job.info.steps)
    of, often = ("the step", "") if few is None else ("the time", f", in {few} of {steps} steps")
    return f"{idle if less else saved:.0%} of {of} is {between}{who}{where}{often}{less}"


def _own_loader(job: RuleContext, name: str) -> str:
    """What the loop between two phases probably does, where no data loader hands batches over."""
    if not name.startswith(LOOP) or job.summary.dataloader:
        return ""
    return "No data loader was recorded: if batches are read or made there, do it in a DataLoader with workers. "


def _waited_us(job: RuleContext) -> float:
    """What threads wait for a core in their pauses, per step of a job on CPUs: at most what they wait in each step, or
    in all where only that is recorded, and what is left of their pauses without what they sleep, and what they run in
    them. 0 where it is not recorded.

    Example: of pauses of 60 ms a thread sleeps 58, and it waits 80 ms for a core in the same step: 2 in its pauses, and
    the others where it computes.
    """
    if job.on_devices:
        return 0.0
    most_us = {
        rank: max(mean(each.pausing_us) - max(job.slept_us.get(rank, 0.0), _run_us(job, rank)), 0.0)
        for rank, each in job.per_step.items()
    }
    if job.core_us:
        in_pauses = [
            _at_most(list(map(min, job.core_us[rank], each.pausing_us)), most_us[rank])
            for rank, each in job.per_step.items()
        ]
        return float(mean(map(max, zip(*in_pauses, strict=True))))
    waited_us = (
        min(run.cpu.waited_ns / run.cpu.wall_ns * job.step_time_us, most_us.get(rank, job.step_time_us))
        for rank, run in job.runs.items()
        if run.cpu is not None and run.cpu.waited_ns is not None and run.cpu.wall_ns
    )
    return max(waited_us, default=0.0)


def _run_us(job: RuleContext, rank: int) -> float:
    """What a rank's thread runs in its pauses in every step, at least; 0 where steps are few, or it is not recorded.

    A thread that has to wait for a core stops wherever it is: here long, there not. What pauses take in each step comes
    of the program, and the thread runs in them for as much of the time as it does in the step.

    Example: pauses take 25, 56, 27 and 34 ms, and of the time in which it wants a core the thread has one for 60 %.
    Then it runs for 15 ms in each of them.
    """
    pausing_us, run = job.per_step[rank].pausing_us, job.runs.get(rank)
    cpu = run.cpu if run is not None else None
    if len(pausing_us) < _ENOUGH or cpu is None or cpu.waited_ns is None or not cpu.thread_ns:
        return 0.0
    return min(pausing_us) * cpu.thread_ns / (cpu.thread_ns + cpu.waited_ns)


def _at_most(times: list[float], most: float) -> list[float]:
    """These in proportion, where their mean is more than ``most``."""
    found = mean(times)
    return times if found <= most else [time * most / found for time in times]


def _is_told(job: RuleContext, saved_us: float) -> bool:
    """Is a straggler that has its finding, or recorded garbage collection, most of it?"""
    worst = straggling_rank.told(job)
    if worst is not None and _pauses(worst):
        most = OF_TURNS if worst.pattern == "rotating" else EXPLAINED
        if worst.lost_us >= most * saved_us:
            return True
    return garbage_collection.paused_us(job) >= EXPLAINED * saved_us


def _pauses(row: StragglerRow) -> bool:
    return row.cause == "host" or "host" in row.causes
