"""The answer as the verdict's sentences."""

from __future__ import annotations

from perfscope.results.hang import Hang
from perfscope.results.rows import Verdict
from perfscope.text import ranks_in_words

_TAKE_STACKS = "py-spy dump --pid PID > rank<N>.stack, beside the dumps"


def verdict(hang: Hang) -> Verdict:
    """The verdict of a job that stands still."""
    return Verdict(headline=f"The job stands still: {_cause(hang)}.", healthy=False, first_action=_first_action(hang))


def no_hang() -> Verdict:
    """The verdict of dumps that show none, where there is nothing else to judge."""
    return Verdict(
        headline="No hang: the dumps show no rank that others have waited for longer than they usually do.",
        healthy=False,
        unsure=True,
        first_action="Record a few steps to see what limits the job: perfscope run -- COMMAND.",
    )


def _cause(hang: Hang) -> str:
    ranks = ranks_in_words(hang.missing_ranks)
    if not hang.missing_ranks:
        where = f"at {_collective(hang)}; " if hang.collective else ""
        return f"{where}the data does not show which rank is the cause ({hang.reason})"
    if not hang.collective:
        site = next((site for site in hang.call_sites if site.missing and site.source == "stack"), None)
        where = f"in {site.function}" if site is not None and {*hang.missing_ranks} <= {*site.ranks} else "elsewhere"
        are, them = _verb(hang.missing_ranks, "is", "are"), _verb(hang.missing_ranks, "it", "them")
        return f"{ranks} {are} {where}, and the other ranks wait for {them} in communication"
    kinds = {seen.evidence for seen in hang.last_seen}
    did = "issued another operation than" if "issued another operation" in kinds else "did not join"
    waiting = f"; {ranks_in_words(hang.waiting_ranks)} {_verb(hang.waiting_ranks, 'waits', 'wait')} there"
    return f"{ranks} {did} {_collective(hang)}{waiting if hang.waiting_ranks else ''}"


def _collective(hang: Hang) -> str:
    number = f" {hang.sequence:,}" if hang.sequence is not None else ""
    name = f"{hang.group_description} ({hang.group})" if hang.group_description else f"group {hang.group}"
    return f"{hang.collective}{number} of {name}"


def _verb(ranks: tuple[int, ...], one: str, many: str) -> str:
    return one if len(ranks) == 1 else many


def _first_action(hang: Hang) -> str:
    site = next((site for site in hang.call_sites if site.missing), None)
    if site is not None:
        where = f"{site.function} ({site.file}:{site.line})"
        if site.source == "stack":
            return f"Look at what {ranks_in_words(site.ranks)} {_verb(site.ranks, 'does', 'do')} in {where}."
        return f"Look at what {ranks_in_words(site.ranks)} did after {where}, where the last operation was issued."
    if hang.mismatches:
        shown = hang.mismatches[0]
        sides = "; ".join(f"{ranks_in_words(each.ranks)}: {each.issued}" for each in shown.variants[:3])
        group = shown.group_description or shown.group
        return f"Compare what the ranks issue as number {shown.sequence:,} of {group}: {sides}."
    if hang.missing_ranks:
        return (
            f"Look at the logs and the devices of {ranks_in_words(hang.missing_ranks)}; next time take stacks too: "
            f"{_TAKE_STACKS}."
        )
    return f"Take the stacks of all ranks while the job stands still: {_TAKE_STACKS}."
