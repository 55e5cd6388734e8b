"""Allocated memory by phase, over the recorded actions of the allocator, of the device with the highest peak."""

from __future__ import annotations

from typing import Final

from perfscope.reports.figures.colours import LIGHT, SERIES
from perfscope.reports.figures.layout import LEGEND_ABOVE, Drawn, figure, trace
from perfscope.reports.figures.numbers import rounded, scaled
from perfscope.results.memory.snapshots import PHASES_IN_WORDS, AllocationTimeline
from perfscope.results.summary import Summary
from perfscope.text import BYTE_UNITS, unit_for

_HELD_UP_TO: Final = 4
"""Times the most that was allocated; where the allocator holds more, its line would press the areas flat."""


def shown_timeline(summary: Summary) -> AllocationTimeline | None:
    """The device whose allocations are drawn: that with the highest peak; None without a history."""
    curves = summary.snapshots.timelines if summary.snapshots is not None else ()
    return max(curves, key=lambda curve: max(_sums(curve)), default=None)


def allocations_figure(summary: Summary) -> Drawn | None:
    """Memory by phase as areas upon each other, and what the allocator holds; None where no history was recorded."""
    curve = shown_timeline(summary)
    if curve is None:
        return None
    allocated = max(*_sums(curve), 1)
    is_held_shown = max(curve.reserved_bytes) <= _HELD_UP_TO * allocated
    highest = max((allocated, *(curve.reserved_bytes if is_held_shown else ())))
    unit, size = unit_for(curve.time_us[-1]), unit_for(highest, BYTE_UNITS)
    x = scaled(curve.time_us, unit, 6) if curve.is_timed else list(curve.time_us)
    colours = dict(zip(PHASES_IN_WORDS, SERIES, strict=False))
    traces = [
        trace(
            "scatter",
            mode="lines",
            name=phase,
            stackgroup="allocated",
            x=x,
            y=[rounded(value / size.size, 6) for value in curve.allocated_bytes[phase]],
            line={"color": colours[phase], "width": 0.5},
            hovertemplate=f"<b>{phase}</b>: %{{y:.4~g}} {size.name}<extra></extra>",
        )
        for phase in PHASES_IN_WORDS
        if any(curve.allocated_bytes.get(phase, ()))
    ]
    if is_held_shown:
        line = {"color": LIGHT["muted"], "width": 1.5, "dash": "dash", "shape": "hv"}
        held = [rounded(value / size.size, 6) for value in curve.reserved_bytes]
        hover = f"<b>held</b>: %{{y:.4~g}} {size.name}<extra></extra>"
        traces.append(trace("scatter", mode="lines", name="held", x=x, y=held, line=line, hovertemplate=hover))
    title = f"{unit.name} from the first recorded action" if curve.is_timed else "actions of the allocator"
    return figure(
        "Allocated memory by phase",
        traces,
        height=320,
        showlegend=True,
        legend=LEGEND_ABOVE,
        hovermode="x unified",
        xaxis={"title": {"text": title}, "rangemode": "tozero", "showgrid": False},
        yaxis={"title": {"text": size.name}, "rangemode": "tozero"},
    )


def _sums(curve: AllocationTimeline) -> list[int]:
    """Bytes of all phases at each point."""
    return [sum(values) for values in zip(*curve.allocated_bytes.values(), strict=True)] or [0]
