"""Which rank delayed which steps of a whole run, through which stage, and what that cost: from step histories alone.

A rank is a straggler where its own time is above its peers' steadily, or in significantly more steps than theirs. Steps
that a different rank delays each time are one straggler that rotates. What varies on all ranks alike is nobody's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from perfscope.analyzers.history.excess import Excess, cost_of, measure_excess
from perfscope.analyzers.history.long_steps import of_one_kind, period_of
from perfscope.analyzers.history.own_times import COLUMNS, JobOwnTimes, OwnTimes, common_steps
from perfscope.frozen import dataclass
from perfscope.grouping import grouped
from perfscope.recording.history import OCCASIONAL
from perfscope.results.history import CORE, SEVERAL, HistoryStraggler
from perfscope.results.rows import UNLIKE_STAGES
from perfscope.trace.trace import Bool, Float32, Float64, Int64

FEWEST_STEPS: Final = 20
"""Steps that all ranks must have in common to be compared."""

NOTICEABLE: Final = 0.025
"""Share of the step from which a rank's excess is more than noise, in a step and steadily."""

LEAST_COST: Final = 0.005
"""Share of the run from which what a rank costs now and then is reported, where the ranks vary little."""

SPARE: Final = 0.02
"""Share of the step that threads wait for cores where there are enough of them."""

_TIERS: Final = (40.0, 20.0, 10.0, 5.0, 2.5)
"""Standard deviations of the noise from which steps are counted, one after the other."""
_ROTATING_TIERS: Final = ((5.0, 0.25), (2.5, 0.5))
"""The same from which steps count that ranks delay in turn, and the share of the steps that some rank delays so, at
least: the second where the first shows none.
"""
_BEYOND_NOISE: Final = 10.0
"""Times as many steps above a threshold as noise has there, at least, where ranks are late in turn."""
_FEWEST: Final = 5
_CHANCE: Final = 1e-4
"""Probability, over all ranks, that slow steps as many as those of a straggler come by chance."""
_SURE: Final = 4.0
"""Standard deviations by which a median is no chance."""
_STEADY: Final = 0.8
_MOSTLY: Final = 2 / 3
"""Share of its steps, at least, in which a rank is above its peers that is so steadily."""
_USUAL: Final = 0.25
"""Quantile of a rank's steps that stands for those without a cause."""
_WINDOWS: Final = 12
_LARGEST_PART: Final = 2 / 3
"""Of what ranks are late by in turn, at most, one rank's where ranks are named otherwise."""
_MAIN: Final = 0.5
"""Share of a straggler's excess, at least, that lies in the stage that is named."""


@dataclass(frozen=True, eq=False)
class StepDelays:
    """Of each compared step the rank with the largest own time above its peers', whoever it is and however little."""

    number: Int64
    rank: Int64
    excess_us: Float64
    stage: Int64
    """Column of ``COLUMNS``."""

    def by_step(self) -> dict[int, StepDelay]:
        """Number of the step -> its delay."""
        columns = (self.number, self.rank, self.excess_us, self.stage)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return {number: StepDelay(rank, excess, COLUMNS[stage]) for number, rank, excess, stage in rows}


class StepDelay(NamedTuple):
    """The rank that a step was delayed by."""

    rank: int
    excess_us: float
    stage: str


@dataclass(frozen=True, eq=False)
class RunStragglers:
    """What step histories tell about delays."""

    rows: tuple[HistoryStraggler, ...]
    """The costliest first."""
    delays: StepDelays


def find_stragglers(
    ranks: Mapping[int, OwnTimes], hosts: Mapping[int, str], peers: Sequence[Sequence[int]] | None = None
) -> RunStragglers | None:
    """Compare the ranks; None where fewer than two ranks or :data:`FEWEST_STEPS` common steps are there.

    ``peers``: groups of ranks that do the same work; all ranks where None.
    """
    job = common_steps(ranks)
    if job is None or len(job.ranks) < 2 or len(job.number) < FEWEST_STEPS:
        return None
    groups = peers or [job.ranks]
    excess = measure_excess(job, groups)
    step_us = float(np.median(job.step_us.max(axis=1)))
    rows = list(_named(job, excess, step_us, hosts))
    if float(np.median(job.core_us)) < SPARE * step_us:  # else all wait for cores, and who waits longer is chance
        whole = job.with_core()
        for row in _named(whole, measure_excess(whole, groups), step_us, hosts):
            if row.stage == CORE and row.pattern == "steady" and not {*row.ranks} & _ranks(rows):
                rows.append(row)
    rows = _with_rotating(job, excess, step_us, rows, hosts)
    return RunStragglers(tuple(sorted(rows, key=lambda row: -row.cost_us)), _delays(job, excess))


def _ranks(rows: Iterable[HistoryStraggler]) -> set[int]:
    return {rank for row in rows for rank in row.ranks}


def _steady(excess: Excess, step_us: float) -> Bool:
    """Ranks whose own time is above their peers' in nearly all parts of the run, and in most of their steps."""
    chance_us = _SURE * excess.noise_us / math.sqrt(len(excess.total))  # of the median of so many steps
    least = np.maximum(np.where(excess.alone, UNLIKE_STAGES, NOTICEABLE) * step_us, chance_us)
    windows = min(_WINDOWS, len(excess.total) // 5)
    medians = np.array([np.median(part, axis=0) for part in np.array_split(excess.total, windows)])
    steady: Bool = (excess.level >= least) & ((medians >= least / 2).mean(axis=0) >= _STEADY)
    # Of two ranks that are late in turn each is ahead half of the time, and the median is anywhere between.
    steady &= (excess.total > 0).mean(axis=0) >= _MOSTLY
    for place in np.flatnonzero(steady).tolist():
        steady[place] = not _comes_and_goes(excess, place)
    return steady


def _comes_and_goes(excess: Excess, place: int) -> bool:
    """Is the rank late in fewer steps, as its main stage shows where the noise of the others hides it?"""
    stages = excess.by_stage[:, place].mean(axis=0, dtype=np.float64)
    stage = int(np.argmax(stages))
    half = stages[stage] / 2
    if half < _SURE / 2 * excess.stage_noise_us[stage]:
        return False
    return bool((excess.by_stage[:, place, stage] >= half).mean() < _STEADY)


def _named(job: JobOwnTimes, excess: Excess, step_us: float, hosts: Mapping[int, str]) -> Iterator[HistoryStraggler]:
    """Ranks that are stragglers steadily or often, those of one host with one cause together."""
    steady = _steady(excess, step_us)
    slow, noise_us, plainest = _slow_steps(excess, step_us, steady, job.number)
    suspects = np.flatnonzero(slow.any(axis=0)).tolist()
    if not suspects:
        return
    costs = cost_of(excess, suspects, slow[:, suspects])
    # Without a rank that waits nobody was delayed, however unlike the ranks are.
    waited = float(job.wait_us.max(axis=1).sum(dtype=np.float64))
    run_us = float(job.step_us.max(axis=1).sum(dtype=np.float64))
    total = costs.sum(axis=0) * min(1.0, waited / max(float(costs.sum()), 1.0))
    rows = [
        _row(
            job, excess, place, slow[:, place], float(total[index]), run_us, hosts,
            steady=bool(steady[place]), plainest=plainest.get(place),
        )
        for index, place in enumerate(suspects)
    ]  # fmt: skip
    alike = grouped(((row.pattern, row.stage), row) for row in rows)
    for (pattern, _), together in alike.items():
        cost = sum(row.cost_share for row in together)
        least = NOTICEABLE / 2
        if pattern != "steady":
            places = [job.ranks.index(rank) for row in together for rank in row.ranks]
            lone = excess.alone[places].any()
            least = max(LEAST_COST, float(noise_us[places].min()) / step_us / 2, UNLIKE_STAGES / 5 * lone)
        if cost < least:
            continue
        # Ranks that are slow together share what they cost; one beside them that costs next to nothing is chance.
        named = [row for row in together if row.cost_share >= cost / len(together) / 4]
        for host, of_host in grouped((row.hosts[:1], row) for row in named).items():
            members = [rank for rank in job.ranks if host and hosts.get(rank) == host[0]]
            is_host = len(of_host) > 1 and len(of_host) == len(members) < len(job.ranks)
            yield from [_merged(of_host)] if is_host else of_host


class _View(NamedTuple):
    """What slow steps are looked for in: the excess of whole steps, or that of one stage."""

    excess: Float32
    """Steps x ranks; of ranks without peers what is above their own usual."""
    noise_us: float
    stage: int | None
    """Column of ``COLUMNS``; None of whole steps."""


def _views(excess: Excess) -> Iterator[_View]:
    """Whole steps, then each stage: beside its own noise a delay is plain that the whole step's would hide."""
    # Stages of a pipeline are unlike throughout. Most steps of a rank that is late in turn are its usual ones.
    usual = np.where(excess.alone, np.maximum(np.quantile(excess.total, _USUAL, axis=0), 0), 0)
    yield _View((excess.total - usual).astype(np.float32), excess.noise_us, None)
    for stage, noise_us in enumerate(excess.stage_noise_us.tolist()):
        values = excess.by_stage[:, :, stage]
        if values.any():
            usual = np.where(excess.alone, np.maximum(np.quantile(values, _USUAL, axis=0), 0), 0)
            yield _View((values - usual).astype(np.float32), noise_us, stage)


class _SlowSteps(NamedTuple):
    """The slow steps of ranks that are slow steadily, or in more steps than their peers."""

    slow: Bool
    """Steps x ranks."""
    noise_us: Float64
    """Of each rank the least noise that they were found beside."""
    plainest: dict[int, Bool]
    """Column of a rank -> those of its steps that one stage shows, the one in which they are the furthest above its
    noise: they were not chosen for what the other stages take in them.
    """


def _slow_steps(excess: Excess, step_us: float, steady: Bool, number: Int64) -> _SlowSteps:
    """Asks of the largest excesses first whether they are often enough: beside them small pauses do not count."""
    slow: Bool = np.zeros(excess.total.shape, dtype=bool)
    slow[:, steady] = excess.total[:, steady] > 0
    noise_us = np.full(slow.shape[1], excess.noise_us)
    # Of ranks without peers that are always above the others, the level is no cause, and nor is what varies about it.
    always = np.quantile(excess.total, _USUAL, axis=0) >= UNLIKE_STAGES * step_us
    open_ = np.flatnonzero(~steady & ~(excess.alone & always)).tolist()
    plainest: dict[int, tuple[float, Bool]] = {}
    for view in _views(excess):
        found = _often_slow(view, step_us, open_, number)
        for place in np.flatnonzero(found.any(axis=0)).tolist():
            if view.stage is None or _delays_steps(excess, view, found[:, place], place):
                slow[:, place] |= found[:, place]
                noise_us[place] = min(noise_us[place], view.noise_us)
                above = float(view.excess[found[:, place], place].mean(dtype=np.float64)) / max(view.noise_us, 1.0)
                if view.stage is not None and above > plainest.get(place, (0.0, slow))[0]:
                    plainest[place] = above, found[:, place]
    return _SlowSteps(slow, noise_us, {place: steps for place, (_, steps) in plainest.items()})


def _often_slow(view: _View, step_us: float, open_: Sequence[int], number: Int64) -> Bool:
    """Steps x ranks: where the excess of these ranks is above a threshold that it is above more often than others', or
    regularly.
    """
    slow: Bool = np.zeros(view.excess.shape, dtype=bool)
    """Steps that were above a threshold before, of ranks that had enough of them: lower ones count their own steps."""
    for sigmas in _TIERS:
        above = view.excess >= max(NOTICEABLE * step_us, sigmas * view.noise_us)
        new = above & ~slow
        counts = new.sum(axis=0)
        for place in open_:
            if _often(counts, place) or _regularly(counts, place, number[new[:, place]]):
                slow[:, place] |= above[:, place]
    return slow


def _delays_steps(excess: Excess, view: _View, slow: Bool, place: int) -> bool:
    """Is the rank's whole step longer where this stage is, and not only another stage shorter?"""
    if slow.all():
        return bool(excess.level[place] > 0)
    stage = view.excess[:, place]
    in_stage = float(stage[slow].mean(dtype=np.float64) - stage[~slow].mean(dtype=np.float64))
    whole = excess.total[:, place]
    return float(whole[slow].mean(dtype=np.float64) - whole[~slow].mean(dtype=np.float64)) >= _MAIN * in_stage


def _often(counts: Int64, place: int) -> bool:
    """Has this rank more slow steps than its peers' number of them explains?"""
    count = int(counts[place])
    if count < _FEWEST:
        return False
    expected = 1.5 * max(float(np.median(np.delete(counts, place))), 1.0)
    return _poisson_tail(count, expected) < _CHANCE / len(counts)


def _regularly(counts: Int64, place: int, number: Int64) -> bool:
    """Has this rank slow steps (``number``) every so many steps, and more of them than its peers?"""
    if len(number) < _FEWEST or len(number) <= 2 * float(np.median(np.delete(counts, place))):
        return False
    return period_of(number.tolist(), _CHANCE / len(counts)) is not None


def _poisson_tail(count: int, expected: float) -> float:
    """Probability of at least ``count`` where ``expected`` are (Chernoff's bound, which is never below it)."""
    if count <= expected:
        return 1.0
    return math.exp(count - expected - count * math.log(count / expected))


def _row(
    job: JobOwnTimes,
    excess: Excess,
    place: int,
    slow: Bool,
    cost_us: float,
    run_us: float,
    hosts: Mapping[int, str],
    *,
    steady: bool,
    plainest: Bool | None,
) -> HistoryStraggler:
    steps = np.flatnonzero(slow)
    stages = excess.by_stage[steps, place].mean(axis=0, dtype=np.float64)
    span = steps[-1] - steps[0] + 1
    # Of steps chosen for what they take longer, noise would be a part of that. A steady rank needs no choice, and a
    # stage's own steps have no more of the other stages' noise than others have.
    if steady or plainest is not None:
        main = excess.by_stage[slice(None) if steady else plainest, place].mean(axis=0, dtype=np.float64)
    else:
        main = _weighted(excess, steps, place)
    rank = job.ranks[place]
    is_steady = steady or len(steps) >= max(_STEADY * span, _FEWEST)
    return HistoryStraggler(
        ranks=(rank,),
        hosts=(hosts[rank],) if hosts.get(rank) else (),
        pattern="steady" if is_steady else "intermittent",
        stage=_main_stage(main),
        stages_us=_positive(stages),
        steps=len(steps),
        share_of_steps=len(steps) / len(job.number),
        first_step=int(job.number[steps[0]]),
        last_step=int(job.number[steps[-1]]),
        period=None
        if is_steady
        else period_of(job.number[of_one_kind(steps.tolist(), excess.total[steps, place].tolist())].tolist()),
        excess_us=float(excess.total[steps, place].mean(dtype=np.float64)),
        cost_us=cost_us / len(job.number),
        cost_share=cost_us / run_us,
    )


def _merged(rows: list[HistoryStraggler]) -> HistoryStraggler:
    """Ranks of one host, all slow in one way."""
    count = len(rows)
    names = {name for row in rows for name in row.stages_us}
    return HistoryStraggler(
        ranks=tuple(rank for row in rows for rank in row.ranks),
        hosts=rows[0].hosts,
        pattern=rows[0].pattern,
        stage=rows[0].stage,
        stages_us={name: sum(row.stages_us.get(name, 0.0) for row in rows) / count for name in sorted(names)},
        steps=max(row.steps for row in rows),
        share_of_steps=max(row.share_of_steps for row in rows),
        first_step=min(row.first_step for row in rows),
        last_step=max(row.last_step for row in rows),
        excess_us=sum(row.excess_us for row in rows) / count,
        cost_us=sum(row.cost_us for row in rows),
        cost_share=sum(row.cost_share for row in rows),
    )


def _with_rotating(
    job: JobOwnTimes, excess: Excess, step_us: float, rows: list[HistoryStraggler], hosts: Mapping[int, str]
) -> list[HistoryStraggler]:
    """``rows``, and a delay that a different rank has each time."""
    steady = _ranks(row for row in rows if row.pattern == "steady")
    in_turn = _rotating(job, excess, step_us, steady, hosts, _LARGEST_PART)
    if in_turn is not None:
        # Of ranks that are late in turn one may be so more often than chance would have it: that is the same delay.
        same = [row for row in rows if row.stage == in_turn.stage and {*row.ranks} <= {*in_turn.ranks}]
        if sum(row.cost_us for row in same) <= in_turn.cost_us:
            return [*(row for row in rows if row not in same), in_turn]
    in_turn = _rotating(job, excess, step_us, _ranks(rows), hosts, 1.0)
    return rows if in_turn is None else [*rows, in_turn]


def _rotating(
    job: JobOwnTimes, excess: Excess, step_us: float, named: set[int], hosts: Mapping[int, str], largest_part: float
) -> HistoryStraggler | None:
    """A delay that a different rank has each time, none of them more than ``largest_part`` of what all are late by."""
    others = [place for place, rank in enumerate(job.ranks) if rank not in named]
    if len(others) < 2:
        return None
    run_us = float(job.step_us.max(axis=1).sum(dtype=np.float64))
    usual = _usual_steps(job)
    for sigmas, least_share in _ROTATING_TIERS:
        found = []
        for view in _views(excess):
            slow = view.excess[:, others] >= max(2 * NOTICEABLE * step_us, sigmas * view.noise_us)
            slow &= usual[:, None]
            enough = slow.mean() >= _BEYOND_NOISE * math.erfc(sigmas / math.sqrt(2)) / 2
            enough &= slow.any(axis=1).mean() >= least_share
            if enough and _in_turn(excess, view, slow, others, largest_part):
                found.append(_rotating_row(job, excess, view, slow, others, run_us, hosts))
        # What delays a rank here and a rank there, anywhere, is the machine's noise.
        found = [row for row in found if row.stage != SEVERAL and row.cost_share >= NOTICEABLE]
        if found:
            return max(found, key=lambda row: row.cost_us)
    return None


def _in_turn(excess: Excess, view: _View, slow: Bool, others: list[int], largest_part: float) -> bool:
    """Do these steps (rows) of the ``others`` (columns) show a delay that goes from rank to rank?"""
    taking_part = np.flatnonzero(slow.sum(axis=0) >= _turns(slow))
    if len(taking_part) < 2:
        return False
    late_us = np.where(slow, view.excess[:, others], 0).sum(axis=0, dtype=np.float64)
    if late_us.max() > largest_part * late_us.sum():
        return False
    return view.stage is None or all(
        _delays_steps(excess, view, slow[:, index], others[index]) for index in taking_part.tolist()
    )


def _turns(slow: Bool) -> int:
    """Steps (rows) that each rank (column) must delay to take part: what comes once may be anything, unless there are
    too few steps for all ranks to have two.
    """
    steps, ranks = slow.shape
    return 2 if 2 * ranks <= steps else 1


def _usual_steps(job: JobOwnTimes) -> Bool:
    """Steps without an evaluation or a checkpoint, which take many times as long and vary as much more; all steps where
    most have one.
    """
    columns = [COLUMNS.index(name) for name in sorted(OCCASIONAL)]
    usual: Bool = np.asarray(job.own_us[:, :, columns].max(axis=(1, 2)) <= 0, dtype=np.bool_)
    return usual if usual.mean() >= _MAIN else np.ones_like(usual)


def _rotating_row(
    job: JobOwnTimes,
    excess: Excess,
    view: _View,
    slow: Bool,
    others: list[int],
    run_us: float,
    hosts: Mapping[int, str],
) -> HistoryStraggler:
    """``slow``: steps x ``others``, which are columns."""
    waited = float(job.wait_us.max(axis=1).sum(dtype=np.float64))
    cost_us = min(float(cost_of(excess, others, slow).sum()), waited)
    at, who = np.nonzero(slow)
    places = np.asarray(others)[who]
    stages = excess.by_stage[at, places].mean(axis=0, dtype=np.float64)
    delayed = slow.any(axis=1)
    steps = np.flatnonzero(delayed)
    ranks = tuple(job.ranks[others[place]] for place in np.flatnonzero(slow.sum(axis=0) >= _turns(slow)).tolist())
    return HistoryStraggler(
        ranks=ranks,
        hosts=tuple(dict.fromkeys(hosts[rank] for rank in ranks if hosts.get(rank))),
        pattern="rotating",
        stage=_main_stage(stages) if view.stage is None else COLUMNS[view.stage],
        stages_us=_positive(stages),
        steps=len(steps),
        share_of_steps=float(delayed.mean()),
        first_step=int(job.number[steps[0]]),
        last_step=int(job.number[steps[-1]]),
        excess_us=float(excess.total[at, places].mean(dtype=np.float64)),
        cost_us=cost_us / len(job.number),
        cost_share=cost_us / run_us,
    )


def _weighted(excess: Excess, steps: Int64, place: int) -> Float64:
    """A rank's excess in each stage, by what the steps are longer: of those barely above noise the stage is chance."""
    weights = np.maximum(excess.total[steps, place], 0).astype(np.float64)
    weighted: Float64 = (excess.by_stage[steps, place] * weights[:, None]).sum(axis=0)
    return weighted


def _main_stage(stages: Float64) -> str:
    """The stage with most of the excess; :data:`SEVERAL` where none has half of it."""
    above = np.maximum(stages, 0)
    largest = int(np.argmax(above))
    return COLUMNS[largest] if above[largest] >= _MAIN * above.sum() > 0 else SEVERAL


def _positive(stages: Float64) -> dict[str, float]:
    """Stages with an excess of a µs and more."""
    return {name: value for name, value in zip(COLUMNS, stages.tolist(), strict=True) if value >= 1}


def _delays(job: JobOwnTimes, excess: Excess) -> StepDelays:
    slowest = np.argmax(excess.total, axis=1)
    rows = np.arange(len(slowest))
    return StepDelays(
        number=job.number,
        rank=np.asarray(job.ranks, dtype=np.int64)[slowest],
        excess_us=np.maximum(excess.total[rows, slowest], 0).astype(np.float64),
        stage=np.argmax(excess.by_stage[rows, slowest], axis=1),
    )
