"""The timeline of one step: lanes of selected ranks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import field
from typing import Final

from perfscope.frozen import dataclass
from perfscope.reports.figures.colours import LIGHT
from perfscope.reports.figures.layout import MARKED, Drawn, bar, one_step, plain, shortened, trace
from perfscope.reports.figures.numbers import rounded, scaled
from perfscope.reports.kernel_names import short_name
from perfscope.results.attribution import attributed_ranks
from perfscope.results.summary import Summary
from perfscope.results.tables import Lane
from perfscope.text import ScaledUnit, byte_size, duration, percent, unit_for

SHOWN_FIRST: Final = 3
"""Ranks in the chart until the reader selects others."""

STAGES_SHOWN_FIRST: Final = 4

LABELS: Final = {
    "phase": "phase",
    "compute": "compute",
    "communication": "communication",
    "copy": "copy",
    "host": "host",
    "backward": "host backward",
    "loader": "dataloader",
    "range": "ranges",
}
"""Lanes in words, in the order of the chart."""

_COLOURS: Final = {
    "phase": ("phase", "idle_unknown"),
    "compute": ("compute", "compute"),
    "wait": ("waiting in a collective", "exposed_comm_wait"),
    "transfer": ("transfer", "exposed_comm_transfer"),
    "copy": ("copy", "exposed_copy"),
    "host": ("host", "idle_host"),
    "backward": ("host backward", "idle_sync"),
    "loader": ("dataloader", "idle_dataloader"),
    "range": ("named range", "idle_launch"),
}
"""What is drawn -> its name in the legend and the category whose colour it has."""

_PALEST: Final = 0.3
"""A run of short events is as pale as it is empty, but never so pale that it cannot be seen."""

_DIGITS: Final = 6
"""Significant digits of a time: enough to zoom in on a thousandth of the step."""

_ROW_HEIGHT: Final = 24

_WIDTH_IN_LETTERS: Final = 140
"""Letters that the whole width of a usual figure has room for."""

_LEAST_LETTERS: Final = 4

_LINKED: Final = 0.005
"""Share of the step that a rank must wait in a collective to be linked with the rank that it waits for."""

_PREFIX: Final = re.compile("^perfscope::(pipeline#)?")
"""What PerfScope's own ranges are called before their names."""


@dataclass
class _Bars:
    """What is drawn in one colour on one rank."""

    places: list[str] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    opacity: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


class _Names(dict[tuple[str, str], str]):
    """(kind of lane, recorded name) -> the name as it is shown: ranks have most names in common."""

    def __missing__(self, key: tuple[str, str]) -> str:
        kind, name = key
        shown = self[key] = shortened(short_name(name) if kind == "compute" else _PREFIX.sub("", name), 90)
        return shown


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


def timeline_figure(summary: Summary) -> Drawn | None:
    """Every rank's lanes, those of the ranks worth seeing first visible; None where no lane was recorded.

    Each trace's ``meta`` is its rank; the figure's ``meta`` has the lanes of each rank, for those who choose others.
    """
    lanes = [lane for lane in summary.lanes if lane.kind in LABELS and lane.start_us]  # later versions may have more
    if not lanes:
        return None
    span = max(lane.start_us[-1] + lane.duration_us[-1] for lane in lanes)
    unit = unit_for(span)
    late = set(attributed_ranks(summary.stragglers)[:MARKED])
    drawn: dict[tuple[int, str], _Bars] = {}
    places: dict[int, list[str]] = {}
    names = _Names()
    for lane in lanes:
        place = _place(lane, late)
        places.setdefault(lane.rank, []).append(place)
        for kind, start, length, opacity, text in _entries(lane, names):
            bars = drawn.get((lane.rank, kind)) or drawn.setdefault((lane.rank, kind), _Bars())
            bars.places.append(place)
            bars.starts.append(start)
            bars.lengths.append(length)
            bars.opacity.append(opacity)
            bars.texts.append(text)
    shown = first_shown(summary)
    rows = [place for rank, lanes in places.items() if rank in shown for place in lanes]
    kinds = [kind for kind in _COLOURS if any(kind == other for _, other in drawn)]
    traces = [_legend(kind) for kind in kinds]
    traces += [_trace(rank, kind, bars, unit, span, visible=rank in shown) for (rank, kind), bars in drawn.items()]
    traces += _links(lanes, late, unit, span, shown)
    height = 110 + max(len(rows), 2) * _ROW_HEIGHT
    meta = {"lanes": {str(rank): lanes for rank, lanes in places.items()}, "row": _ROW_HEIGHT}
    return one_step("Timeline of one step", traces, rows, unit, height=height, meta=meta)


def _place(lane: Lane, late: Collection[int]) -> str:
    """The row of a lane; those of stragglers are marked."""
    rank = f"<b>▸ rank {lane.rank}</b>" if lane.rank in late else f"rank {lane.rank}"
    return f"{rank} · {LABELS[lane.kind]}"


def _links(
    lanes: Sequence[Lane], late: Collection[int], unit: ScaledUnit, span: float, shown: Collection[int]
) -> Iterator[Drawn]:
    """From the last arrival of each collective to each rank that waited long for it, at that moment.

    Each trace's ``meta`` are the two ranks; it is visible where both are.
    """
    places = {lane.rank: _place(lane, late) for lane in lanes if lane.kind == "communication"}
    arrivals: dict[tuple[int, int], list[float]] = {}
    for lane in lanes:
        for start, wait, last in zip(lane.start_us, lane.wait_us, lane.waited_for, strict=False):
            if last is not None and last != lane.rank and last in places and (wait or 0.0) >= _LINKED * span:
                arrivals.setdefault((last, lane.rank), []).append(start + (wait or 0.0))
    first = True
    for (last, waiting), moments in arrivals.items():
        # Each a line of its own: from the late rank, with an arrow at the one that waits.
        times = [time for moment in _times(moments, unit) for time in (moment, moment, None)]
        visible = {last, waiting} <= set(shown)
        yield trace("scatter",
            mode="lines+markers",
            name="the late rank arrives",
            x=times,
            y=[places[last], places[waiting], None] * len(moments),
            line={"color": LIGHT["text"], "width": 1, "dash": "dot"},
            marker={
                "color": LIGHT["text"], "size": [0, 7, 0] * len(moments),
                "symbol": "triangle-up" if last < waiting else "triangle-down",
            },
            hovertemplate=f"rank {waiting} waits for rank {last}<extra></extra>",
            visible=visible,
            showlegend=visible and first,
            legendgroup="link",
            meta=[last, waiting],
        )  # fmt: skip
        first = first and not visible


def _entries(lane: Lane, names: _Names) -> Iterator[tuple[str, float, float, float, str]]:
    """(what is drawn, start, length, opacity, text) of every entry; a collective is its wait, then its transfer."""
    for at, (start, length) in enumerate(zip(lane.start_us, lane.duration_us, strict=True)):
        text = _text(lane, at, names)
        if lane.kind != "communication":
            opacity = 1.0
            if lane.events[at] > 1 and length > 0:
                opacity = min(max(rounded(lane.busy_us[at] / length, 2) or 0.0, _PALEST), 1.0)
            yield lane.kind, start, length, opacity, text
            continue
        wait = lane.wait_us[at] or 0.0
        if wait > 0:
            yield "wait", start, wait, 1.0, text
        yield "transfer", start + wait, max(length - wait, 0.0), 1.0, text


def _text(lane: Lane, at: int, names: _Names) -> str:
    """What is shown of an entry under the pointer."""
    index = lane.name[at]
    name = "" if index is None else names[lane.kind, lane.texts[index]]
    lines = [f"<b>{name or plain(lane.kind)}</b>"]
    length = lane.duration_us[at]
    if lane.events[at] > 1:
        busy = percent(lane.busy_us[at] / length) if length > 0 else "100%"
        lines.insert(0, f"{lane.events[at]} short events, busy {busy}; the longest:")
    if lane.operator[at] is not None:
        lines.append(f"launched by {shortened(lane.texts[lane.operator[at] or 0], 90)}")
    if lane.kind == "communication":
        lines += _collective(lane, at, length)
    return "<br>".join((*lines, f"{duration(length)} from {duration(lane.start_us[at])}"))


def _collective(lane: Lane, at: int, length: float) -> Iterator[str]:
    size, group, wait = lane.bytes[at], lane.group[at], lane.wait_us[at]
    if size:
        yield byte_size(size)
    if group is not None:
        yield f"group {shortened(lane.texts[group])}"
    if wait is not None:
        last = lane.waited_for[at] if lane.waited_for else None
        if wait > 0 and last not in (None, lane.rank):
            yield f"waits for rank {last}"
        yield f"wait {duration(wait)}, transfer {duration(max(length - wait, 0.0))}"


def _trace(rank: int, kind: str, bars: _Bars, unit: ScaledUnit, span: float, *, visible: bool) -> Drawn:
    name, colour = _COLOURS[kind]
    pale = any(part < 1 for part in bars.opacity)
    return bar(
        name,
        LIGHT[colour],
        opacity=bars.opacity if pale else None,
        y=bars.places,
        x=_times(bars.lengths, unit),
        base=_times(bars.starts, unit),
        customdata=bars.texts,
        text=_drawn_names(bars, span),
        textposition="inside",
        textangle=0,
        constraintext="none",
        insidetextanchor="middle",
        hovertemplate="%{customdata}<extra></extra>",
        visible=visible,
        showlegend=False,
        legendgroup=kind,
        meta=rank,
    )


def _drawn_names(bars: _Bars, span: float) -> list[str]:
    """The names inside the bars, as much of each as has room; the page's script does the same when it zooms."""
    room = [int(length / span * _WIDTH_IN_LETTERS) for length in bars.lengths]
    return [
        _cut(text.partition("<b>")[2].partition("</b>")[0], most) if most >= _LEAST_LETTERS else ""
        for text, most in zip(bars.texts, room, strict=True)
    ]


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _legend(kind: str) -> Drawn:
    """The entry of the legend, whichever ranks are chosen."""
    name, colour = _COLOURS[kind]
    return bar(name, LIGHT[colour], x=[None], y=[None], legendgroup=kind)


def _times(values: Sequence[float], unit: ScaledUnit) -> list[float | None]:
    return scaled(values, unit, _DIGITS)
