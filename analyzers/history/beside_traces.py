"""What the step history of a run adds to the verdict on its recorded steps: both are of one job, and make one verdict.

A capture holds some steps, the history all of them. A rank that delays the run now and then, or from some step on, need
not do so in the few that were captured.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from perfscope.results.history import STAGE_WORDS, History, HistoryStraggler
from perfscope.results.rows import StragglerRow, Verdict
from perfscope.results.summary import Summary
from perfscope.text import ranks_in_words

NOTICEABLE: Final = 0.05
"""Share of the run from which what a straggler costs is in the verdict, as of the rule about stragglers in traces."""


def with_history(summary: Summary, history: History) -> Summary:
    """The summary of traces with the history of the whole run."""
    summary = replace(summary, history=history)
    unseen = [row for row in history.stragglers if row.cost_share >= NOTICEABLE and not _is_seen(row, summary)]
    return replace(summary, verdict=_verdict(summary.verdict, unseen[0])) if unseen else summary


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
