"""The timeline of one step: the lanes of selected ranks as the page's script draws them, and what they show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final

from perfscope.reports.kernel_names import short_name
from perfscope.reports.page.numbers import rounded, scaled
from perfscope.results.attribution import attributed_ranks
from perfscope.results.summary import Summary
from perfscope.results.tables import Lane
from perfscope.text import ScaledUnit, byte_size, duration, percent, unit_for

SHOWN_FIRST: Final = 3
"""Ranks in the chart until the reader selects others."""

STAGES_SHOWN_FIRST: Final = 4

LABELS: Final = {
    "compute": "compute",
    "communication": "communication",
    "copy": "copy",
    "host": "host",
    "backward": "host backward",
    "loader": "dataloader",
}
"""Lanes in words, in the order of the chart."""

_DIGITS: Final = 6
"""Significant digits of a time: enough to zoom in on a thousandth of the step."""


def timeline_chart(summary: Summary) -> dict[str, Any] | None:
    """Ranks with their lanes; texts of all of them once. None where no lane was recorded."""
    if not summary.lanes:
        return None
    end = max(lane.start_us[-1] + lane.duration_us[-1] for lane in summary.lanes)
    unit = unit_for(end)
    texts: dict[str, int] = {}
    shown = first_shown(summary)
    ranks = [
        {"rank": rank, "shown": rank in shown, "lanes": [_lane(lane, unit, texts) for lane in lanes]}
        for rank, lanes in groupby(summary.lanes, key=lambda lane: lane.rank)
    ]
    return {"unit": unit.name, "ranks": ranks, "labels": LABELS, "texts": list(texts)}


def first_shown(summary: Summary) -> set[int]:
    """The ranks worth seeing first: stragglers, one of each stage, the one that waits most, then the lowest."""
    recorded = sorted({lane.rank for lane in summary.lanes})
    waits = {row.rank: row.exposed_comm_wait_us for row in summary.time_breakdown}
    stragglers = attributed_ranks(summary.stragglers)
    by_wait = sorted(recorded, key=lambda rank: -waits.get(rank, 0.0))
    stages = summary.pipeline.stages if summary.pipeline is not None else ()
    of_stages = [row.ranks[0] for row in stages if row.ranks][:STAGES_SHOWN_FIRST]
    wanted = dict.fromkeys(rank for rank in (*stragglers[:2], *of_stages, *by_wait[:1], *recorded) if rank in recorded)
    return set(list(wanted)[: max(SHOWN_FIRST, len(of_stages))])


def timeline_reading(summary: Summary) -> str:
    """What the timeline shows."""
    if not summary.lanes:
        return ""
    step = summary.lanes[0].step
    ranks = {lane.rank for lane in summary.lanes}
    text = f"Step {step}" if step is not None else "The whole recording"
    if len(ranks) < len(summary.job.ranks):
        text += f"; lanes of {len(ranks)} of {len(summary.job.ranks):,} ranks"
    longest = _longest(summary.lanes)
    if longest is not None:
        lane, index = longest
        text += f". Longest collective: {_collective(lane, index)}"
    shares = _busy(summary.lanes, "compute")
    if len(shares) > 1:
        most, least = max(shares, key=shares.__getitem__), min(shares, key=shares.__getitem__)
        if shares[most] - shares[least] >= 0.05:
            text += f". Compute fills {percent(shares[most])} of the time on rank {most}, "
            text += f"{percent(shares[least])} on rank {least}"
    elif shares:
        text += f". Compute fills {percent(next(iter(shares.values())))} of the time"
    if any(lane.kind == "copy" for lane in summary.lanes) and not any(lane.kind == "host" for lane in summary.lanes):
        text += ". No host lanes: the hosts had launched this step's work before it began"
    return text + "."


def _lane(lane: Lane, unit: ScaledUnit, texts: dict[str, int]) -> dict[str, Any]:
    def place(text: int | None, *, kernel: bool = False) -> int | None:
        if text is None:
            return None
        name = short_name(lane.texts[text]) if kernel else lane.texts[text]
        return texts.setdefault(name, len(texts))

    made: dict[str, Any] = {
        "kind": lane.kind,
        "start": scaled(lane.start_us, unit, _DIGITS),
        "duration": scaled(lane.duration_us, unit, _DIGITS),
        "name": [place(name, kernel=lane.kind == "compute") for name in lane.name],
    }
    if any(operator is not None for operator in lane.operator):
        made["operator"] = [place(operator) for operator in lane.operator]
    if any(events > 1 for events in lane.events):
        made["pieces"] = list(lane.events)
        made["busy"] = [
            rounded(busy / length, 2) if length > 0 else 1.0
            for busy, length in zip(lane.busy_us, lane.duration_us, strict=True)
        ]
    if lane.kind == "communication":
        made["group"] = [place(group) for group in lane.group]
        made["bytes"] = [byte_size(size) if size is not None else None for size in lane.bytes]
        made["wait"] = [rounded(wait / unit.size, _DIGITS) if wait is not None else None for wait in lane.wait_us]
    return made


def _longest(lanes: Sequence[Lane]) -> tuple[Lane, int] | None:
    collectives = [lane for lane in lanes if lane.kind == "communication"]
    entries = [(lane, index) for lane in collectives for index in range(len(lane.start_us))]
    return max(entries, key=lambda entry: entry[0].duration_us[entry[1]], default=None)


def _collective(lane: Lane, index: int) -> str:
    name = lane.name[index]
    kind = (lane.texts[name] if name is not None else "a collective").replace("_", "-")
    size = lane.bytes[index]
    wait = lane.wait_us[index]
    length = lane.duration_us[index]
    text = f"{kind}{f' of {byte_size(size)}' if size is not None else ''} on rank {lane.rank}, {duration(length)}"
    if wait is None:
        return text
    return f"{text} ({duration(wait)} waiting, {duration(max(length - wait, 0.0))} transfer)"


def _busy(lanes: Sequence[Lane], kind: str) -> dict[int, float]:
    """Rank -> share of the timeline that its lane fills (concurrent kernels count each, at most all of it)."""
    end = max(lane.start_us[-1] + lane.duration_us[-1] for lane in lanes)
    return {lane.rank: min(math.fsum(lane.busy_us) / end, 1.0) for lane in lanes if lane.kind == kind and end > 0}
