"""What the step history of a run adds to the verdict on its recorded steps: both are of one job, and make one verdict.

A capture holds some steps, the history all of them. A rank that delays the run now and then, or from some step on, need
not do so in the few that were captured.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Final

from perfscope.analyzers.history.long_steps import period_of
from perfscope.analyzers.history.steps_only import EVALUATES, evaluation_share
from perfscope.analyzers.verdict import EVALUATED, OF_OTHERS, evaluate_less, evaluations, recoverable
from perfscope.results.findings import Confidence
from perfscope.results.history import EVALUATE_LESS, STAGE_WORDS, History, HistoryStraggler, LongSteps
from perfscope.results.rows import StragglerRow, Verdict
from perfscope.results.summary import Summary
from perfscope.text import duration, lower_first, percent, ranks_in_words

NOTICEABLE: Final = 0.05
"""Share of the run from which what a straggler costs is in the verdict, as of the rule about stragglers in traces."""
_LONG_RUN: Final = 100
"""Steps from which a run tells that the recorded ones are not typical."""
_FAR_LESS: Final = 1 / 3
"""Part of what a straggler costs the recorded steps, below which its cost over the run is another."""
_LARGE: Final = 0.1
"""Share of the run from which steps that take longer come first in the verdict."""
_ALIKE: Final = 0.05
"""Probability that steps which come by chance lie so many steps apart, from which they are one kind with others."""
_FAR_LONGER: Final = 2.0
"""Times what they took, from which steps that take longer from some step on come first in the verdict."""
_STANDS_US: Final = 30e6
_STEPS_LONG: Final = 20
"""From so long on, and from so many steps' time, a job that makes no step stands still."""
_SHORT: Final = 64
"""Steps that a trace may well hold."""


def with_history(summary: Summary, history: History) -> Summary:
    """The summary of traces with the history of the whole run."""
    summary = _with_run(replace(summary, history=history), history)
    summary = _with_change(summary, history)
    share = evaluation_share(history)
    if share < EVALUATES or "evaluation" in summary.verdict.headline:
        return summary
    words = f"Over the whole run evaluations take {share:.0%} of the steps' time."
    return replace(summary, verdict=_with_evaluations(summary.verdict, words, EVALUATE_LESS))


def standing(summary: Summary, history: History) -> Verdict:
    """The verdict on a job that made no step for long before it was ended; as it was where that was short."""
    verdict, still_us = summary.verdict, history.stood_still_us or 0.0
    usual_us = max((row.median_us for row in history.ranks), default=0.0)
    if still_us < max(_STANDS_US, _STEPS_LONG * usual_us):
        return verdict
    return replace(
        verdict,
        headline=f"No rank made a step in the last {duration(still_us)} before the job was ended: it hung, evaluated "
        f"or saved. Until then: {verdict.headline}",
        healthy=False,
        first_action="Run it with perfscope run --hang-timeout 30: that shows what each rank waits for.",
    )


def _with_run(summary: Summary, history: History) -> Summary:
    """The summary with what the run's stragglers and long steps add to its verdict."""
    unseen = [row for row in history.stragglers if row.cost_share >= NOTICEABLE and not _is_seen(row, summary)]
    again = history.long_steps
    if again is not None and again.share >= NOTICEABLE and not unseen and not _are_seen(again, summary):
        return replace(summary, verdict=_with_long_steps(summary, again))
    if unseen:
        return replace(summary, verdict=_verdict(summary.verdict, unseen[0]))
    return _with_passing_stragglers(summary, history)


def _with_change(summary: Summary, history: History) -> Summary:
    """The summary with a change of the run's step time after the recorded steps, which do not show why. It comes first
    where steps take far longer from there on, or nothing else was found.
    """
    change, verdict = history.change, summary.verdict
    if change is None or change.share_after < _LARGE or not summary.job.steps:
        return summary
    first, last = min(summary.job.steps), max(summary.job.steps)
    if last >= change.first_step:
        return summary
    words = change.in_words()
    recorded = f"step {last}" if first == last else f"steps {first} to {last}"
    told = f"{words[0].upper()}{words[1:]}. What was recorded, {recorded}, is before that and does not show why."
    if not change.slower or (change.after_us < _FAR_LONGER * change.before_us and not verdict.healthy):
        return replace(summary, verdict=replace(verdict, headline=f"{verdict.headline} {told}", healthy=False))
    return replace(
        summary,
        verdict=replace(
            verdict,
            headline=f"{told} It shows: {verdict.headline}",
            healthy=False,
            first_action=f"Record steps from there on: add --wait {change.first_step} to perfscope run.",
        ),
    )


def _with_passing_stragglers(summary: Summary, history: History) -> Summary:
    """With little confidence in stragglers that cost the run far less than the recorded steps: those are not typical,
    as where another program takes a rank's cores for some seconds. On CPUs, where histories hold what ranks do
    themselves; a slow link is in none, and a stage alone has no peers.
    """
    comparable = history.compared and "CPU" in summary.job.devices and "pipeline" not in summary.job.strategies
    if not comparable or not summary.job.step_time_us or max(row.steps for row in history.ranks) < _LONG_RUN:
        return summary
    passing = {
        row.members: of_run
        for row in summary.stragglers
        if row.scope != "job"
        and row.cause != "communication"
        and (of_run := _cost_of_run(row, history)) < _FAR_LESS * row.lost_us / summary.job.step_time_us
    }
    if not passing:
        return summary
    rows = tuple(
        replace(row, confidence=Confidence.LOW.value) if row.members in passing else row for row in summary.stragglers
    )
    findings = tuple(
        replace(each, confidence=Confidence.LOW) if each.straggling in passing else each for each in summary.findings
    )
    verdict, first = summary.verdict, summary.findings[0] if summary.findings else None
    if first is not None and first.straggling in passing:
        share = passing[first.straggling]
        told = f"costs {percent(share)} of the time" if share else "costs next to nothing"
        verdict = replace(
            verdict, headline=f"{verdict.headline} Over the whole run it {told}: the recorded steps are not typical."
        )
    return replace(summary, stragglers=rows, findings=findings, verdict=verdict)


def _cost_of_run(row: StragglerRow, history: History) -> float:
    """What these ranks cost the whole run, as a share of its time."""
    return sum(each.cost_share for each in history.stragglers if not {*each.ranks}.isdisjoint(row.members))


def _are_seen(again: LongSteps, summary: Summary) -> bool:
    """Is one of the recorded steps longer by half of what these are on average, or by as much as the shortest is?"""
    times = summary.job.step_time_us_per_step
    outliers = summary.history.outliers if summary.history is not None else ()
    least_us = min((row.longer_us for row in outliers if row.step in again.steps), default=again.longer_us)
    return bool(times) and max(times) - median(times) >= min(again.longer_us / 2, least_us)


def _are_evaluations(again: LongSteps, evaluated: list[int]) -> bool:
    """Do these steps come as regularly as those in which the model is evaluated, and at the same time?"""
    if not evaluated:
        return False
    if again.period is not None:
        return all((step - again.steps[0]) % again.period == 0 for step in evaluated)
    return period_of(sorted({*evaluated, *again.steps}), _ALIKE) is not None


def _with_long_steps(summary: Summary, again: LongSteps) -> Verdict:
    """Before the rest of the verdict where they take a large part of the run, and more than the first finding's change
    saves; else behind it.
    """
    verdict, words = summary.verdict, again.in_words()
    words = f"{words[0].upper()}{words[1:]}"
    left_out = evaluations(summary)
    if _are_evaluations(again, left_out.get("steps", [])):
        told, action = f"{words}. They are evaluations.", evaluate_less(left_out.get("alone", []))
        if verdict.healthy or again.share < max(_LARGE, (1 - again.share) * recoverable(summary)):
            return _with_evaluations(verdict, told, action)
        before, _, behind = verdict.headline.partition(EVALUATED)
        of_others = lower_first(before.strip()) or behind.partition(OF_OTHERS)[2].strip()
        return replace(verdict, headline=f"{told} {OF_OTHERS} {of_others}", first_action=action)
    recorded = "with --trigger 1.5"
    if again.period is not None and again.period <= _SHORT:
        recorded = f"with --active {again.period}"
    look = f"Record some of the steps that take {duration(again.longer_us)} longer, {recorded}, and see what they do."
    large = again.share >= _LARGE and again.share > recoverable(summary)
    leads = large or verdict.healthy or not verdict.first_action
    headline = f"{words}. The recorded steps hold none of them"
    of_recorded = f"{verdict.headline.removesuffix('.').partition('. ')[0]}."
    headline = f"{headline}. They show: {of_recorded}" if leads else f"{verdict.headline} {headline}."
    return replace(verdict, headline=headline, healthy=False, first_action=look if leads else verdict.first_action)


def _with_evaluations(verdict: Verdict, words: str, action: str) -> Verdict:
    """As it is where it is about evaluations already, as they take much of the recorded steps."""
    if "an evaluation" in verdict.headline:
        return verdict
    action = verdict.first_action if verdict.first_action and not verdict.healthy else action
    return replace(verdict, headline=f"{verdict.headline} {words}", healthy=False, first_action=action)


def _is_seen(row: HistoryStraggler, summary: Summary) -> bool:
    """Do the recorded steps show these ranks, too: as stragglers, or by a finding that is about them, as that their
    stage of a pipeline has more work than the others?
    """
    about = [{*finding.evidence[0].ranks} for finding in summary.findings]
    return any(_is_same(row, each) for each in summary.stragglers) or any(
        ranks and ranks <= {*row.ranks} for ranks in about
    )


def _is_same(row: HistoryStraggler, seen: StragglerRow) -> bool:
    if "rotating" in (row.pattern, seen.pattern):
        return row.pattern == seen.pattern
    return not {*row.ranks}.isdisjoint(seen.members)


def _verdict(verdict: Verdict, row: HistoryStraggler) -> Verdict:
    who = "the ranks" if row.pattern == "rotating" else ranks_in_words(row.ranks)
    look = f"Record steps in which it is so, with --trigger 1.5, and see what {who} does {STAGE_WORDS[row.stage]}."
    return replace(
        verdict,
        headline=f"{verdict.headline} Over the whole run {row.in_words()}; the recorded steps do not show it.",
        healthy=False,
        first_action=verdict.first_action if verdict.first_action and not verdict.healthy else look,
    )
