"""DataLoader ``num_workers``: fires when the device waits for batches; recommends a number, not "more".

The smallest number of workers w with batch time / w <= step without the stall. Workers that wait (for disks, for the
network) may be more than cores; where the recording does not show that they wait, they are at most the cores per rank.
Where training and loading together already need all cores, the finding says so and advises no workers.
Where batches take workers as long as the step, and threads wait for cores instead of for them, it is a bound.
Sources: PyTorch performance tuning guide; Lightning issue 18591 on why "as many as possible" is wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import ceil
from statistics import fmean, median
from typing import Final

from perfscope.analyzers.job.cores import CpuDemand, cores_of, demands, needed_ns
from perfscope.analyzers.rules.context import RuleContext, known
from perfscope.analyzers.rules.loading import hidden_pace
from perfscope.analyzers.rules.loading.loader_startup import Stalls, find_stalls, rare_waits
from perfscope.analyzers.rules.typed import data_loader, training_arguments
from perfscope.frozen import dataclass
from perfscope.results.findings import Action, Confidence, Evidence, Finding, code
from perfscope.results.rows import DataLoaderRow, StragglerRow
from perfscope.text import duration, ranks_in_words

RULE: Final = "dataloader-workers"
SHARE: Final = 0.05
"""Least share of the step that data loading blocks."""
BUSY: Final = 0.95
"""Part of the step that workers take for its batches from which they set its pace."""
_IDLE: Final = 0.5
"""Part of the step that workers take for its batches, up to which they are idle for most of it."""
LEAST_WON: Final = 1 / 3
"""Share of the stall that workers must end; where they end less, cores are the limit."""
AS_SLOW: Final = 1.25
"""Up to this ratio of their batches' times loaders are equally slow."""
_MUCH_LONGER: Final = 2.0
"""From this ratio of the waits for batches on, one loader is slower than the others."""
ALIKE: Final = 0.02
"""Step times closer than this are equal within noise."""
_MANY: Final = 1_000
"""Workers for which no rank waits."""
OTHERS: Final = 1.25
"""Wall time over CPU time of the training from which other processes use its cores: what these will do is not known."""


QUICK_US: Final = 500.0
"""A batch that is made in less is taken from a worker about as slowly."""

_LOAD_AHEAD: Final = Action(
    setting="DataLoader(prefetch_factor=…)",
    old=None,
    new=None,
    how="A batch that now and then takes long to load is waited for. Load more of them ahead (prefetch_factor, more "
    "workers), or make those batches cheaper. Record with perfscope run, which also records the number of workers and "
    "what a batch takes; then PerfScope computes how many are needed.",
)


@dataclass(frozen=True)
class _Need:
    """Workers that end the stall, and the step they allow (µs)."""

    workers: int
    cores: int | None
    """Workers per rank that do not share cores; None when not known."""
    step_us: float
    demand: CpuDemand | None = None
    """CPU time of training and loading; None where it was not recorded."""
    crowded: bool = False
    """Training and loading need all cores: no number of workers helps."""


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None where loading hardly blocks, or only on a straggler, or only in a few steps."""
    finding = _blocking(job) or _hidden(job)
    return finding and _of_a_lone_step(finding, job)


def _of_a_lone_step(finding: Finding, job: RuleContext) -> Finding:
    """A bound that holds, too, where the wait for the batch of the only recorded step was not hidden behind the step
    before, as is assumed: then the step took that much longer, and all of it may be saved.

    Example: a step of 20 ms waits 5 of them for its batch, after 13 that count as hidden. It is at most 20 / 15 times
    as fast without the wait, or 33 / 15.
    """
    hidden = sum(note.values["share"] for note in job.summary.notes if note.kind == "lone_step_waits")
    if finding.predicted_step_us is not None or finding.ceiling is None:
        return finding
    return replace(finding, ceiling=(1 + finding.ceiling) * (1 + hidden) - 1)


def _hidden(job: RuleContext) -> Finding | None:
    """Where waits for cores hide the waits for batches: a bound, since they may as well be what takes so long."""
    pace = hidden_pace.find(job, BUSY) if find_stalls(job) is None and not job.outpaced else None
    if pace is None:
        return None
    worst = max(pace.rows, key=lambda row: row.workers_us or 0.0)
    # In the terms of the recorded step, which the profiler may have made longer.
    load_us = (worst.workers_us or 0.0) * (worst.num_workers or 1) * job.step_time_us / job.info.step_us
    least_us = (1 - pace.waited) * job.step_time_us
    need = _Need(max(ceil(load_us / least_us), 1), None, least_us)
    recoverable = job.step_time_us - max(least_us, load_us / need.workers)
    if need.workers <= (worst.num_workers or 0) or recoverable < SHARE * job.step_time_us:
        return None
    ranks = tuple(row.rank for row in pace.rows)
    return job.finding(
        RULE,
        f"Loader workers take as long for a batch as a step takes on {_ranks(list(pace.rows), job)}; threads wait for "
        "cores meanwhile, so how long steps wait for batches is not known",
        recoverable,
        evidence=(
            *known("time to load one batch on one worker", worst.batch_us, "us", (worst.rank,)),
            Evidence("unprofiled step time" if job.info.unprofiled_step_us else "step time", job.info.step_us, "us"),
            Evidence("time that training threads waited for a core, at most", pace.waited, "share", ranks),
        ),
        action=replace(_action(job.framework, worst, need), costs=_costs(job, worst, need)),
        confidence=job.confidence(),
    )


def _blocking(job: RuleContext) -> Finding | None:
    """The same where recorded or unprofiled steps wait for their batches."""
    stalls, behind = find_stalls(job), None
    if stalls is not None and stalls.is_all:
        return None
    usual = _usual(job, stalls)
    waiting = usual.waiting
    if job.outpaced or (not waiting and stalls is None):
        behind = _behind_workers(job)
        waiting = [] if behind is None else behind.waiting
    if not waiting or _is_one_straggler(job, waiting):
        return None
    worst = max(waiting, key=lambda row: usual.fetching_us[row.rank])
    stall_us = median(usual.fetching_us[row.rank] for row in waiting) if behind is None else behind.stall_us
    if _waits_for_a_core(job, worst, stall_us):
        return None
    without_us = job.step_time_us - stall_us if behind is None else behind.without_us
    need = _enough(job, _need(job, worst, without_us, usual.starting_us))
    # Where the cores are the limit, the stall ends when loading costs nothing.
    recoverable = job.step_time_us - (need.step_us if need and not need.crowded else without_us)
    if need is None and behind is None:
        without_waits_us = _replayed_us(job, _MANY) or job.step_time_us
        recoverable = max(recoverable, _longest_us(job, usual), job.step_time_us - without_waits_us)
    if recoverable <= 0:
        return None
    new = need and not need.crowded and not _is_quick(worst) and need.workers != worst.num_workers
    limited = ", and the cores are the limit" if need and need.crowded else ""
    few = _few_steps(job, waiting) if need is None and behind is None else 0
    where = f"the time, in {few} of {job.steps} steps," if few else _what(job, behind)
    return job.finding(
        RULE,
        f"Data loading blocks {job.share(stall_us):.0%} of {where} on {_ranks(waiting, job)}{limited}",
        recoverable,
        evidence=_evidence(job, worst, _stall(job, usual, behind, stall_us), tuple(row.rank for row in waiting), need),
        action=_LOAD_AHEAD
        if few
        else _for_all(replace(_action(job.framework, worst, need), costs=_costs(job, worst, need)), job),
        confidence=_confidence(job, worst, need),
        whatif={"dataloader.num_workers": str(need.workers)} if need and new else {},
        severity_us=stall_us,
    )


def _is_quick(row: DataLoaderRow) -> bool:
    """Does the training thread make batches as quickly as it could take them from a worker, or nearly?"""
    return row.num_workers == 0 and row.batch_us is not None and row.batch_us < QUICK_US


def _waits_for_a_core(job: RuleContext, row: DataLoaderRow, stall_us: float) -> bool:
    """May a rank of a job on CPUs wait for a core while its workers, which are idle most of the time, hand batches
    over? More of them would want cores, too.
    """
    cpu = job.runs[row.rank].cpu if row.rank in job.runs else None
    if job.on_devices or row.workers_us is None or cpu is None or not cpu.waited_ns or not cpu.wall_ns:
        return False
    idle = row.workers_us <= _IDLE * _timed_us(job)
    return idle and cpu.waited_ns / cpu.wall_ns >= job.share(stall_us)


def _few_steps(job: RuleContext, waiting: Collection[DataLoaderRow]) -> int:
    """In how many steps these ranks wait, where those are few and they hardly wait in the others; 0 where they do."""
    each = [job.per_step[row.rank].loading_us for row in waiting if row.rank in job.per_step]
    return len(rare_waits([median(step) for step in zip(*each, strict=True)], job.step_time_us))


def _longest_us(job: RuleContext, usual: _Usual) -> float:
    """The longest time in a loader of any rank, mean of the steps that start no workers: all others wait for that."""
    loads = [job.per_step[row.rank].loading_us for row in usual.waiting if row.rank in job.per_step]
    return fmean(max(of_rank[index] for of_rank in loads) for index in usual.steps) if loads else 0.0


@dataclass(frozen=True)
class _Usual:
    """Loading in the steps that start no workers: more of them do not shorten what a start takes."""

    fetching_us: Mapping[int, float]
    """Rank -> as ``DataLoaderRow.fetching_us``, mean."""
    starting_us: float
    """What the steps that start workers make the mean step longer."""
    waiting: list[DataLoaderRow]
    """Ranks that wait, of their loaders' rows."""
    steps: list[int]
    """Indices of these steps."""


def _usual(job: RuleContext, stalls: Stalls | None) -> _Usual:
    rows = job.summary.dataloader
    fetching_us, starting_us = {row.rank: row.fetching_us for row in rows}, 0.0
    usual = [index for index, step in enumerate(job.info.steps) if stalls is not None and step not in stalls.steps]
    if usual:
        fetching_us = {row.rank: fmean(job.per_step[row.rank].loading_us[index] for index in usual) for row in rows}
        starting_us = max(job.step_time_us - fmean(job.info.step_time_us_per_step[index] for index in usual), 0.0)
    # One rank that waits much longer than the others is not all of them, though these wait a little, too.
    least_us = max(SHARE * job.step_time_us, max(fetching_us.values(), default=0.0) / _MUCH_LONGER)
    waiting = [row for row in rows if fetching_us[row.rank] >= least_us]
    return _Usual(fetching_us, starting_us, waiting, usual or list(range(len(job.info.steps))))


def _waiting(job: RuleContext) -> list[DataLoaderRow]:
    return [row for row in job.summary.dataloader if row.fetching_us >= SHARE * job.step_time_us]


@dataclass(frozen=True)
class _Behind:
    """Loaders whose workers take nearly the step for its batches, as they timed, or more, and for which hosts wait, in
    steps without ready batches. Devices of such hosts hardly wait for batches, but for what is launched late.
    """

    waiting: list[DataLoaderRow]
    stall_us: float
    """What twice as many workers save, replayed; where they take more than the recorded steps, which then had some
    batches ready, of the steps that have none."""
    without_us: float
    """The step with twice as many."""
    had_ready: bool
    """Did the recorded steps have batches ready?"""


def _behind_workers(job: RuleContext) -> _Behind | None:
    """None where they keep up, or more of them save little."""
    rows = [
        row
        for row in job.summary.dataloader
        if (job.outpaced or row.wait_us >= SHARE * job.step_time_us)
        and row.workers_us is not None
        and row.workers_us >= BUSY * _timed_us(job)
    ]
    if not rows or (2 * len(rows) <= len(job.ranks) and not job.outpaced) or job.predict is None:
        return None
    step = job.predict({"dataloader.num_workers": str(2 * max(row.num_workers or 0 for row in rows))})
    if step is None:
        return None
    # The slowest holds the others up.
    pace_us = 0.0 if job.outpaced else max(row.workers_us or 0.0 for row in rows)
    stall_us = max(job.step_time_us, pace_us) - step.mid
    if stall_us < SHARE * job.step_time_us:
        return None
    return _Behind(rows, stall_us, min(step.mid, job.step_time_us), pace_us > job.step_time_us)


def _timed_us(job: RuleContext) -> float:
    """The step that waits for its batches: the recorded one, unless that had batches ready."""
    return job.info.step_us if job.outpaced else job.step_time_us


def _is_one_straggler(job: RuleContext, waiting: list[DataLoaderRow]) -> bool:
    """Do only stragglers wait for data? Their own finding is more exact."""
    rows = [row for row in job.summary.stragglers if row.cause == "dataloader" and not explains(job, row)]
    slow = {rank for row in rows for rank in (row.members if row.scope == "host" else (row.rank,))}
    return 2 * len(waiting) <= len(job.ranks) and {row.rank for row in waiting} <= slow


def explains(job: RuleContext, row: StragglerRow) -> bool:
    """Is this straggler only the one whose batch came last, of loaders that may all be too slow? A batch takes as long
    on its workers as on those of the others; where that is not known, it waited in one step only, and its host not
    much longer than theirs. Or several wait, each as long as the others: of loaders that are all as slow some wait, and
    the others, whose batches were ready, are no quicker. More workers help in either case, on these ranks too.
    """
    mine = row.members
    if row.cause != "dataloader" or row.scope == "job" or not any(each.rank in mine for each in _waiting(job)):
        return False
    took = {loader.rank: loader.batch_us for loader in job.summary.dataloader}
    others = [us for rank, us in took.items() if rank not in mine and us is not None]
    own = [us for rank in mine if (us := took.get(rank)) is not None]
    if own and others:
        return max(own) <= AS_SLOW * median(others)
    if len(mine) > 1 and row.scope == "ranks":
        return set(row.causes) == {row.cause}
    waits = {loader.rank: loader.wait_us for loader in job.summary.dataloader}
    theirs = [us for rank, us in waits.items() if rank not in mine]
    mine_us = max(waits.get(rank, 0.0) for rank in mine)
    return len(row.steps) == 1 and bool(theirs) and mine_us <= _MUCH_LONGER * median(theirs)


def _need(job: RuleContext, row: DataLoaderRow, without_us: float, starting_us: float) -> _Need | None:
    """None where the time to load a batch is not known, or nothing else fills the step. Workers have to keep up with
    steps that start none: the others take ``starting_us`` of the mean, and ``without_us`` holds that.
    """
    without_us -= starting_us
    if row.batch_us is None or without_us <= 0:
        return None
    load_us = row.batch_us * row.batches_per_step * job.step_time_us / _timed_us(job)
    known = cores_of(job.runs, row.rank) if row.rank in job.runs else None
    cores = max(int(known), 1) if known else None
    batches = {other.rank: other.batches_per_step for other in job.summary.dataloader}
    needs = demands(job.runs, batches)
    demand = needs.get(row.rank)
    if demand is None:
        workers = max(ceil(load_us / without_us), 1)
        allowed = min(workers, cores) if cores else workers
        return _Need(allowed, cores, max(without_us, load_us / allowed) + starting_us)
    # No step is shorter than the CPU time that it needs over the cores, which others may keep busy as well. What the
    # profiler needs is in it, so it does not bound steps without.
    needed_us = 0.0 if job.outpaced else needed_ns(needs, row.rank, batches) * demand.slowdown / 1e3
    least_us = max(without_us, min(needed_us, job.step_time_us))
    workers = max(ceil(load_us / least_us), 1)
    step_us = _expected_us(job, workers, max(least_us, load_us / workers) + starting_us)
    won_us = job.step_time_us - step_us
    crowded = won_us < max(SHARE * job.step_time_us, LEAST_WON * (job.step_time_us - starting_us - without_us))
    return _Need(workers, cores, step_us, demand, crowded and workers > (row.num_workers or 0))


def _enough(job: RuleContext, need: _Need | None) -> _Need | None:
    """With the smallest number of workers after which more of them bring nothing, replayed. Ranks wait for one
    another's batches as well, so that a step can be shorter than the one that misses only its own wait.
    """
    if need is None or need.crowded:
        return need
    most = 2 * need.workers if need.demand is not None or need.cores is None else max(need.cores, need.workers)
    now_us, least_us = _replayed_us(job, need.workers), _replayed_us(job, most)
    if now_us is None or least_us is None or now_us <= (1 + ALIKE) * least_us:
        return need
    for workers in range(need.workers + 1, most + 1):
        step_us = _replayed_us(job, workers)
        if step_us is not None and step_us <= (1 + ALIKE) * least_us:
            return replace(need, workers=workers, step_us=min(need.step_us, step_us))
    return need


def _replayed_us(job: RuleContext, workers: int) -> float | None:
    """The step with so many workers; None where it cannot be replayed."""
    step = job.predict({"dataloader.num_workers": str(workers)}) if job.predict is not None else None
    return None if step is None else step.mid


def _expected_us(job: RuleContext, workers: int, least_us: float) -> float:
    """The step with so many workers, replayed where possible: they take cores from the training."""
    replayed_us = _replayed_us(job, workers)
    return least_us if replayed_us is None else max(least_us, replayed_us)


def _evidence(
    job: RuleContext, row: DataLoaderRow, stall: tuple[str, float], ranks: tuple[int, ...], need: _Need | None
) -> tuple[Evidence, ...]:
    demand, who = need.demand if need else None, (row.rank,)
    return (
        Evidence(*stall, "us", ranks),
        Evidence("unprofiled step time" if job.outpaced else "step time", _timed_us(job), "us", job.ranks),
        *known("time to load one batch on one worker", row.batch_us, "us", who),
        *known("CPU time to load one batch", demand.batch_ns / 1e3 if demand else None, "us", who),
        *known("CPU time of the rest of a step", demand.training_ns / 1e3 if demand else None, "us", who),
        *known("cores per rank on the host", need.cores if need else None, ranks=who),
    )


def _stall(job: RuleContext, usual: _Usual, behind: _Behind | None, stall_us: float) -> tuple[str, float]:
    """(what the stall is of, how long it is)."""
    if job.outpaced:
        return "data loading that blocks an unprofiled step, replayed", stall_us * _timed_us(job) / job.step_time_us
    if behind is not None and behind.had_ready:
        return "data loading that blocks a step with no batches ready, replayed", stall_us
    where = "a step in which no workers start" if usual.starting_us else "the step"
    return f"data loading that blocks {where} (median)", stall_us


def _what(job: RuleContext, behind: _Behind | None) -> str:
    if job.outpaced:
        return "unprofiled steps (the recorded ones had more batches ready)"
    return "steps with no batches ready (the recorded ones had some)" if behind and behind.had_ready else "the step"


def _typed(used: str, workers: int) -> str:
    """How the framework in use takes the number."""
    if used == "transformers":
        return training_arguments(dataloader_num_workers=workers, dataloader_persistent_workers=True)
    if used == "megatron":
        return code("shell", f"--num-workers {workers}")
    return data_loader(num_workers=workers, persistent_workers=True)


def _action(used: str, row: DataLoaderRow, need: _Need | None) -> Action:
    old = None if row.num_workers is None else str(row.num_workers)
    if need is None:
        new = None
        how = (
            "The recording does not show the time to load a batch. Record with perfscope run, which also records the "
            "number of workers; then PerfScope computes how many are needed."
        )
    elif _is_quick(row):
        new = old
        how = (
            f"A batch is made in {duration(row.batch_us or 0.0)}. Taking one from a worker needs 0.1 to 1 ms, so "
            "workers bring little, or slow the loop down. Make batches cheaper: keep samples as tensors and index all "
            "of a batch at once, in a Dataset with __getitems__ or without a DataLoader."
        )
    elif need.crowded or (row.num_workers is not None and need.workers <= row.num_workers):
        new = old
        how = (
            f"{_limit(need)}, not the number of workers. Make a batch cheaper to load (decode or tokenize ahead of "
            "time, faster storage), or use more cores per rank."
        )
    else:
        new = str(need.workers)
        how = _typed(used, need.workers)
        if row.num_workers is None:
            how += (
                f"\nThe recording does not hold how many workers there are; their batches come as those of fewer. If "
                f"there are {new} or more, use twice as many."
            )
        at_cores = need.demand is None and need.cores == need.workers and need.step_us > 0
        if at_cores and (row.batch_us or 0) / need.workers > need.step_us * 0.999:
            how += (
                f"\n{new} workers are all that the cores allow ({need.cores} per rank). Loading still limits the step: "
                "make a batch cheaper too."
            )
    return Action(setting="DataLoader(num_workers=…)", old=old, new=new, how=how)


def _for_all(action: Action, job: RuleContext) -> Action:
    """For the ranks whose batches were ready as well: they may have been while these waited for the others."""
    ready = [row.rank for row in job.summary.dataloader if row.fetching_us < SHARE * job.step_time_us]
    if not ready or len(ready) == len(job.ranks) or job.outpaced:
        return action
    meanwhile = (
        f"{ranks_in_words(ready).capitalize()} had batches ready, which may have been loaded while all waited for the "
        "other ranks: their loaders may be as slow, so change those too."
    )
    return replace(action, how=f"{action.how}\n{meanwhile}")


def _costs(job: RuleContext, row: DataLoaderRow, need: _Need | None) -> str | None:
    """Of a stream every worker delivers all, unless the script divides it: that changes what is trained on."""
    run = job.runs.get(row.rank)
    loader = run.dataloaders[0] if run is not None and run.dataloaders else None
    if loader is None or not loader.iterable or need is None or need.workers <= max(row.num_workers or 0, 1):
        return None
    return (
        "The dataset is iterable: each worker delivers all of it, so samples come several times, unless its __iter__ "
        "divides them by torch.utils.data.get_worker_info()."
    )


def _limit(need: _Need) -> str:
    """Why more workers do not help: the cores, or where those are not known the loading itself."""
    if need.cores is None:
        return "The time to load a batch is the limit"
    return (
        f"The {need.cores} cores that each rank has are the limit"
        if need.cores > 1
        else "The one core that each rank has is the limit"
    )


def _confidence(job: RuleContext, row: DataLoaderRow, need: _Need | None) -> Confidence:
    if job.info.few_steps:
        return Confidence.LOW
    if need and need.demand and need.demand.slowdown > OTHERS:
        return Confidence.MEDIUM
    return Confidence.HIGH if row.num_workers == 0 and not job.info.missing_ranks else Confidence.MEDIUM


def _ranks(waiting: list[DataLoaderRow], job: RuleContext) -> str:
    if len(waiting) == len(job.ranks) > 1:
        return "every rank"
    return ranks_in_words(row.rank for row in waiting)
