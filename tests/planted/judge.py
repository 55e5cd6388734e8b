"""Judges the analysis of a random job: what it says that is wrong, by category.

The truth is the simulator's: the same job simulated without the cause, in the steps that the analysis uses.
"""

from __future__ import annotations

import functools
import math
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import perfscope
from perfscope.results.rows import StragglerRow
from perfscope.results.summary import Summary
from tests.generator import TENSORBOARD, Cause, HostSync, SlowHost, SlowLoader, SmallBuckets, simulate
from tests.generator.truth import Truth
from tests.planted.advice import Advice, judge_advice
from tests.planted.draw import Drawn, draw
from tests.planted.jobs import Expected

DUE = 0.05
"""Share of the step from which a cause must be found."""
EXACT = 0.05
"""By how much of its cost a cause's lost time may be wrong."""
BY_NOISE = 1.0
"""What kernels' noise may add to that, as a share of the step for each of the noise's: a rank's own luck is no part of
what its cause costs."""
REPLAYED = 0.02
TRUE_OF_LAYOUT = ("tensor-parallel-span", "pipeline-bubble")
"""Rules that are right of some layouts that are drawn, whatever is planted."""
RULES: dict[type[Cause], str] = {
    SlowHost: "launch-bound",
    SlowLoader: "dataloader-workers",
    HostSync: "host-syncs",
    SmallBuckets: "ddp-bucket-size",
}
"""What must be found where a cause hits all ranks and costs twice what is due."""


@dataclass(frozen=True)
class Judged:
    """One job: ``wrong`` holds (category, words) for everything that is."""

    drawn: Drawn
    wrong: tuple[tuple[str, str], ...]
    due: int
    analyze_s: float
    advice: Advice | None = None
    """None where nothing can be said, or that was not asked for."""


def judge(drawn: Drawn, *, advice: bool = False) -> Judged:
    """Simulate, write, analyze, compare; with ``advice`` also take the first one."""
    job = simulate(drawn.spec)
    begin = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder:
            job.write(Path(folder), file_template=TENSORBOARD, ranks=drawn.recorded)
            begin = time.perf_counter()
            summary = perfscope.analyze(folder, workers=1)
    except Exception:
        return Judged(drawn, (("exception", traceback.format_exc()),), 0, time.perf_counter() - begin)
    took = time.perf_counter() - begin
    step_us = _step_us(job.truth, summary)
    planted = [PlantedCost(who, step_us - _without_us(drawn, causes, summary)) for who, causes in _nameable(drawn)]
    attribution = Attribution(drawn, summary, step_us, planted)
    wrong = (*_arithmetic(summary), *attribution.wrong(), *_rules(drawn, summary, step_us))
    steps_us = functools.partial(_step_us, summary=summary)
    advised = judge_advice(drawn.spec, drawn.missing, summary, steps_us) if advice else None
    return Judged(drawn, wrong, len(attribution.due), took, advised)


def _step_us(truth: Truth, summary: Summary) -> float:
    """Mean of the steps that the analysis uses: those that it leaves out and says so, as with an evaluation, are no
    part of what it reports. All of them where it knows no steps."""
    lengths = dict(zip(truth.spec.recorded_steps, truth.steps_ns, strict=True))
    used = [lengths[step] for step in summary.job.steps if step in lengths]
    return fmean(used or truth.steps_ns) / 1e3


def _without_us(drawn: Drawn, causes: Sequence[Cause], summary: Summary) -> float:
    """The same without these causes."""
    return _step_us(simulate(drawn.spec.without(*causes)).truth, summary)


def _rules(drawn: Drawn, summary: Summary, step_us: float) -> list[tuple[str, str]]:
    """What hits all ranks alike is no straggler but has a rule, which must fire where nothing else is wrong."""
    fired = {finding.rule for finding in summary.findings if finding.severity in ("high", "medium")}
    wrong = []
    for cause, who in drawn.causes:
        if who is not None or type(cause) not in RULES or len(drawn.causes) > 1:
            continue
        cost = step_us - _without_us(drawn, [cause], summary)
        if cost >= 2 * DUE * step_us and RULES[type(cause)] not in fired:
            wrong.append((f"no {RULES[type(cause)]}", f"{cause} costs {cost:.0f} of {step_us:.0f} us, found {fired}"))
    return wrong


@dataclass(frozen=True)
class PlantedCost:
    """Ranks that a cause was planted on, and what it costs the step."""

    who: Expected
    cost_us: float


def _nameable(drawn: Drawn) -> list[tuple[Expected, list[Cause]]]:
    """Which recorded ranks may be named for which causes: each for its own and for those like it that hit some of its
    ranks, and two that hide each other together. Where all loaders are slow, some ranks wait for their batches and the
    others, whose batches are ready by then, for these.
    """
    own = [(_recorded(who, drawn), cause) for cause, who in drawn.causes if who is not None]
    named = [(who, [other for one, other in own if one == who or _is_part(one, who)]) for who, _ in own]
    alike = [(who, causes) for who, causes in named if who.scope in ("rank", "host")]
    if len(alike) == 2 and not set(alike[0][0].ranks).intersection(alike[1][0].ranks):
        ranks = tuple(sorted({rank for who, _ in alike for rank in who.ranks}))
        named.append((Expected(ranks, alike[0][0].cause, "ranks"), [cause for _, causes in alike for cause in causes]))
    loaders = [cause for cause, who in drawn.causes if who is None and isinstance(cause, SlowLoader)]
    return [*named, *((Expected(drawn.recorded, cause.category, "some"), [cause]) for cause in loaders)]


def _is_part(one: Expected, of: Expected) -> bool:
    """Are these ranks some of that host's or stage's, slow by the same?"""
    return of.scope in ("host", "stage") and one.cause == of.cause and set(one.ranks) < set(of.ranks)


def _recorded(who: Expected, drawn: Drawn) -> Expected:
    return replace(who, ranks=tuple(rank for rank in who.ranks if rank not in drawn.missing))


def _arithmetic(summary: Summary) -> list[tuple[str, str]]:
    """What must hold in every job."""
    wrong = []
    try:
        summary.self_check()
    except ValueError as error:
        wrong.append(("sums", str(error)))
    path = math.fsum(row.us for row in summary.critical_path or ())
    if summary.critical_path is not None and not math.isclose(path, summary.job.step_time_us, rel_tol=1e-9):
        wrong.append(("path", f"{path} of {summary.job.step_time_us} us"))
    error = summary.replay.error if summary.replay is not None else None
    if error is None or abs(error) >= REPLAYED:
        wrong.append(("replay", str(summary.replay)))
    unknown = [row.rank for row in summary.time_breakdown if row.idle_unknown_us > 0.02 * row.step_time_us]
    if unknown:
        wrong.append(("unknown", f"ranks {unknown}"))
    return wrong


class Attribution:
    """The stragglers that the analysis reports, against what was planted."""

    def __init__(self, drawn: Drawn, summary: Summary, step_us: float, planted: list[PlantedCost]) -> None:
        self._drawn, self._summary, self._step_us, self._planted = drawn, summary, step_us, planted
        self.due = sorted((each for each in planted if self._is_due(each)), key=lambda each: -each.cost_us)

    def _is_due(self, each: PlantedCost) -> bool:
        """Whether it must be found. Not while ranks are missing, whom the others may have waited for; nor ranks that
        suffer alike, where one of them costs most of it alone, or are some of others that do."""
        if each.who.scope == "some" or any(_is_part(each.who, other.who) for other in self._planted):
            return False
        if each.who.scope == "ranks":
            alone = max(other.cost_us for other in self._planted if other.who.scope in ("rank", "host"))
            if each.cost_us < 2 * alone:
                return False
        elif any(other.who.scope == "ranks" and set(each.who.ranks) < set(other.who.ranks) for other in self._planted):
            together = max(other.cost_us for other in self._planted if other.who.scope == "ranks")
            if together >= 1.25 * each.cost_us:
                return False
        nameable = not self._drawn.missing and each.who.cause != "communication" and self._has_peers(each.who)
        return nameable and each.cost_us >= DUE * self._step_us

    def _has_peers(self, who: Expected) -> bool:
        """Whether somebody does the same work. Stages are compared with stages by what all of them do: compute and
        launch, but not load, print or pause."""
        alone = self._drawn.spec.ranks // self._drawn.spec.pipeline == len(who.ranks)
        return not alone or who.cause in ("compute", "launch")

    def _overlaps(self, who: Expected) -> bool:
        """Whether a rank suffers from something else too: as fast as its peers it would be rid of both."""
        others = [each.who for each in self._planted if each.who.cause != who.cause]
        return any(set(who.ranks).intersection(other.ranks) for other in others)

    def wrong(self) -> list[tuple[str, str]]:
        """All that is wrong."""
        found = self._wrongly_named()
        rows = list(self._summary.stragglers)
        for each in self.due:
            row = next((row for row in rows if _is(row, each.who)), None)
            what = f"{each.who.scope} {each.who.cause}"
            if row is None and self._overlaps(each.who) and any(other.rank in each.who.ranks for other in rows):
                continue
            if row is None:
                found.append(
                    (f"not reported: {what}", f"{each.who.ranks}, {each.cost_us:.0f} of {self._step_us:.0f} us")
                )
            elif self._overlaps(each.who):
                continue
            elif self._is_off(row, each.cost_us):
                found.append((f"cost of {what}", f"{row.lost_us:.0f}, not {each.cost_us:.0f} us"))
        if self.due and rows and not found and not _is(rows[0], self.due[0].who):
            first = max((each.cost_us for each in self._planted if _is(rows[0], each.who)), default=0.0)
            if self.due[0].cost_us - first > EXACT * self.due[0].cost_us + self._slack_us:
                found.append(("order", f"{rows[0].rank} before {self.due[0].who}"))
        if not self._drawn.spec.causes:
            serious = [f for f in self._summary.findings if f.severity in ("high", "medium")]
            loud = [f for f in serious if f.rule not in TRUE_OF_LAYOUT]
            found += [("finding in a healthy job", f"{f.rule}: {f.title}") for f in loud]
        return found

    def _is_off(self, row: StragglerRow, cost_us: float) -> bool:
        """Does a row not say this cost? One that was not replayed says the most that it may be."""
        over = row.lost_us - cost_us if row.replayed else min(row.lost_us - cost_us, 0.0)
        return abs(over) > EXACT * cost_us + self._slack_us

    def _may_be(self, row: StragglerRow, who: Expected) -> bool:
        """Some of all ranks whose loaders are slow may be named where the advice is about loaders, not about them."""
        fired = {finding.rule for finding in self._summary.findings}
        return _is(row, who) and (who.scope != "some" or "dataloader-workers" in fired)

    @property
    def _slack_us(self) -> float:
        return BY_NOISE * self._drawn.spec.noise * self._step_us

    def _wrongly_named(self) -> list[tuple[str, str]]:
        """Stragglers reported where nothing was planted, or for much more than it costs."""
        found = []
        for row in self._summary.stragglers:
            cost = max((each.cost_us for each in self._planted if self._may_be(row, each.who)), default=None)
            what = f"{row.scope} {row.rank} {row.ranks} of {row.cause}, {row.lost_us:.0f} of {self._step_us:.0f} us"
            if cost is None:
                found.append((f"reported without cause: {row.cause}", what))
            elif any(self._overlaps(each.who) for each in self._planted if _is(row, each.who)):
                continue
            elif cost < DUE * self._step_us and row.lost_us - cost > 0.01 * self._step_us + self._slack_us:
                found.append((f"cost too high: {row.cause}", f"{what}, not {cost:.0f}"))
        return found


def _is(row: StragglerRow, who: Expected) -> bool:
    if who.cause not in (row.cause, *row.causes):
        return False
    if who.scope in ("host", "stage", "ranks"):
        return set(row.ranks) == set(who.ranks)
    if who.scope == "some":
        return set(row.members) <= set(who.ranks)
    return row.rank in who.ranks and (row.scope != "ranks" or who.scope == "job")


def judge_seed(seed: int, *, advice: bool = False) -> Judged:
    """Draw and judge."""
    return judge(draw(seed), advice=advice)
