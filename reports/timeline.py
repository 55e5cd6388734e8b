"""The timeline of one step: the lanes of chosen ranks as the page's script draws them, and what they show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final

from perfscope.reports.format import byte_size, duration, share, unit_for
from perfscope.reports.kernel_names import short_name
from perfscope.summary import Summary
from perfscope.summary_tables import Lane

SHOWN_FIRST: Final = 3
"""Ranks that the picture shows until the reader chooses others."""

STAGES_SHOWN_FIRST: Final = 4

LABELS: Final = {
    "compute": "compute",
    "communication": "communication",
    "copy": "copy",
    "host": "host",
    "backward": "host, backward",
    "loader": "data loader",
}
"""Lanes in words, in the order of the picture."""

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
        {"rank": rank, "shown": rank in shown, "lanes": [_lane(lane, unit.size, texts) for lane in lanes]}
        for rank, lanes in groupby(summary.lanes, key=lambda lane: lane.rank)
    ]
    return {"unit": unit.name, "ranks": ranks, "labels": LABELS, "texts": list(texts)}


def first_shown(summary: Summary) -> set[int]:
    """The ranks worth seeing first: those blamed, one of each pipeline stage, who waits most, then the lowest."""
    recorded = sorted({lane.rank for lane in summary.lanes})
    waits = {row.rank: row.exposed_comm_wait_us for row in summary.accounting}
    blamed = [row.rank for row in summary.stragglers]
    by_wait = sorted(recorded, key=lambda rank: -waits.get(rank, 0.0))
    stages = summary.pipeline.stages if summary.pipeline is not None else ()
    of_stages = [row.ranks[0] for row in stages if row.ranks][:STAGES_SHOWN_FIRST]
    wanted = dict.fromkeys(rank for rank in (*blamed[:2], *of_stages, *by_wait[:1], *recorded) if rank in recorded)
    return set(list(wanted)[: max(SHOWN_FIRST, len(of_stages))])


def timeline_reading(summary: Summary) -> str:
    """What the timeline shows here."""
    if not summary.lanes:
        return ""
    step = summary.lanes[0].step
    ranks = {lane.rank for lane in summary.lanes}
    text = f"Here {f'step {step}' if step is not None else 'the whole recording'}"
    if len(ranks) < len(summary.job.ranks):
        text += f", {len(ranks)} of {len(summary.job.ranks):,} ranks to choose from"
    longest = _longest(summary.lanes)
    if longest is not None:
        lane, index = longest
        text += f". The longest collective is {_said(lane, index)}"
    shares = _busy(summary.lanes, "compute")
    if len(shares) > 1:
        most, least = max(shares, key=shares.__getitem__), min(shares, key=shares.__getitem__)
        if shares[most] - shares[least] >= 0.05:
            text += f". Rank {most} computes in {share(shares[most])} of the picture, rank {least} in "
            text += share(shares[least])
    elif shares:
        text += f". The device computes in {share(next(iter(shares.values())))} of the picture"
    if any(lane.kind == "copy" for lane in summary.lanes) and not any(lane.kind == "host" for lane in summary.lanes):
        text += ". The hosts had queued this step's work before it began, so they have no lane"
    return text + "."


def _lane(lane: Lane, size: float, texts: dict[str, int]) -> dict[str, Any]:
    def place(text: int | None, *, kernel: bool = False) -> int | None:
        if text is None:
            return None
        said = short_name(lane.texts[text]) if kernel else lane.texts[text]
        return texts.setdefault(said, len(texts))

    made: dict[str, Any] = {
        "kind": lane.kind,
        "start": [_rounded(start / size) for start in lane.start_us],
        "duration": [_rounded(length / size) for length in lane.duration_us],
        "name": [place(name, kernel=lane.kind == "compute") for name in lane.name],
    }
    if any(operator is not None for operator in lane.operator):
        made["operator"] = [place(operator) for operator in lane.operator]
    if any(pieces > 1 for pieces in lane.pieces):
        made["pieces"] = list(lane.pieces)
        made["busy"] = [
            _rounded(busy / length, 2) if length > 0 else 1.0
            for busy, length in zip(lane.busy_us, lane.duration_us, strict=True)
        ]
    if lane.kind == "communication":
        made["group"] = [place(group) for group in lane.group]
        made["bytes"] = [byte_size(size) if size is not None else None for size in lane.bytes]
        made["wait"] = [_rounded(wait / size) if wait is not None else None for wait in lane.wait_us]
    return made


def _longest(lanes: Sequence[Lane]) -> tuple[Lane, int] | None:
    found = [lane for lane in lanes if lane.kind == "communication"]
    entries = [(lane, index) for lane in found for index in range(len(lane.start_us))]
    return max(entries, key=lambda entry: entry[0].duration_us[entry[1]], default=None)


def _said(lane: Lane, index: int) -> str:
    name = lane.name[index]
    kind = (lane.texts[name] if name is not None else "a collective").replace("_", "-")
    size = lane.bytes[index]
    wait = lane.wait_us[index]
    length = lane.duration_us[index]
    text = f"{kind}{f' of {byte_size(size)}' if size is not None else ''} on rank {lane.rank} with {duration(length)}"
    if wait is None:
        return text
    return f"{text}: {duration(wait)} of waiting, {duration(max(length - wait, 0.0))} of transfer"


def _busy(lanes: Sequence[Lane], kind: str) -> dict[int, float]:
    """Rank -> share of the picture's time that its lane fills (concurrent kernels count each, at most all of it)."""
    end = max(lane.start_us[-1] + lane.duration_us[-1] for lane in lanes)
    return {lane.rank: min(math.fsum(lane.busy_us) / end, 1.0) for lane in lanes if lane.kind == kind and end > 0}


def _rounded(value: float, digits: int = _DIGITS) -> float:
    return float(f"{value:.{digits}g}")
