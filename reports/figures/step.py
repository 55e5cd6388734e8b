"""One step of all ranks by category, and the critical path through it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from perfscope.reports.figures.colours import LIGHT
from perfscope.reports.figures.layout import LEGEND_ABOVE, MARKED, Drawn, bar, figure, rank_axis
from perfscope.reports.figures.numbers import rounded, scaled
from perfscope.results.attribution import attributed_ranks
from perfscope.results.categories import BY_ID, TimeCategory
from perfscope.results.rows import StepTimeline
from perfscope.results.summary import Summary
from perfscope.text import duration, unit_for

STRIPS_SHOWN: Final = 32
"""More ranks do not fit the chart of one step: the stragglers and an even selection of the others are shown."""

STRETCHES_SHOWN: Final = 6000
"""Stretches in one chart that a browser still draws at once."""

PATH_RANKS_SHOWN: Final = 8
"""Ranks in the chart of the critical path, those with most of it; the others are one row."""


def shown_strips(summary: Summary) -> tuple[StepTimeline, ...]:
    """The strips of one step in the chart, by rank: all, or the stragglers and an even selection of the others."""
    if not summary.step_timeline:
        return ()
    step = summary.step_timeline[0].step
    strips = sorted(
        (strip for strip in summary.step_timeline if strip.step == step and strip.start_us),
        key=lambda strip: strip.rank,
    )
    if len(strips) <= STRIPS_SHOWN:
        return tuple(strips)
    shown = {strip.rank for strip in strips}
    first = [rank for rank in attributed_ranks(summary.stragglers) if rank in shown]
    stragglers = set(first[: STRIPS_SHOWN // 4])
    even = {
        strips[index * (len(strips) - 1) // (STRIPS_SHOWN - len(stragglers) - 1)].rank
        for index in range(STRIPS_SHOWN - len(stragglers))
    }
    return tuple(strip for strip in strips if strip.rank in stragglers | even)


def step_figure(summary: Summary) -> Drawn | None:
    """One step of all ranks, on aligned clocks, by category; None where no step was kept whole."""
    strips = shown_strips(summary)
    if not strips:
        return None
    span = max(strip.start_us[-1] + strip.duration_us[-1] for strip in strips)
    unit = unit_for(span)
    crowded = sum(len(strip.start_us) for strip in strips) > STRETCHES_SHOWN
    shortest = span * len(strips) / STRETCHES_SHOWN
    pieces = [
        (strip.rank, *piece) for strip in strips for piece in (_coarse(strip, shortest) if crowded else _known(strip))
    ]
    traces = []
    for category in TimeCategory:
        mine = [(rank, start, length) for rank, name, start, length in pieces if name == category.id]
        if mine:
            traces.append(
                bar(
                    category.label,
                    LIGHT[category.id],
                    y=[str(rank) for rank, _, _ in mine],
                    x=scaled((length for _, _, length in mine), unit, 6),
                    base=scaled((start for _, start, _ in mine), unit, 6),
                    customdata=[f"{duration(length)} from {duration(start)}" for _, start, length in mine],
                    hovertemplate=f"<b>{category.label}</b><br>%{{y}}<br>%{{customdata}}<extra></extra>",
                )
            )
    ranks = [str(strip.rank) for strip in strips]
    late = set(attributed_ranks(summary.stragglers)[:MARKED])
    names = [f"<b>▸ rank {strip.rank}</b>" if strip.rank in late else f"rank {strip.rank}" for strip in strips]
    return figure(
        "One step of all ranks",
        traces,
        height=90 + max(len(ranks), 2) * (20 if len(ranks) > 8 else 34),
        barmode="overlay",
        bargap=0.25,
        showlegend=True,
        legend=LEGEND_ABOVE,
        xaxis={"title": {"text": f"{unit.name} from the step's start"}, "rangemode": "tozero"},
        yaxis={
            **rank_axis(ranks), "categoryorder": "array", "categoryarray": ranks, "tickmode": "array",
            "tickvals": ranks, "ticktext": names, "tickprefix": "",
        },
    )  # fmt: skip


def path_by_rank(summary: Summary) -> dict[int, dict[str, float]]:
    """Rank -> category -> µs on the critical path."""
    total: dict[int, dict[str, float]] = {}
    for row in summary.critical_path or ():
        parts = total.setdefault(row.rank, {})
        parts[row.category] = parts.get(row.category, 0.0) + row.us
    return total


def path_figure(summary: Summary) -> Drawn | None:
    """Time of each rank's parts on the critical path; None where the path is not known."""
    total = path_by_rank(summary)
    if not total:
        return None
    length = math.fsum(us for parts in total.values() for us in parts.values())
    unit = unit_for(length)
    ordered = sorted(total, key=lambda rank: -math.fsum(total[rank].values()))
    rows = {f"rank {rank}": total[rank] for rank in ordered[:PATH_RANKS_SHOWN]}
    if rest := ordered[PATH_RANKS_SHOWN:]:
        names = {name for rank in rest for name in total[rank]}
        rows[f"{len(rest):,} others"] = {name: math.fsum(total[rank].get(name, 0.0) for rank in rest) for name in names}
    traces = []
    for name, category in BY_ID.items():
        lengths = [parts.get(name, 0.0) for parts in rows.values()]
        if any(lengths):
            traces.append(
                bar(
                    category.label,
                    LIGHT[name],
                    line=0.5,
                    y=list(rows),
                    x=scaled(lengths, unit),
                    customdata=[rounded(us / length) if length > 0 else None for us in lengths],
                    hovertemplate=f"<b>{category.label}</b><br>%{{y}}<br>%{{x:.4~g}} {unit.name}, "
                    "%{customdata:.1%} of the critical path<extra></extra>",
                )
            )
    return figure(
        "Critical path by rank",
        traces,
        height=90 + max(len(rows), 2) * 26,
        barmode="stack",
        bargap=0.2,
        showlegend=True,
        legend=LEGEND_ABOVE,
        xaxis={"title": {"text": f"{unit.name} of the critical path"}, "rangemode": "tozero"},
        yaxis={
            "type": "category", "autorange": "reversed", "showgrid": False, "fixedrange": True, "ticksuffix": " ",
        },
    )  # fmt: skip


def _known(strip: StepTimeline) -> list[tuple[str, float, float]]:
    """(category, start, duration) of a strip, those of a category that this version does not know left out."""
    pieces = zip(strip.categories, strip.start_us, strip.duration_us, strict=True)
    return [(name, start, length) for name, start, length in pieces if name in BY_ID]


def _coarse(strip: StepTimeline, bin_us: float) -> Sequence[tuple[str, float, float]]:
    """A strip in bins of ``bin_us``, each shown as the category that takes most of it; equal neighbours are joined."""
    bins: dict[int, dict[str, float]] = {}
    for name, start, length in _known(strip):
        first, last = int(start // bin_us), int((start + length) // bin_us)
        for number in range(first, last + 1):
            covered = min(start + length, (number + 1) * bin_us) - max(start, number * bin_us)
            if covered > 0:
                taken = bins.setdefault(number, {})
                taken[name] = taken.get(name, 0.0) + covered
    joined: list[tuple[str, float, float]] = []
    for number in sorted(bins):
        name = max(bins[number], key=bins[number].__getitem__)
        if joined and joined[-1][0] == name and math.isclose(joined[-1][1] + joined[-1][2], number * bin_us):
            joined[-1] = (name, joined[-1][1], (number + 1) * bin_us - joined[-1][1])
        else:
            joined.append((name, number * bin_us, bin_us))
    return joined
