"""Memory over the recorded steps: the fullest ranks' curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from perfscope.reports.figures.colours import LIGHT, SERIES
from perfscope.reports.figures.layout import LEGEND_ABOVE, Drawn, figure, trace
from perfscope.reports.figures.numbers import rounded, scaled
from perfscope.results.summary import Summary
from perfscope.results.tables import MemoryTimeline
from perfscope.text import BYTE_UNITS, ScaledUnit, unit_for

SHOWN: Final = 4
"""Curves in one chart; more cannot be told apart."""

_CAPACITY_FROM: Final = 0.3
"""Share of the device's capacity from which the chart reaches up to it; below, the curves would lie flat."""


def shown_curves(summary: Summary) -> tuple[MemoryTimeline, ...]:
    """The curve of each rank's fullest memory; of many ranks the fullest, the emptiest and an even selection."""
    fullest: dict[int, MemoryTimeline] = {}
    for strip in summary.memory_timeline:
        if peak(strip) > (peak(fullest[strip.rank]) if strip.rank in fullest else 0):
            fullest[strip.rank] = strip
    ordered = sorted(fullest.values(), key=lambda strip: (-peak(strip), strip.rank))
    if len(ordered) > SHOWN:
        ordered = [ordered[number * (len(ordered) - 1) // (SHOWN - 1)] for number in range(SHOWN)]
    return tuple(sorted(ordered, key=lambda strip: strip.rank))


def peak(strip: MemoryTimeline) -> int:
    """The most bytes that a curve reaches; 0 where nothing is known."""
    return max((value for value in (*strip.allocated_bytes, *strip.reserved_bytes) if value is not None), default=0)


def memory_figure(summary: Summary) -> Drawn | None:
    """Memory of the tensors and what the allocator holds, over time; None where none was recorded."""
    strips = shown_curves(summary)
    if not strips:
        return None
    begin, end = min(strip.time_us[0] for strip in strips), max(strip.time_us[-1] for strip in strips)
    highest = max(map(peak, strips))
    capacity = _capacity(summary, strips)
    if capacity is not None and highest < _CAPACITY_FROM * capacity:
        capacity = None
    unit, size = unit_for(end), unit_for(capacity or highest, BYTE_UNITS)
    traces = [
        trace for strip, colour in zip(strips, SERIES, strict=False) for trace in _curves(strip, colour, unit, size)
    ]
    if capacity is not None:
        line = {"color": LIGHT["muted"], "width": 1, "dash": "dot"}
        x, y = scaled((begin, end), unit, 6), [capacity / size.size] * 2
        traces.append(trace("scatter", mode="lines", name="capacity", x=x, y=y, line=line, hoverinfo="skip"))
    return figure(
        "Memory over the recorded steps",
        traces,
        height=280,
        showlegend=len(strips) > 1 or capacity is not None,
        legend=LEGEND_ABOVE,
        xaxis={"title": {"text": f"{unit.name} from the first step's start"}, "rangemode": "tozero", "showgrid": False},
        yaxis={"title": {"text": size.name}, "rangemode": "tozero"},
    )


def _curves(strip: MemoryTimeline, colour: str, unit: ScaledUnit, size: ScaledUnit) -> list[Drawn]:
    """Tensors solid, what is reserved dashed; each where it is known."""
    name = f"rank {strip.rank}, host" if strip.device < 0 else f"rank {strip.rank}"
    made: list[Drawn] = []
    for values, what, dash in ((strip.allocated_bytes, "tensors", "solid"), (strip.reserved_bytes, "held", "dash")):
        if all(value is None for value in values):
            continue
        made.append(
            trace(
                "scatter",
                mode="lines",
                name=name,
                legendgroup=name,
                showlegend=not made,
                x=scaled(strip.time_us, unit, 6),
                y=[rounded(value / size.size, 6) if value is not None else None for value in values],
                # What is held stays so until the next allocation.
                line={"color": colour, "width": 1.5, "dash": dash, "shape": "hv"},
                hovertemplate=f"<b>{name}</b>, {what}<br>%{{y:.4~g}} {size.name} at %{{x:.4~g}} {unit.name}"
                "<extra></extra>",
            )
        )
    return made


def _capacity(summary: Summary, strips: Sequence[MemoryTimeline]) -> int | None:
    """Capacity of the shown ranks' devices, where it is one number."""
    ranks = {strip.rank for strip in strips}
    capacities = {row.capacity_bytes for row in summary.memory if row.rank in ranks and row.kind == "device"}
    return capacities.pop() if len(capacities) == 1 else None
