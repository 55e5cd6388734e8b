"""Collects a trace's columns from the tables of an export: batches in, arrays in time order out."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from perfscope.trace import NONE, Bool, Category, Int8, Int32, Int64, Thread

_TYPES: Final = {
    "category": np.int8, "name": np.int32, "start_ns": np.int64, "duration_ns": np.int64, "thread": np.int32,
    "device": np.int32, "stream": np.int64, "correlation": np.int64, "external_id": np.int64, "shapes": np.int32,
    "types": np.int32, "inputs": np.int32,
}  # fmt: skip


class Strings(dict[str, int]):
    """Numbers strings in the order they are first asked for."""

    def __missing__(self, text: str) -> int:
        number = self[text] = len(self)
        return number


class Threads(dict[tuple[str, str], int]):
    """Numbers tracks by (process or device, thread or stream) in the order they are first asked for."""

    def __missing__(self, key: tuple[str, str]) -> int:
        number = self[key] = len(self)
        return number

    def described(self, names: dict[tuple[str, str], str]) -> tuple[Thread, ...]:
        """Every track with its name, in order of their numbers."""
        return tuple(Thread(first, second, names.get((first, second), "")) for first, second in self)


class Columns:
    """Grows by batches of one table; what a table does not say is NONE."""

    def __init__(self) -> None:
        self.strings = Strings()
        self.threads = Threads()
        self.dropped = 0
        """Rows left out because they end before they start, or never end."""
        self._batches: list[tuple[int, dict[str, Any]]] = []
        """(rows, columns; None for those that a table does not have)."""

    def add(
        self,
        category: Category | Int8,
        name: Int32,
        start_ns: Int64,
        end_ns: Int64,
        thread: Int32,
        **more: Int64 | Int32,
    ) -> None:
        """Append rows; those that do not end at or after their start are counted as dropped."""
        kept: Bool = end_ns >= start_ns
        self.dropped += int((~kept).sum())
        every = np.full(len(start_ns), category, dtype=np.int8) if isinstance(category, Category) else category
        values: dict[str, Any] = {
            "category": every, "name": name, "start_ns": start_ns, "duration_ns": end_ns - start_ns, "thread": thread,
            **more,
        }  # fmt: skip
        batch = {
            column: None if values.get(column) is None else values[column][kept].astype(kind)
            for column, kind in _TYPES.items()
        }
        self._batches.append((int(kept.sum()), batch))

    def finish(self) -> dict[str, Any]:
        """Every column, by start, and at one start the longer first."""
        # Column by column, each batch's part let go as soon as it is copied: the peak is one column above the sum.
        joined = {column: self._join(column) for column in _TYPES}
        order = np.lexsort((-joined["duration_ns"], joined["start_ns"]))
        return {column: joined.pop(column)[order] for column in _TYPES}

    def _join(self, column: str) -> Any:
        whole = np.full(sum(rows for rows, _ in self._batches), NONE, dtype=_TYPES[column])
        at = 0
        for rows, batch in self._batches:
            part = batch.pop(column)
            if part is not None:
                whole[at : at + rows] = part
            at += rows
        return whole


def lookup(ids: Int64, numbers: dict[int, int]) -> Int32:
    """``numbers`` of each id; every id must have one. Works on distinct ids, of which there are few."""
    distinct, place = np.unique(ids, return_inverse=True)
    table = np.array([numbers[number] for number in distinct.tolist()], dtype=np.int32)
    return table[place] if len(distinct) else np.empty(0, dtype=np.int32)
