"""The time breakdown per rank: bars that add up to each rank's step, or a heat map of many ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from perfscope.reports.figures.colours import LIGHT
from perfscope.reports.figures.layout import MARKED, Drawn, bar, bar_height, figure, rank_axis, shortened, trace
from perfscope.reports.figures.numbers import rounded, scaled
from perfscope.results.attribution import attributed_ranks
from perfscope.results.categories import TimeCategory
from perfscope.results.summary import Summary
from perfscope.results.time_breakdown import TimeBreakdown
from perfscope.text import ScaledUnit, unit_for

HEATMAP_ABOVE: Final = 64
"""More ranks than this are drawn as a heat map: bars would be thinner than their gaps."""


def breakdown_figure(summary: Summary) -> Drawn | None:
    """The mean step of each rank by category, as bars or as a heat map; None without ranks."""
    rows: Sequence[TimeBreakdown] = summary.time_breakdown
    if not rows:
        return None
    first = {row.host: row.rank for row in sorted(rows, key=lambda row: -row.rank)}
    rows = sorted(rows, key=lambda row: (first[row.host], row.rank))
    unit = unit_for(max(row.step_time_us for row in rows))
    categories = [each for each in TimeCategory if any(row.categories()[each.id] for row in rows)]
    stragglers = set(attributed_ranks(summary.stragglers)[:MARKED])
    if len(rows) > HEATMAP_ABOVE:
        return _heatmap(sorted(rows, key=lambda row: row.rank), categories, unit, stragglers)
    return _bars(rows, categories, unit, stragglers)


def _bars(
    rows: Sequence[TimeBreakdown], categories: Sequence[TimeCategory], unit: ScaledUnit, stragglers: set[int]
) -> Drawn:
    ranks = [str(row.rank) for row in rows]
    traces = [
        bar(
            category.label,
            LIGHT[category.id],
            line=0.5,
            y=ranks,
            x=scaled((row.categories()[category.id] for row in rows), unit),
            customdata=[[rounded(row.share(category.id)), f"rank {row.rank}{_where(row)}"] for row in rows],
            hovertemplate=f"<b>{category.label}</b><br>%{{customdata[1]}}<br>"
            f"%{{x:.4~g}} {unit.name}, %{{customdata[0]:.1%}} of its step<extra></extra>",
        )
        for category in categories
    ]
    named = rank_axis(ranks)
    return figure(
        "Time breakdown per rank",
        traces,
        height=64 + max(len(ranks), 2) * bar_height(len(ranks)),
        narrow={"yaxis": {"tickprefix": "", "tickmode": "linear"}},
        meta={"orders": _orders(rows, categories)},
        barmode="stack",
        bargap=0.18,
        xaxis={"title": {"text": f"{unit.name} per step"}, "rangemode": "tozero"},
        yaxis={**named, **_names(rows, stragglers), "categoryorder": "array", "categoryarray": ranks},
    )


def _names(rows: Sequence[TimeBreakdown], stragglers: set[int]) -> dict[str, Any]:
    """Ticks of the axis: the hosts before the ranks' numbers, where there are several; stragglers marked."""
    of_several = len({row.host for row in rows}) > 1
    every = 4 if len(rows) > 32 else 1
    marked = [at for at, row in enumerate(rows) if row.rank in stragglers]
    # A marked name takes the room of its neighbours'.
    ticks = [at for at in range(0, len(rows), every) if at in marked or all(abs(at - m) >= every for m in marked)]
    ticks = sorted({*ticks, *marked})
    names = [(f"{shortened(rows[at].host, 18)} · " if of_several else "") + f"rank {rows[at].rank}" for at in ticks]
    texts = [f"<b>▸ {name}</b>" if at in marked else name for at, name in zip(ticks, names, strict=True)]
    return {"tickmode": "array", "tickvals": [str(rows[at].rank) for at in ticks], "ticktext": texts, "tickprefix": ""}


def _orders(rows: Sequence[TimeBreakdown], categories: Sequence[TimeCategory]) -> dict[str, Any]:
    """What the reader can sort by -> what changes in the layout; the order by host and rank is the figure's own."""
    keys = {"step": [row.step_time_us for row in rows]}
    keys |= {each.id: [row.categories()[each.id] for row in rows] for each in categories}
    orders = {}
    for name, values in keys.items():
        order = sorted(range(len(rows)), key=lambda at: (-values[at], rows[at].rank))
        ranks = [str(rows[at].rank) for at in order]
        orders[name] = {"yaxis": {"categoryarray": ranks, "tickmode": "linear", "tickprefix": "rank "}}
    return orders


def _heatmap(
    rows: Sequence[TimeBreakdown], categories: Sequence[TimeCategory], unit: ScaledUnit, stragglers: set[int]
) -> Drawn:
    """Compute has a scale of its own: beside it the shares of the others would look equal."""
    ranks = [row.rank for row in rows]
    labels = [category.label for category in categories]
    largest = max((row.share(each.id) for row in rows for each in categories if each.id != "compute"), default=0.0)
    # Both traces hold all rows, one of them empty where the other is filled: plotly wants every category in each.
    traces, axes = [], {}
    for axis, colour, title, place, scale in (
        ("coloraxis", "compute", "compute", 0.78, {}),
        ("coloraxis2", "exposed_comm_wait", "other categories", 0.22, {"cmin": 0, "cmax": 100 * largest}),
    ):
        mine = [(each.id == "compute") == (axis == "coloraxis") for each in categories]
        if not any(mine):
            continue
        traces.append(
            trace(
                "heatmap",
                x=ranks,
                y=labels,
                z=[
                    [rounded(100 * row.share(each.id)) if is_mine else None for row in rows]
                    for each, is_mine in zip(categories, mine, strict=True)
                ],
                coloraxis=axis,
                hoverongaps=False,
                customdata=[
                    [[rounded(row.categories()[each.id] / unit.size), _where(row)] for row in rows]
                    for each in categories
                ],
                hovertemplate=f"<b>%{{y}}</b><br>rank %{{x}}%{{customdata[1]}}<br>%{{customdata[0]:.4~g}} {unit.name}, "
                "%{z:.1f}% of its step<extra></extra>",
            )
        )
        bar_of_colours = {"thickness": 10, "len": 0.5, "y": place, "yanchor": "middle", "ticksuffix": "%", "nticks": 3}
        axes[axis] = {
            "colorscale": [[0, LIGHT["raised"]], [1, LIGHT[colour]]],
            "colorbar": {"title": {"text": title}, "outlinewidth": 0, **bar_of_colours},
            **scale,
        }
    return figure(
        "Time breakdown per rank",
        traces,
        height=90 + 34 * len(categories),
        narrow={axis: {"showscale": False} for axis in axes},
        annotations=[
            {"x": rank, "y": 1, "yref": "paper", "yanchor": "bottom", "ay": -14, "ax": 0, "text": f"<b>rank {rank}</b>"}
            for rank in sorted(stragglers)
        ],
        margin={"l": 8, "r": 12, "t": 90 if stragglers else 52, "b": 8},
        xaxis={"title": {"text": "rank"}, "showgrid": False},
        yaxis={"autorange": "reversed", "showgrid": False, "fixedrange": True, "ticksuffix": " "},
        **axes,
    )


def _where(row: TimeBreakdown) -> str:
    return f" on {shortened(row.host)}" if row.host else ""
