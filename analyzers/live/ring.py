"""The last steps of every rank, by number, so that the same step of all ranks can be compared."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from perfscope.analyzers.history.own_times import COLUMNS as OWN
from perfscope.trace.trace import Float32, Int64

WAITING: Final = "waiting"
"""For other ranks, anywhere in the step."""

COLUMNS: Final = ("step", *OWN, WAITING)
"""Of a row: the step, what the rank itself did in each stage, the rest, waiting for a core and for other ranks, µs.
nan where not measured: without ``waiting`` the stages include it."""

_LENGTHS: Final = ((256, 2048), (2048, 512))
"""Up to so many ranks -> so many steps of each: 20 to 40 MB."""

_FEWEST: Final = 128
"""Steps of each rank in a larger job: 50 MB for 10,000 ranks. Its steps take long enough for these to overlap, although
ranks write them at different times."""


class StepRing:
    """The last steps of some ranks. The row of a rank is the number that ``row`` gives it."""

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        self._length = 0
        self._number: Int64 = np.empty((0, 0), dtype=np.int64)
        self._us: Float32 = np.empty((0, 0, len(COLUMNS)), dtype=np.float32)

    @property
    def length(self) -> int:
        """Steps of each rank that are kept."""
        return self._length

    def add(self, rank: int, first: int, values: npt.NDArray[np.floating]) -> None:
        """Consecutive steps of a rank from number ``first`` on: a row of ``COLUMNS`` for each."""
        row = self._row(rank)
        numbers = np.arange(first, first + len(values))[-self._length :]
        values = values[-self._length :]
        places = numbers % self._length
        self._number[row, places] = numbers
        self._us[row, places] = values

    def forget(self, rank: int) -> None:
        """A rank begins anew."""
        if rank in self._rows:
            self._number[self._rows[rank]] = -1

    def steps(self, ranks: list[int], last: int, count: int) -> Float32:
        """(ranks, steps, columns) of the ``count`` steps up to ``last``; nan where a rank's step is not known."""
        numbers = np.arange(max(last - min(count, self._length) + 1, 0), last + 1)
        rows = np.array([self._rows[rank] for rank in ranks], dtype=np.int64)
        places = numbers % max(self._length, 1)
        found = self._us[rows[:, None], places[None, :]]
        found[self._number[rows[:, None], places[None, :]] != numbers] = np.nan
        return found

    def _row(self, rank: int) -> int:
        if rank not in self._rows:
            self._rows[rank] = len(self._rows)
            if len(self._rows) > len(self._number):
                self._grow(max(8, 2 * len(self._number)))
        return self._rows[rank]

    def _grow(self, ranks: int) -> None:
        length = next((length for most, length in _LENGTHS if ranks <= most), _FEWEST)
        number = np.full((ranks, length), -1, dtype=np.int64)
        us = np.full((ranks, length, len(COLUMNS)), np.nan, dtype=np.float32)
        for row in range(len(self._number)):
            known = np.sort(self._number[row][self._number[row] >= 0])[-length:]
            number[row, known % length] = known
            us[row, known % length] = self._us[row, known % max(self._length, 1)]
        self._length, self._number, self._us = length, number, us
