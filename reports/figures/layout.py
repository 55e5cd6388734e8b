"""What all figures share: text from a recording made safe for plotly, the layout, axes, the look on narrow screens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from perfscope.reports.figures.colours import LIGHT
from perfscope.text import ScaledUnit

Drawn = dict[str, Any]
"""A figure, or one trace of it, as plotly's JSON has it. Plotly's own objects validate every value, which takes longer
than the rest of the page; ``summary.figures`` makes them of these."""

MARKED: Final = 8
"""Stragglers marked in a chart."""

LEGEND_ABOVE: Final = {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0}

_TITLE_HEIGHT: Final = 44
"""Pixels above the plot for its title, which the page writes as text of its own."""

_AXIS: Final = {
    "gridcolor": LIGHT["line"],
    "zerolinecolor": LIGHT["line"],
    "linecolor": LIGHT["line"],
    "automargin": True,
}


def plain(text: str) -> str:
    """Plotly reads a little HTML in labels; names from a recording must not be read so."""
    # As html.escape, whose module begins with a dictionary of every named character.
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def shortened(text: str, most: int = 60) -> str:
    """``text`` made safe, and cut where it is longer than a label can be."""
    return plain(f"{text[: most - 3]}…" if len(text) > most else text)


def figure(
    title: str,
    traces: Iterable[Any],
    *,
    height: int,
    narrow: dict[str, Any] | None = None,
    meta: dict[str, Any] | None = None,
    **layout: Any,
) -> Drawn:
    """A figure in PerfScope's look.

    ``height`` is in pixels, without the title. ``narrow`` is what changes in the layout on a narrow screen, one level
    deep; the page's script applies it. ``meta`` is what else that script needs.
    """
    font = {"size": 12, "color": LIGHT["text"]}
    axes = {name: {**_AXIS, **layout.pop(name, {})} for name in ("xaxis", "yaxis")}
    return stated(
        {
            "data": list(traces),
            "layout": {
                "title": {"text": title, "x": 0, "xref": "paper", "font": {"size": 15}},
                "height": height + _TITLE_HEIGHT,
                "margin": {"l": 8, "r": 12, "t": 8 + _TITLE_HEIGHT, "b": 8},
                "paper_bgcolor": LIGHT["page"],
                "plot_bgcolor": LIGHT["page"],
                "font": font,
                "hoverlabel": {"align": "left", "bgcolor": LIGHT["raised"], "bordercolor": LIGHT["line"], "font": font},
                "showlegend": False,
                # What the reader zoomed to stays when other ranks are chosen or the colours change.
                "uirevision": "kept",
                "meta": {"narrow": {"dragmode": False, **(narrow or {})}, "titled": _TITLE_HEIGHT, **(meta or {})},
                **axes,
                **layout,
            },
        }
    )


def trace(kind: str, **values: Any) -> Drawn:
    """A trace of plotly's kind ``bar``, ``scatter`` or ``heatmap``; a value of None is as if it was not given."""
    return stated({**values, "type": kind})


def stated(values: Drawn) -> Drawn:
    """``values`` without those that are None, at any depth of the object; lists stay as they are."""
    return {
        name: stated(value) if isinstance(value, dict) else value for name, value in values.items() if value is not None
    }


def one_step(
    title: str,
    traces: Iterable[Any],
    rows: Sequence[str],
    unit: ScaledUnit,
    *,
    height: int,
    meta: dict[str, Any] | None = None,
) -> Drawn:
    """Bars over the time of one step, in ``unit``: a line for each of the ``rows``, the first on top."""
    return figure(
        title,
        traces,
        height=height,
        meta=meta,
        barmode="overlay",
        bargap=0.2,
        showlegend=True,
        legend=LEGEND_ABOVE,
        xaxis={"title": {"text": f"{unit.name} from the step's start"}, "rangemode": "tozero"},
        yaxis={
            "type": "category", "categoryorder": "array", "categoryarray": rows, "autorange": "reversed",
            "showgrid": False, "fixedrange": True, "ticksuffix": " ",
        },
    )  # fmt: skip


def rank_axis(labels: Sequence[str]) -> dict[str, Any]:
    """The vertical axis of bars, one for each rank, the first on top; named as long as names have room."""
    return {
        "type": "category",
        "autorange": "reversed",
        "showgrid": False,
        "ticksuffix": " ",
        "tickprefix": "" if len(labels) > 32 else "rank ",
        "fixedrange": True,
        "dtick": 4 if len(labels) > 32 else 1,
    }


def bar_height(count: int) -> int:
    """Pixels of one bar among so many, its gap included."""
    return 13 if count > 32 else 20 if count > 8 else 30


def bar(name: str, colour: str, *, line: float = 0, opacity: Any = None, **values: Any) -> Drawn:
    """A horizontal bar trace."""
    marker = {"color": colour, "line": {"width": line, "color": LIGHT["page"]}, "opacity": opacity}
    return trace("bar", orientation="h", name=name, marker=marker, **values)


def shade(start: float, end: float) -> dict[str, Any]:
    """A band over the whole height, between two places of the horizontal axis."""
    return {
        "type": "rect", "xref": "x", "yref": "paper", "x0": start, "x1": end, "y0": 0, "y1": 1, "layer": "below",
        "line": {"width": 0}, "fillcolor": LIGHT["line"],
    }  # fmt: skip
