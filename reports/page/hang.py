"""The job that stands still, on the page and in the terminal: who did not join, who waits, where in the code."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any, Final

from perfscope.reports import tables
from perfscope.reports.tables import HtmlTable
from perfscope.results.hang import Hang, HangCallSite
from perfscope.results.summary import Summary
from perfscope.text import rank_list, ranks_in_words

_EVIDENCE: Final = {
    "did not join": "did not issue it, and waits for no other rank",
    "device stands still": "its device, or its watchdog, has not done what is done on other ranks",
    "no dump": "left no dump; all other ranks came",
    "no entries": "left a dump without entries; all other ranks came",
    "issued another operation": "issued something else under the same number",
    "stack": "its stack shows no communication",
}


def values(summary: Summary) -> dict[str, Any]:
    """What the template shows; ``hang`` is None where the job did not hang."""
    hang = summary.hang
    if hang is None:
        return {"hang": None}
    made = (_missing(hang), _sites(hang), _mismatches(hang), _victims(hang))
    return {"hang": {"reading": reading(hang), "tables": [each for each in made if each is not None]}}


def reading(hang: Hang) -> str:
    """What is known of the collective, and who waits."""
    sentences = []
    if hang.collective is not None:
        sizes = " -> ".join(dict.fromkeys(map(_sizes, (hang.input_sizes, hang.output_sizes))))
        what = ", ".join(part for part in (sizes, hang.dtype) if part)
        since = f" since {when(hang.since_us)}" if hang.since_us is not None else ""
        who = ranks_in_words(hang.waiting_ranks or hang.missing_ranks) or "no recorded rank"
        sentences.append(
            f"{who[0].upper()}{who[1:]} wait{'s' * (len(hang.waiting_ranks or hang.missing_ranks) < 2)} there{since}"
        )
        if what:
            sentences[-1] += f" ({what})"
    others = {rank for row in hang.victims for rank in row.ranks}
    if others:
        sentences.append(
            f"{ranks_in_words(others).capitalize()} wait{'s' * (len(others) < 2)} elsewhere in consequence"
        )
    if hang.ranks_without_dump:
        sentences.append(f"No dump of {ranks_in_words(hang.ranks_without_dump)}")
    return "".join(f"{sentence}. " for sentence in sentences).rstrip()


def certainty(hang: Hang) -> str:
    """How sure the answer is, and why."""
    return f"{hang.confidence.capitalize()} confidence: {hang.reason}."


def terminal_lines(hang: Hang) -> Iterator[str]:
    """The same for a terminal, in short: each line may be broken."""
    text = reading(hang)
    if text:
        yield text
    for seen in hang.last_seen[:8]:
        last = f"; last issued: {_named(seen.collective, seen.sequence, seen.group_description, seen.group)}"
        at = f" at {when(seen.at_us)}" if seen.at_us is not None else ""
        yield f"  rank {seen.rank}: {_EVIDENCE[seen.evidence]}{last + at if seen.collective else ''}"
    for site in hang.call_sites[:6]:
        yield f"  {ranks_in_words(site.ranks)} in {_place(site)}{'' if site.missing else ' (waiting)'}"
    if len(hang.call_sites) > 6:
        yield f"  … and {len(hang.call_sites) - 6} more places in the report"


def when(us: float) -> str:
    """A moment in UTC, to the millisecond."""
    moment = datetime.fromtimestamp(us / 1e6, timezone.utc)
    return f"{moment:%Y-%m-%d %H:%M:%S}.{moment.microsecond // 1000:03d} UTC"


def _missing(hang: Hang) -> HtmlTable | None:
    rows = hang.last_seen
    if not rows:
        return None
    columns = [
        tables.ranks("Rank", [row.rank for row in rows]),
        tables.words("Evidence", [_EVIDENCE[row.evidence] for row in rows]),
        tables.words(
            "Last issued", [_named(row.collective, row.sequence, row.group_description, row.group) for row in rows]
        ),
        tables.words("At", [when(row.at_us) if row.at_us is not None else "" for row in rows]),
    ]
    return tables.table("hang-missing", "Missing ranks", columns)


def _sites(hang: Hang) -> HtmlTable | None:
    rows = hang.call_sites
    if not rows:
        return None
    columns = [
        tables.words("Ranks", [rank_list(row.ranks) for row in rows]),
        tables.words("", ["missing" if row.missing else "waiting" for row in rows]),
        tables.words("In", [_place(row) for row in rows]),
        tables.words("Below it", [" ← ".join(row.calls) for row in rows], reason="It is the innermost call."),
        tables.words("From", [row.source for row in rows]),
    ]
    return tables.table("hang-sites", "Call sites", columns, "The user's own code, where there is any in the stack.")


def _mismatches(hang: Hang) -> HtmlTable | None:
    rows = [(found, variant) for found in hang.mismatches for variant in found.variants]
    if not rows:
        return None
    columns = [
        tables.words("Group", [f"{found.group_description} ({found.group})" for found, _ in rows]),
        tables.column("Number", [found.sequence for found, _ in rows], "{:,}".format),
        tables.words("Ranks", [rank_list(variant.ranks) for _, variant in rows]),
        tables.words("Issued", [variant.issued for _, variant in rows]),
        tables.words("", ["odd" if {*variant.ranks} & {*found.odd_ranks} else "" for found, variant in rows]),
    ]
    return tables.table("hang-mismatches", "Collectives that were not issued alike", columns, "The earliest first.")


def _victims(hang: Hang) -> HtmlTable | None:
    rows = hang.victims
    if not rows:
        return None
    columns = [
        tables.words("Ranks", [rank_list(row.ranks) for row in rows]),
        tables.words(
            "Wait at", [_named(row.collective, row.sequence, row.group_description, row.group) for row in rows]
        ),
        tables.words("For ranks", [rank_list(row.waits_for) for row in rows]),
        tables.words("Since", [when(row.since_us) if row.since_us is not None else "" for row in rows]),
    ]
    caption = "They wait for ranks that wait themselves: what they wait for comes when the missing ranks do."
    return tables.table("hang-victims", "Waiting in consequence", columns, caption)


def _named(collective: str | None, sequence: int | None, description: str | None, group: str | None) -> str:
    if collective is None:
        return ""
    number = f" {sequence:,}" if sequence is not None else ""
    return f"{collective}{number} of {f'{description} ({group})' if description else f'group {group}'}"


def _place(site: HangCallSite) -> str:
    return f"{site.function} ({site.file}:{site.line})"


def _sizes(sizes: tuple[tuple[int, ...], ...]) -> str:
    shown = ", ".join(" × ".join(map(str, dims)) or "scalar" for dims in sizes[:3])
    return shown + (f" and {len(sizes) - 3} more" if len(sizes) > 3 else "")
