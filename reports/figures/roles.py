"""Roles side by side on the common clock: a bar for each, busy, waiting for another, or idle."""

from __future__ import annotations

from typing import Final

from perfscope.reports.figures.colours import LIGHT
from perfscope.reports.figures.layout import LEGEND_ABOVE, Drawn, bar, figure, shortened
from perfscope.reports.figures.numbers import scaled
from perfscope.results.roles.side_by_side import Roles, RoleTurn
from perfscope.results.summary import Summary
from perfscope.text import duration, unit_for

_KINDS: Final = {
    "busy": ("Busy", "compute"),
    "waits": ("Idle while another role is busy", "exposed_comm_wait"),
    "idle": ("Idle, and no other role is busy", "idle_unknown"),
    "unrecorded": ("Not recorded", "line"),
}


def roles_figure(summary: Summary) -> Drawn | None:
    """A bar for each role; None where the recording has one."""
    roles = summary.roles
    if roles is None or not roles.turns:
        return None
    unit = unit_for(roles.window_us)
    labels = [shortened(row.role, 40) for row in roles.rows]
    traces = []
    for doing, (label, colour) in _KINDS.items():
        mine = [turn for turn in roles.turns if turn.doing == doing]
        if mine:
            traces.append(
                bar(
                    label,
                    LIGHT[colour],
                    y=[shortened(turn.role, 40) for turn in mine],
                    x=scaled((turn.end_us - turn.start_us for turn in mine), unit, 6),
                    base=scaled((turn.start_us for turn in mine), unit, 6),
                    customdata=[_said(turn) for turn in mine],
                    hovertemplate="<b>%{y}</b><br>%{customdata}<extra></extra>",
                )
            )
    return figure(
        "When each role is busy",
        traces,
        height=90 + max(len(labels), 2) * 34,
        barmode="overlay",
        bargap=0.25,
        showlegend=True,
        legend=LEGEND_ABOVE,
        xaxis={"title": {"text": f"{unit.name} from {_begin(roles)}"}, "rangemode": "tozero"},
        yaxis={
            "type": "category", "categoryorder": "array", "categoryarray": labels, "autorange": "reversed",
            "showgrid": False, "fixedrange": True, "ticksuffix": " ",
        },
    )  # fmt: skip


def _begin(roles: Roles) -> str:
    return "the first whole iteration's begin" if roles.iterations else "the begin of the common window"


def _said(turn: RoleTurn) -> str:
    what = shortened(turn.what)
    doing = {"busy": what or "busy", "waits": f"waits for {what}", "idle": "idle", "unrecorded": "not recorded"}
    return f"{doing[turn.doing]}<br>{duration(turn.end_us - turn.start_us)} from {duration(turn.start_us)}"
