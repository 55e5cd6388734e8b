"""Judges the product on an emulated job: causes, predictions and the first advice, each against the job run again."""

from __future__ import annotations

import functools
import math
import random
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from perfscope.analyzers.analyze import analyze
from perfscope.analyzers.whatif.change import CannotReplay, Context
from perfscope.analyzers.whatif.predict import WhatIfAnswer, predict
from perfscope.analyzers.whatif.whatif import context_of
from perfscope.results.findings import Finding, Severity
from perfscope.results.rows import StragglerRow
from perfscope.results.summary import Summary
from tests.emulator.changes import advisable, apply, questions
from tests.emulator.draw import Drawn, Plant
from tests.emulator.emulate import emulate, step_and_long_run_ns, step_ns
from tests.emulator.spec import Job

DUE = 0.05
"""Share of the step from which a cause must be named, and by which a lost time or a prediction may be off."""
SMALL = 0.02
"""Share of the step below which nobody is accused of anything."""
ASKED = 6
"""Settings that a job is asked about, at most."""
BEST = 0.10
"""How much longer a step may be with the first advice than with the best single change."""

ROWS = {
    "slow compute": ("compute",),
    "slow host": ("launch", "host"),
    "slow loader": ("dataloader",),
    "pause": ("host", "sync"),
    "sync": ("sync", "launch", "host"),
}
"""What a straggler's cause is called."""
RULES = {
    "slow loader": ("dataloader-workers", "loader-stalls"),
    "pause": ("garbage-collection", "host-pauses"),
    "sync": ("host-syncs", "launch-bound"),
    "small buckets": ("ddp-bucket-size",),
    "by hand": ("gradients-by-hand",),
    "reduces every batch": ("ddp-no-sync",),
    "gathers late": ("fsdp-gathers",),
    "uneven work": ("uneven-work", "straggling-rank"),
    "loops over parameters": ("optimizer-kernels", "launch-bound"),
}
"""Rules that name what all ranks suffer from; nothing can name a slow link that all use."""


@dataclass(frozen=True)
class Miss:
    """Something that is wrong: its class, and a line that tells it."""

    kind: str
    words: str


@dataclass
class Judged:
    """One job. ``due`` counts causes that had to be named; ``named`` those that were, ``sized`` those with the right
    cost."""

    drawn: Drawn
    due: int = 0
    named: int = 0
    sized: int = 0
    healthy: bool = False
    accused: int = 0
    advice: str = ""
    """``right``, ``wrong`` or empty where nothing could be gained."""
    answers: list[Answer] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)

    def miss(self, kind: str, words: str) -> None:
        """Note one."""
        self.misses.append(Miss(kind, words))


@dataclass(frozen=True)
class Answer:
    """A prediction and what the change brings, ns; ``refused`` is why there is none."""

    settings: dict[str, str]
    found: WhatIfAnswer | None
    before_ns: float
    truth_ns: float
    refused: str = ""
    long_run_ns: float | None = None
    """What many steps with the change take on their mean; None: not asked for."""
    long_before_ns: float = 0.0
    """What as many steps without it take."""

    @property
    def setting(self) -> str:
        """Its name, the rank's number apart."""
        name = next(iter(self.settings))
        return "rank.N" if name.startswith("rank.") else name

    @property
    def error(self) -> float:
        """Relative, of the predicted step against the step with the change."""
        return self.error_of(self.truth_ns)

    def error_of(self, truth_ns: float) -> float:
        """The same against another truth."""
        assert self.found is not None
        return self.found.mid_ns / truth_ns - 1

    @property
    def change_error(self) -> float:
        """Relative, of by how much many steps get shorter or longer: what the recorded few hold by chance is in both
        the measured step and the predicted one.
        """
        assert self.found is not None
        assert self.long_run_ns is not None
        return (self.found.mid_ns / self.found.measured_ns) / (self.long_run_ns / self.long_before_ns) - 1

    @property
    def inside(self) -> bool:
        """Does the range hold the truth (but for a thousandth)?"""
        return self.holds(self.truth_ns)

    def holds(self, truth_ns: float) -> bool:
        """The same of another truth."""
        assert self.found is not None
        return self.found.low_ns * 0.999 <= truth_ns <= self.found.high_ns * 1.001

    def __str__(self) -> str:
        asked = " ".join(f"{name}={value}" for name, value in self.settings.items())
        if self.found is None:
            return f"{asked} (truth {self.before_ns / 1e6:.2f} -> {self.truth_ns / 1e6:.2f} ms) refused: {self.refused}"
        found = self.found
        return (
            f"{asked} measured {found.measured_ns / 1e6:.2f} -> {found.low_ns / 1e6:.2f} .. {found.mid_ns / 1e6:.2f} "
            f".. {found.high_ns / 1e6:.2f} ms, truth {self.before_ns / 1e6:.2f} -> {self.truth_ns / 1e6:.2f} "
            f"({self.error:+.1%}{'' if self.inside else ', outside'}){self._in_the_long_run()}"
        )

    def _in_the_long_run(self) -> str:
        if self.long_run_ns is None:
            return ""
        outside = "" if self.holds(self.long_run_ns) else ", outside"
        return (
            f"; in the long run {self.long_before_ns / 1e6:.2f} -> {self.long_run_ns / 1e6:.2f} "
            f"({self.error_of(self.long_run_ns):+.1%}{outside}; the change {self.change_error:+.1%})"
        )


def judge(drawn: Drawn, predictions: bool = True, long_run: int = 0) -> Judged:
    """Run, write, analyze, compare; predictions also with the mean of ``long_run`` steps."""
    judged = Judged(drawn)
    emulation = emulate(drawn.job)
    with tempfile.TemporaryDirectory() as folder:
        emulation.write(Path(folder))
        summary = analyze(folder, workers=1)
        context = context_of(folder, workers=1) if predictions else None
    _causes(judged, summary, emulation.step_ns, long_run)
    _first_advice(judged, summary, emulation.step_ns)
    if context is not None:
        judged.answers = list(_answers(drawn.job, context, emulation.step_ns, long_run))
        for answer in judged.answers:
            _note(judged, answer)
    return judged


def _note(judged: Judged, answer: Answer) -> None:
    if answer.found is None and "defect" in answer.refused:
        judged.miss(f"defect {answer.setting}", str(answer))
    elif answer.found is None:
        if abs(answer.truth_ns / answer.before_ns - 1) > DUE:  # else nobody misses it
            judged.miss(f"refused {answer.setting}", str(answer))
    elif abs(answer.error) > DUE:
        judged.miss(f"prediction off {answer.setting}", str(answer))
    elif not answer.inside:
        judged.miss(f"outside {answer.setting}", str(answer))
    elif answer.long_run_ns is not None and not answer.holds(answer.long_run_ns):
        judged.miss(f"outside in the long run {answer.setting}", str(answer))
    elif answer.long_run_ns is not None and abs(answer.change_error) > DUE:
        judged.miss(f"change off in the long run {answer.setting}", str(answer))


def _answers(job: Job, context: Context, before_ns: float, long_run: int) -> Iterator[Answer]:
    asked = list(questions(job))
    _, long_before = step_and_long_run_ns(job, long_run)
    for settings in random.Random(job.seed).sample(asked, min(ASKED, len(asked))):
        changed = apply(job, settings)
        if changed is None:
            continue
        truth, mean = (ns / changed.batches for ns in step_and_long_run_ns(changed.job, long_run))
        try:
            found = predict(context, settings)
            yield Answer(settings, found, before_ns, truth, "", mean if long_run else None, long_before)
        except CannotReplay as reason:
            yield Answer(settings, None, before_ns, truth, str(reason))


def _causes(judged: Judged, summary: Summary, before_ns: float, long_run: int) -> None:
    """Who costs 5 % must be named with that cost; who costs nothing must not. With a ``long_run``, who costs 5 % of as
    many steps, too: a few live on batches that workers have ready, and many do not.
    """
    drawn = judged.drawn
    costs = {plant: before_ns - step_ns(plant.cure(drawn.job)) for plant in drawn.plants}
    # Two that hide each other cost nothing one by one.
    cured = functools.reduce(lambda job, plant: plant.cure(job), drawn.plants, drawn.job)
    judged.healthy = all(cost < SMALL * before_ns for cost in (*costs.values(), before_ns - step_ns(cured)))
    rows = list(summary.stragglers)
    serious = [finding for finding in summary.findings if finding.severity in (Severity.HIGH, Severity.MEDIUM)]
    told = [f"{row.cause} of {row.scope} {row.rank} {row.lost_us / 1e3:.2f}" for row in rows]
    told += [finding.rule for finding in serious]
    for plant, cost in costs.items():
        unknown = _cannot_be_told(plant, drawn.job)
        if cost < DUE * before_ns or unknown or (plant.ranks is None and plant.kind not in RULES):
            continue
        if long_run and _costs_of_many(drawn.job, plant, long_run) < DUE:
            continue
        judged.due += 1
        named = _named(plant, rows, serious)
        words = f"{plant} costs {cost / 1e6:.2f} of {before_ns / 1e6:.2f} ms"
        if named is None:
            judged.miss("not named " + plant.kind, f"{words}; told {told}; {summary.verdict.headline}")
            continue
        judged.named += 1
        said_ns, truth_ns = _sizes(plant, named, cost, before_ns, summary, drawn)
        if abs(said_ns - truth_ns) > DUE * before_ns:  # not where no number is said
            judged.miss("cost of " + plant.kind, f"{words}, said {said_ns / 1e6:.2f}; told {told}")
        else:
            judged.sized += 1
    uneven = any(plant.kind == "uneven work" for plant in drawn.plants)
    for row in rows:
        cost = _cost_of_row(drawn, row, costs, before_ns)
        if uneven or row.lost_us * 1e3 - max(cost, 0.0) <= max(SMALL, drawn.job.noise) * before_ns:
            continue
        if cost < SMALL * before_ns:
            judged.accused += 1
            judged.miss(
                "accused " + row.cause,
                f"{row.scope} {row.ranks or row.rank} {row.lost_us / 1e3:.2f} of {before_ns / 1e6:.2f} ms",
            )


def _cost_of_row(drawn: Drawn, row: StragglerRow, costs: Mapping[Plant, float], before_ns: float) -> float:
    """What costs as much as a row may say: the costliest of its plants; or all that hits its ranks, where those hide
    each other.
    """
    cost = max((cost for plant, cost in costs.items() if _is(plant, row, of_all=True)), default=0.0)
    if any(_is(plant, row) for plant in drawn.plants if plant.ranks is not None):
        cost = max(cost, _cost_of_members(drawn, row, before_ns))
    return max(cost, _cost_together(drawn, row, before_ns)) if len(row.causes) > 1 else cost


def _cannot_be_told(plant: Plant, job: Job) -> bool:
    """Where a rank is missing it may be as late as those that are, or work as uneven."""
    return bool(job.recording.missing) and (plant.ranks is not None or plant.kind == "uneven work")


def _costs_of_many(job: Job, plant: Plant, long_run: int) -> float:
    """Share of the mean of so many steps."""
    (_, with_it), (_, without) = (step_and_long_run_ns(each, long_run) for each in (job, plant.cure(job)))
    return 1 - without / with_it


def _cost_together(drawn: Drawn, row: StragglerRow, before_ns: float) -> float:
    """What a row's ranks cost, each with its own cause, where every one of them has it; else 0."""
    each = zip(row.ranks, row.causes, strict=True)
    of_rank = [replace(row, rank=rank, ranks=(rank,), cause=cause, causes=()) for rank, cause in each]
    whose = [[plant for plant in drawn.plants if _is(plant, one, of_all=True)] for one in of_rank]
    if not all(whose):
        return 0.0
    plants = dict.fromkeys(plant for one in whose for plant in one)
    return before_ns - step_ns(functools.reduce(lambda job, plant: plant.cure(job), plants, drawn.job))


def _is(plant: Plant, row: StragglerRow, *, of_all: bool = False) -> bool:
    """Whether a row is about a plant's ranks and kind; ``of_all``: or about some of all ranks, which all have it."""
    if row.cause not in ROWS.get(plant.kind, ()):
        return False
    return of_all if plant.ranks is None else bool({row.rank, *row.ranks} & set(plant.ranks))


def _named(plant: Plant, rows: list[StragglerRow], serious: list[Finding]) -> StragglerRow | Finding | None:
    """What names a plant: the costliest of its rows, or a finding by the first rule that has one."""
    if plant.ranks is not None:
        row = max((row for row in rows if _is(plant, row)), key=lambda row: row.lost_us, default=None)
        # Stages of one rank have nobody to be compared with, but a finding may be about these ranks.
        about = (one for one in serious if one.rule in RULES.get(plant.kind, ()) and one.evidence[0].ranks)
        found = next((one for one in about if set(one.evidence[0].ranks) <= set(plant.ranks)), None)
        of_more = found is not None and row is not None and {row.rank, *row.ranks} < set(found.evidence[0].ranks)
        return found if of_more else row or found
    # In a few steps not all ranks need show what all suffer from.
    found = (finding for rule in RULES[plant.kind] for finding in serious if finding.rule == rule)
    return next(found, next((row for row in rows if _is(plant, row, of_all=True)), None))


def _said_of(row: StragglerRow, plant: Plant) -> float:
    """What a row says that a plant costs, µs: of one rank among several that hide each other, what it costs alone."""
    alone = dict(zip(row.ranks, row.alone_us, strict=False))
    return alone[plant.ranks[0]] if alone and plant.ranks is not None and len(plant.ranks) == 1 else row.lost_us


def _cost_of_members(drawn: Drawn, row: StragglerRow, before_ns: float) -> float:
    """What all costs that hits a row's ranks and nobody else: at their peers' pace they would be rid of it."""
    members = {row.rank, *row.ranks}
    own = [plant for plant in drawn.plants if plant.ranks is not None and members.issuperset(plant.ranks)]
    return before_ns - step_ns(functools.reduce(lambda job, plant: plant.cure(job), own, drawn.job))


def _sizes(
    plant: Plant, named: StragglerRow | Finding, cost: float, before_ns: float, summary: Summary, drawn: Drawn
) -> tuple[float, float]:
    """(what the analysis says, NaN where it says no number; what is true), ns: of what a cause costs, or of what the
    change brings that its finding advises, which may be another one than to remove the cause."""
    if isinstance(named, StragglerRow):
        said_ns = _said_of(named, plant) * 1e3
        return said_ns, min(cost, _cost_of_members(drawn, named, before_ns), key=lambda ns: abs(ns - said_ns))
    predicted = named.predicted_step_us
    said = math.nan if predicted is None else (summary.job.step_time_us - predicted.mid) * 1e3
    changed = apply(drawn.job, _as_told(named.whatif, drawn.job)) if named.whatif else None
    return said, cost if changed is None else before_ns - step_ns(changed.job) / changed.batches


def _as_told(settings: Mapping[str, str], job: Job) -> dict[str, str]:
    """As the advice says: twice as many loader workers, where their number is not recorded and there are as many."""
    told, workers = dict(settings), job.loader.workers
    wanted = told.get("dataloader.num_workers")
    if wanted is not None and not job.recording.run and workers >= int(wanted) > 0:
        told["dataloader.num_workers"] = str(2 * workers)
    return told


def _can_be_advised(settings: Mapping[str, str], job: Job) -> bool:
    """Ranks only where all are recorded, to be compared with; buckets only where the recording holds their sizes."""
    return not any(
        (name.startswith("rank.") and job.recording.missing)
        or (name == "ddp.bucket_cap_mb" and job.recording.metadata == "none")
        for name in settings
    )


def _first_advice(judged: Judged, summary: Summary, before_ns: float) -> None:
    """What the first finding advises, made; against the best single change."""
    job = judged.drawn.job
    tried = {}
    for settings in advisable(job):
        changed = apply(job, settings) if _can_be_advised(settings, job) else None
        if changed is not None:
            tried[str(settings)] = step_ns(changed.job) / changed.batches
    for plant in judged.drawn.plants:
        if plant.kind != "slow link" and not _cannot_be_told(plant, job):
            tried[str(plant)] = step_ns(plant.cure(job))
    best, best_ns = min(tried.items(), key=lambda item: item[1], default=("", before_ns))
    serious = [finding for finding in summary.findings if finding.severity in (Severity.HIGH, Severity.MEDIUM)]
    # Where nothing is wrong, what the page lists first may still be done: more micro-batches.
    first = next(iter(serious or [finding for finding in summary.findings if finding.whatif]), None)
    truth = before_ns
    words = "nothing"
    off = False
    if first is not None:
        changed = apply(job, _as_told(first.whatif, job)) if first.whatif else None
        plants = [
            plant for plant in judged.drawn.plants if plant.ranks is None and first.rule in RULES.get(plant.kind, ())
        ]
        if changed is None and not plants:
            return  # an advice that the emulator cannot make
        truth = step_ns(changed.job) / changed.batches if changed is not None else step_ns(plants[0].cure(job))
        words = f"{first.rule} {first.whatif}"
        predicted = first.predicted_step_us
        if predicted is not None:
            gain = 1 - predicted.mid / summary.job.step_time_us
            off = abs(gain - (1 - truth / before_ns)) > DUE
            words += f" predicted {gain:.1%}"
        # A finding that names a setting as the cause also says to change that.
        truth = min([truth, *(step_ns(plant.cure(job)) for plant in plants)])
    words += f" brings {1 - truth / before_ns:.1%}; best {best} {1 - best_ns / before_ns:.1%}"
    judged.advice = "right"
    if off:
        judged.advice = "wrong"
        judged.miss("advice off " + (first.rule if first is not None else ""), words)
    elif truth > (1 + BEST) * best_ns:
        judged.advice = "wrong"
        judged.miss("not the best advice", f"{words}; {summary.verdict.headline}")
