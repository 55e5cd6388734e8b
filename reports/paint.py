"""Colours and bars for a terminal that shows them; without one the same text, and no bars."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final, TextIO

from perfscope.frozen import dataclass
from perfscope.reports.figures.colours import DARK

_NARROWEST: Final = 60
_WIDEST: Final = 120
"""Longer lines are hard to read."""
_PARTS: Final = " ▏▎▍▌▋▊▉"
"""A cell of a bar, by its eighths."""


@dataclass(frozen=True)
class Paint:
    """How text is shown: ``PLAIN``, or as a terminal can."""

    coloured: bool = False
    width: int = 100
    """Columns of a line."""

    @classmethod
    def of(cls, stream: TextIO) -> Paint:
        """As the stream takes it: plain unless it is a terminal, for ``NO_COLOR`` and for ``TERM=dumb``."""
        if not stream.isatty():
            return PLAIN
        import shutil

        width = min(max(shutil.get_terminal_size((PLAIN.width, 24)).columns, _NARROWEST), _WIDEST)
        return cls(not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb", width)

    def bold(self, text: str) -> str:
        """What is to be read first."""
        return self._styled(text, "1")

    def faint(self, text: str) -> str:
        """What can be skipped."""
        return self._styled(text, "2")

    def code(self, text: str) -> str:
        """What is to be typed."""
        return self._styled(text, "36")

    def tone(self, text: str, tone: str) -> str:
        """``good``, ``bad`` or ``warning``; text of any other tone stays as it is."""
        colour = {"good": "32", "bad": "31", "warning": "33"}.get(tone)
        return self._styled(text, f"1;{colour}") if colour else text

    def named(self, text: str, name: str) -> str:
        """In the page's colour of that name: a category's id."""
        hexadecimal = DARK[name].lstrip("#")
        red, green, blue = (round(int(hexadecimal[at : at + 2], 16) / 51) for at in (0, 2, 4))
        return self._styled(text, f"38;5;{16 + 36 * red + 6 * green + blue}")  # of the 256 colours that terminals have

    def stack(self, parts: Iterable[tuple[str, float]], cells: int = 20) -> str:
        """A bar of shares in the colours of their names, with a space after it; empty without colours."""
        if not self.coloured:
            return ""
        bar, filled, total = "", 0, 0.0
        for name, share in parts:
            total += share
            here = min(round(total * cells), cells) - filled
            bar += self.named("█" * here, name) if here > 0 else ""
            filled += max(here, 0)
        return bar + " " * (cells - filled) + "  "

    def bar(self, share: float, cells: int = 20) -> str:
        """A bar of one share, 0..1, with a space before it; empty without colours."""
        if not self.coloured:
            return ""
        eighths = round(min(max(share, 0.0), 1.0) * cells * 8)
        text = "█" * (eighths // 8) + (_PARTS[eighths % 8] if eighths % 8 else "")
        return "  " + self.named(f"{text:<{cells}}", "compute")

    def _styled(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if self.coloured and text else text


PLAIN: Final = Paint()
