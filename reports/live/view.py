"""What the user chose to see of a running job, and the keys that change it, as in ``top``."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from perfscope.frozen import dataclass

SORTS: Final = {
    "d": "slower by",
    "t": "step time",
    "l": "loading",
    "c": "cores",
    "g": "GPU",
    "s": "last step",
    "r": "rank",
}
"""Key -> what ranks are sorted by."""

HELP: Final = (
    ("q", "quit; Ctrl-C does, too"),
    ("space, p", "pause: the screen stays as it is, and nothing is missed"),
    ("d", "sort by how much slower a rank is than its peers; ranks that make no steps come first"),
    ("t  l  c  g", "sort by step time, data loading, CPU cores, GPU"),
    ("s  r", "sort by last step, by rank"),
    ("R", "reverse the order"),
    ("1 … 9  + -", "seconds between two looks at the files"),
    ("arrows, Page Up, Page Down, Home", "scroll through the ranks"),
    ("h, ?", "this help; any key leaves it"),
)

SHORTEST_S: Final = 0.5
LONGEST_S: Final = 300.0


@dataclass(frozen=True)
class View:
    """What is shown."""

    interval_s: float = 2.0
    sort: str = "d"
    """A key of ``SORTS``."""
    reverse: bool = False
    paused: bool = False
    help: bool = False
    top: int = 0
    """Rows of the table that are scrolled past."""
    page: int = 10
    """Rows of the table that fit."""

    def after(self, key: str) -> View | None:
        """The view after a key; None where the user quits. Other keys change nothing."""
        if key in ("q", "Q", "\x03", "\x04"):
            return None
        if self.help:
            return replace(self, help=False)
        if key in SORTS:
            return replace(self, sort=key, reverse=False, top=0)
        if key.isdecimal() and key != "0" and key.isascii():
            return replace(self, interval_s=float(key))
        changes: dict[str, View] = {
            "R": replace(self, reverse=not self.reverse, top=0),
            " ": replace(self, paused=not self.paused),
            "p": replace(self, paused=not self.paused),
            "h": replace(self, help=True),
            "?": replace(self, help=True),
            "+": replace(self, interval_s=min(self.interval_s * 2, LONGEST_S)),
            "-": replace(self, interval_s=max(self.interval_s / 2, SHORTEST_S)),
            "down": replace(self, top=self.top + 1),
            "up": replace(self, top=max(self.top - 1, 0)),
            "page down": replace(self, top=self.top + self.page),
            "page up": replace(self, top=max(self.top - self.page, 0)),
            "home": replace(self, top=0),
        }
        return changes.get(key, self)
