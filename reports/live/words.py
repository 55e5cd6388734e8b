"""Words and widths that the screen and the lines share."""

from __future__ import annotations

import unicodedata
from typing import Final

from perfscope.redact import redact_value
from perfscope.results.history import OTHER
from perfscope.text import printable

STAGE_WORDS: Final = {
    "dataloader": "loading",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    OTHER: "other",
    "core": "no core",
    "several": "several stages",
}

STAGE_COLOURS: Final = {
    "dataloader": "idle_dataloader",
    "forward": "compute",
    "backward": "idle_sync",
    "optimizer": "exposed_comm_transfer",
    OTHER: "idle_unknown",
    "waiting": "exposed_comm_wait",
    "evaluation": "idle_host",
    "checkpoint": "idle_dependency",
    "core": "exposed_copy",
}
"""Stage -> a colour of the page's."""


OTHERS_UNKNOWN: Final = "other stages are not timed: --steps-only times them"


def stage_word(stage: str) -> str:
    """A stage's name as it is shown."""
    return STAGE_WORDS.get(stage, stage)


_LEVELS: Final = "▁▂▃▄▅▆▇█"


def safe(text: str) -> str:
    """A name from a recording as a terminal may get it: on one line, without control characters and secrets."""
    return printable(redact_value(text))


def columns(text: str) -> int:
    """Columns that a terminal shows ``text`` in."""
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in text
    )


def cut(text: str, width: int) -> str:
    """``text`` in at most ``width`` columns, with ``…`` where something is left out."""
    if columns(text) <= width:
        return text
    kept = ""
    for letter in text:
        if columns(kept + letter) > width - 1:
            break
        kept += letter
    return kept + "…" if width > 0 else ""


def elapsed(seconds: float) -> str:
    """``12 s``, ``3:07``, ``1:02:03``, ``2 d 4:05:06``."""
    whole = max(int(seconds), 0)
    days, rest = divmod(whole, 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, left = divmod(rest, 60)
    if whole < 60:
        return f"{whole} s"
    clock = f"{hours}:{minutes:02}:{left:02}" if hours or days else f"{minutes}:{left:02}"
    return f"{days} d {clock}" if days else clock


def sparkline(values: tuple[float, ...], width: int) -> str:
    """Values as bars from the smallest to the largest, means of neighbours where there are more than ``width``."""
    if not values or width < 1:
        return ""
    per = -(-len(values) // width)
    means = [sum(part) / len(part) for part in (values[at : at + per] for at in range(0, len(values), per))]
    low, high = min(means), max(means)
    # What differs by less than a tenth is no hill.
    span = max(high - low, 0.1 * high, 1e-9)
    return "".join(_LEVELS[min(int((value - low) / span * len(_LEVELS)), len(_LEVELS) - 1)] for value in means)
