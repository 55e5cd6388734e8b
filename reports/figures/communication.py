"""Communication across ranks: how much of it compute overlaps, who arrives last, how fast it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from perfscope.frozen import dataclass
from perfscope.reports.figures.colours import LIGHT, SERIES
from perfscope.reports.figures.layout import LEGEND_ABOVE, Drawn, figure, shortened, trace
from perfscope.reports.figures.numbers import rounded, scaled
from perfscope.results.rows import CollectiveRow, CostRow
from perfscope.results.summary import Summary
from perfscope.results.time_breakdown import TimeBreakdown
from perfscope.text import byte_size, known, unit_for

GROUPS_SHOWN: Final = 4
"""Groups in the chart of last arrivals, those that communicate most; the others are added up."""

_OTHERS: Final = "other groups"

_FEW: Final = 64
"""Up to so many ranks are bars; of more, areas or the few that stand out."""


def overlap_figure(summary: Summary) -> Drawn | None:
    """Each rank's communication per step: overlapped by compute, waiting, transfer; None without communication."""
    rows = [row for row in summary.time_breakdown if row.comm_us > 0]
    if not rows:
        return None
    unit = unit_for(max(row.comm_us for row in rows))
    ranks = [row.rank for row in rows]
    traces = []
    for name, colour, values in (
        ("overlapped by compute", SERIES[3], [row.hidden_comm_us for row in rows]),
        ("waiting for late ranks", LIGHT["exposed_comm_wait"], [row.exposed_comm_wait_us for row in rows]),
        ("exposed transfer", LIGHT["exposed_comm_transfer"], [row.exposed_comm_transfer_us for row in rows]),
    ):
        common: dict[str, Any] = {
            "name": name,
            "x": ranks,
            "y": scaled(values, unit),
            "customdata": [rounded(us / _communication(row)) for us, row in zip(values, rows, strict=True)],
            "hovertemplate": f"<b>{name}</b><br>rank %{{x}}<br>%{{y:.4~g}} {unit.name}, %{{customdata:.1%}} of its "
            "communication<extra></extra>",
        }
        if len(ranks) <= _FEW:
            traces.append(trace("bar", marker={"color": colour, "line": {"width": 0}}, **common))
        else:
            line = {"width": 0, "shape": "hvh", "color": colour}
            traces.append(trace("scatter", mode="lines", stackgroup="all", fillcolor=colour, line=line, **common))
    return _by_rank("Communication per rank", ranks, traces, {"title": {"text": f"{unit.name} per step"}})


def _communication(row: TimeBreakdown) -> float:
    return row.hidden_comm_us + row.exposed_comm_wait_us + row.exposed_comm_transfer_us or 1.0


@dataclass(frozen=True)
class LastArrivals:
    """Share of all matched collectives to which each rank came last, by group."""

    ranks: tuple[int, ...]
    shares: dict[str, tuple[float, ...]]
    """Group -> the share of each rank; all of them add up to 1."""
    counted: int
    """Collectives that these are shares of."""


def last_arrivals(summary: Summary) -> LastArrivals | None:
    """Who arrived last; None with fewer than two ranks to compare."""
    counted = _counted(summary)
    ranks = tuple(sorted({rank for group in counted.values() for rank in group} | _members(summary)))
    total = math.fsum(value for group in counted.values() for value in group.values())
    if len(ranks) < 2 or not total:
        return None
    names = sorted(counted, key=lambda name: -math.fsum(counted[name].values()))
    series = {name: [name] for name in names[:GROUPS_SHOWN]}
    if names[GROUPS_SHOWN:]:
        series[_OTHERS] = names[GROUPS_SHOWN:]
    shares = {
        name: tuple(math.fsum(counted[each].get(rank, 0.0) for each in members) / total for rank in ranks)
        for name, members in series.items()
    }
    return LastArrivals(ranks, shares, round(total))


def arrivals_figure(summary: Summary) -> Drawn | None:
    """How often each rank arrived last, by group."""
    made = last_arrivals(summary)
    if made is None:
        return None
    few = len(made.ranks) <= _FEW
    # Seen even where a rank is narrower than a pixel.
    width = None if few else max(0.8, (made.ranks[-1] - made.ranks[0]) / 400)
    traces = []
    for colour, (name, shares) in zip(SERIES, made.shares.items(), strict=False):
        shown = [(rank, share) for rank, share in zip(made.ranks, shares, strict=True) if few or share > 0]
        traces.append(
            trace(
                "bar",
                name=shortened(name, 40),
                x=[rank for rank, _ in shown],
                y=[rounded(share) for _, share in shown],
                width=width,
                marker={"color": colour, "line": {"width": 0}},
                hovertemplate=f"<b>{shortened(name, 40)}</b><br>rank %{{x}} comes last to %{{y:.1%}} of all "
                "collectives<extra></extra>",
            )
        )
    vertical = {"title": {"text": "arrived last in"}, "tickformat": ".1~%"}
    return _by_rank("Last arrivals per rank", made.ranks, traces, vertical)


def _by_rank(title: str, ranks: Sequence[int], traces: Sequence[Any], yaxis: dict[str, Any]) -> Drawn:
    few = len(ranks) <= _FEW
    place = {"type": "category"} if few else {"range": [ranks[0] - 1, ranks[-1] + 1]}
    common = {"title": {"text": "rank"}, "showgrid": False, "nticks": 24, "tickangle": 0, "tickformat": "d"}
    return figure(
        title,
        traces,
        height=270,
        narrow={"xaxis": {"nticks": 6}},
        barmode="stack",
        bargap=0.25,
        showlegend=True,
        legend=LEGEND_ABOVE,
        xaxis={**common, **place},
        yaxis={"rangemode": "tozero", **yaxis},
    )


def _counted(summary: Summary) -> dict[str, dict[int, float]]:
    """Group -> rank -> collectives to which it came last; of many groups, those of one role are taken together."""
    roles: dict[str | None, str] = {}
    if len({row.group for row in summary.collectives}) > GROUPS_SHOWN:
        roles = {row.name: f"{row.role} groups" for row in summary.groups if row.role != "unknown"}
    counted: dict[str, dict[int, float]] = {}
    for row in summary.collectives:
        group = counted.setdefault(roles.get(row.group, row.group or "unnamed"), {})
        for rank, part in row.last_arriver.items():
            group[rank] = group.get(rank, 0.0) + part * row.count
    return counted


def _members(summary: Summary) -> set[int]:
    present = set(summary.job.ranks)
    return {rank for row in summary.collectives if row.last_arriver for rank in row.ranks} & present


def bandwidth_figure(summary: Summary) -> Drawn | None:
    """Bus bandwidth against size by group and kind, with the fitted curve; None below two sizes: no curve to see."""
    rated = [row for row in summary.collectives if row.bytes and known(row.busbw_gbps) and row.algbw_gbps]
    sizes = sorted({row.bytes or 1 for row in rated})
    if len(sizes) < 2:
        return None
    fits = {(model.group, model.kind): model for model in summary.cost_model}
    traces = []
    for at, key in enumerate(sorted({(row.group or "", row.kind) for row in rated})):
        mine = sorted((row for row in rated if (row.group or "", row.kind) == key), key=lambda row: row.bytes or 0)
        kind = key[1].replace("_", "-")
        name = shortened(f"{kind}, group {key[0]}" if key[0] else kind)
        colour = SERIES[at % len(SERIES)]
        traces.append(
            trace(
                "scatter",
                mode="markers",
                name=name,
                x=[row.bytes for row in mine],
                y=[rounded(row.busbw_gbps) for row in mine],
                text=[byte_size(row.bytes) for row in mine],
                marker={"color": colour, "size": 9, "symbol": at % 8},
                hovertemplate=f"<b>{name}</b><br>%{{text}}: %{{y:.3~g}} GB/s<extra></extra>",
            )
        )
        if key in fits and mine[0].bytes != mine[-1].bytes:
            traces += _fit(fits[key], mine, name, colour)
    ticks = _ticks(sizes, 10)
    return figure(
        "Bus bandwidth against size",
        traces,
        height=300,
        narrow={"xaxis": _ticks(sizes, 4)},
        showlegend=True,
        legend=LEGEND_ABOVE,
        xaxis={"type": "log", "title": {"text": "size"}, **ticks},
        yaxis={"title": {"text": "bus bandwidth, GB/s"}, "rangemode": "tozero"},
    )


def _fit(model: CostRow, rows: Sequence[CollectiveRow], name: str, colour: str) -> list[Drawn]:
    """The bandwidth that the cost model gives between the smallest and the largest size, and its limit."""
    factor = (rows[0].busbw_gbps or 0.0) / (rows[0].algbw_gbps or 1.0)
    low, high = rows[0].bytes or 1, rows[-1].bytes or 1
    if not known(model.busbw_gbps) or not model.busbw_gbps or not factor:
        return []
    sizes = [low * (high / low) ** (index / 40) for index in range(41)]
    # 1 GB/s moves 1000 bytes a µs.
    times = [model.alpha_us + size * factor / (model.busbw_gbps * 1e3) for size in sizes]
    rates = [rounded(size * factor / time / 1e3) if time > 0 else None for size, time in zip(sizes, times, strict=True)]
    fit = f"<b>{name}</b><br>limit of its links, by the fit: %{{y:.3~g}} GB/s<extra></extra>"
    return [
        trace("scatter",
            mode="lines", x=[rounded(size) for size in sizes], y=rates, line={"color": colour, "width": 1.5},
            hoverinfo="skip", showlegend=False,
        ),
        trace("scatter",
            mode="lines", x=[low, high], y=[rounded(model.busbw_gbps)] * 2, hovertemplate=fit, showlegend=False,
            line={"color": colour, "width": 1, "dash": "dot"},
        ),
    ]  # fmt: skip


def _ticks(sizes: Sequence[int], most: int) -> dict[str, Any]:
    """Ticks at powers of two, or at the sizes themselves where few powers lie between them."""
    low, high = math.floor(math.log2(sizes[0])), math.ceil(math.log2(sizes[-1]))
    ticks = [2**power for power in range(low, high + 1, max(1, math.ceil((high - low) / most)))]
    if len(ticks) < 4:
        ticks = list(sizes[:6])
    return {"tickvals": ticks, "ticktext": [byte_size(size) for size in ticks]}
