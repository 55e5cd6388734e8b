"""What the timeline of one step shows, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Final

from perfscope.reports.figures.timeline import first_shown
from perfscope.reports.page import advice
from perfscope.results.summary import Summary
from perfscope.results.tables import Lane
from perfscope.text import byte_size, duration, percent

_USUAL: Final = 0.05
"""A step this close to the median is a usual one."""


def timeline_reading(summary: Summary) -> str:
    """What the timeline shows."""
    if not summary.lanes:
        return ""
    ranks = {lane.rank for lane in summary.lanes}
    text = shown_step(summary, summary.lanes[0].step)
    if len(ranks) < len(summary.job.ranks):
        text += f"; lanes of {len(ranks)} of {len(summary.job.ranks):,} ranks"
    longest = _longest(summary.lanes)
    if longest is not None:
        lane, index = longest
        text += f". Longest collective: {_collective(lane, index)}"
    shares = _computing(summary) if "CPU" in summary.job.devices else _busy(summary.lanes, "compute")
    if len(shares) > 1:
        most, least = max(shares, key=shares.__getitem__), min(shares, key=shares.__getitem__)
        if shares[most] - shares[least] >= 0.05:
            text += f". Compute fills {percent(shares[most])} of the time on rank {most}, "
            text += f"{percent(shares[least])} on rank {least}"
    elif shares:
        text += f". Compute fills {percent(next(iter(shares.values())))} of the time"
    if any(lane.kind == "copy" for lane in summary.lanes) and not any(lane.kind == "host" for lane in summary.lanes):
        seen = bool(summary.launches or summary.operators)
        why = "the hosts had launched this step's work before it began" if seen else "no host events are recorded"
        text += f". No host lanes: {why}"
    return text + "."


def shown_step(summary: Summary, step: int | None) -> str:
    """Which step a chart shows; with its time where that is not the usual one."""
    if step is None:
        return "The whole recording"
    job = summary.job
    took = dict(zip(job.steps, job.step_time_us_per_step, strict=False)).get(step)
    usual = median(job.step_time_us_per_step) if took is not None else 0.0
    if took is None or abs(took - usual) <= _USUAL * usual:
        return f"Step {step}"
    return f"Step {step}, which took {duration(took)} (the median is {duration(usual)})"


def merge_command(summary: Summary) -> str:
    """``perfscope merge`` that shows the ranks and the step of the timeline, as one would type it."""
    ranks = ",".join(map(str, sorted(first_shown(summary))))
    step = summary.lanes[0].step if summary.lanes else None
    steps = f" --steps {step}" if step is not None else ""
    return f"perfscope merge {advice.recording(summary)} --ranks {ranks}{steps}"


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


def _computing(summary: Summary) -> dict[int, float]:
    """Rank -> share of the step that is compute: on CPUs an operator's time in its lane may hold a wait."""
    shown = {lane.rank for lane in summary.lanes}
    return {
        row.rank: math.fsum(
            us for us, category in zip(row.duration_us, row.categories, strict=True) if category == "compute"
        )
        / math.fsum(row.duration_us)
        for row in summary.step_timeline
        if row.rank in shown and math.fsum(row.duration_us) > 0
    }
