"""Taking lines of one rank out and putting others in at given points of its own progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from perfscope.analyzers.whatif.script import Line, Part, Script
from perfscope.trace import Float64


class Stretch:
    """The lines of one rank in one step. ``progress_ns`` is the rank's own time passed at each line, from the first of
    them; what is put in is given by it. ``whole``: with the line that begins the next step, and so all own time of it.
    """

    def __init__(self, script: Script, rank: int, step: int, *, whole: bool = False) -> None:
        self._script, self._rank = script, rank
        places = [place for place, line in enumerate(script.lines[rank]) if line.step == step]
        self._bounds = (places[0], min(places[-1] + 1 + whole, len(script.lines[rank]))) if places else (0, 0)
        self.lines: list[Line] = script.lines[rank][slice(*self._bounds)]
        self._rows = np.cumsum([line.own_ns for line in self.lines], axis=0) if self.lines else np.zeros((0, 1))
        self.progress_ns: Float64 = self._rows.sum(axis=1)

    def replace(self, dropped: frozenset[Part], added: Sequence[tuple[float, Line]]) -> None:
        """Take the lines of the parts ``dropped`` out and put ``added`` in at their progress; the own time stays.

        At one progress what was there comes first, then what is added, in its order.
        """
        lines = zip(self.progress_ns, self.lines, strict=True)
        kept = [(float(at), line) for at, line in lines if line.part is None or line.part not in dropped]
        self._relay(sorted([*kept, *added], key=lambda item: item[0]))

    def move(self, behind: Mapping[int, int]) -> None:
        """Move lines (by their place in ``lines``) to right behind others; those at one place keep their order."""
        order = sorted(range(len(self.lines)), key=lambda place: (behind.get(place, place), place in behind, place))
        self._relay([(float(self.progress_ns[behind.get(place, place)]), self.lines[place]) for place in order])

    def _relay(self, items: Sequence[tuple[float, Line]]) -> None:
        """Lay the stretch out anew: lines in order, each at its progress."""
        passed = self._rows_at(np.array([at for at, _ in items]))
        own = np.diff(passed, axis=0, prepend=0.0)
        relaid = [_with_own(line, rows) for (_, line), rows in zip(items, own, strict=True)]
        rest = self._rows[-1] - (passed[-1] if len(passed) else 0.0)
        self._script.lines[self._rank][slice(*self._bounds)] = relaid
        # What was left after the last line comes before the next step's first.
        following = self._bounds[0] + len(relaid)
        if rest.any() and following < len(self._script.lines[self._rank]):
            line = self._script.lines[self._rank][following]
            line.own_ns = line.own_ns + rest

    def _rows_at(self, progress_ns: Float64) -> Float64:
        """Own time passed at each moment of the progress (lines), by row (columns): straight between the lines."""
        points = np.concatenate(([0.0], self.progress_ns))
        rows = np.concatenate((np.zeros((1, self._rows.shape[1])), self._rows))
        after = np.clip(np.searchsorted(points, progress_ns, side="left"), 1, len(points) - 1)
        length = points[after] - points[after - 1]
        share = np.divide(progress_ns - points[after - 1], length, out=np.ones_like(length), where=length > 0)
        share = np.clip(share, 0.0, 1.0)[:, None]
        return np.asarray(rows[after - 1] + share * (rows[after] - rows[after - 1]), dtype=np.float64)


def _with_own(line: Line, own_ns: Float64) -> Line:
    return Line(line.op, own_ns, line.lag_ns, line.part, line.mark, line.hold_ns, line.step)
