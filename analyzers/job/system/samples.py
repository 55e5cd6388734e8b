"""Reads the samples of a host (as ``perfscope.recording.samples`` defines them) and averages them over an interval."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from perfscope.recording.samples import SCHEMA
from perfscope.trace.trace import Float64, Int64

LEAST_COVER: Final = 0.5
"""Share of an interval that samples must span for its mean or rate to be known."""


@dataclass(frozen=True, eq=False)
class SampleTable:
    """Samples of one source: values of some columns at some times; nan where not known."""

    columns: tuple[str, ...]
    time_ns: Int64
    values: Float64
    """(times, columns)."""

    def column(self, name: str) -> tuple[Int64, Float64]:
        """Times and values of one column, where they are known."""
        if name not in self.columns:
            return self.time_ns[:0], np.empty(0)
        values = self.values[:, self.columns.index(name)]
        known = np.isfinite(values)
        return self.time_ns[known], values[known]

    def rate(self, name: str, start_ns: int, end_ns: int) -> float | None:
        """Growth of a counter per second over ``[start_ns, end_ns)``, with linear growth between samples.

        None where samples span too little of it, or the counter was reset.
        """
        time, values = self.column(name)
        span = _covered(time, start_ns, end_ns)
        if span is None:
            return None
        low, high = np.interp(span, time, values)
        inside = values[(time >= span[0]) & (time <= span[1])]
        if (np.diff(inside) < 0).any() or high < low:
            return None
        return float(high - low) / (span[1] - span[0]) * 1e9

    def mean(self, name: str, start_ns: int, end_ns: int) -> float | None:
        """Mean over ``[start_ns, end_ns)``, linear between samples; None where samples span too little of it."""
        time, values = self.column(name)
        span = _covered(time, start_ns, end_ns)
        if span is None:
            return None
        inner = time[(time > span[0]) & (time < span[1])]
        at = np.concatenate(([span[0]], inner, [span[1]])).astype(np.int64)
        y = np.interp(at, time, values)
        width = np.diff(at)
        return float(((y[1:] + y[:-1]) / 2 * width).sum() / width.sum())

    def near(self, name: str, start_ns: int, end_ns: int) -> Float64:
        """The values inside ``[start_ns, end_ns]``, with the nearest one on either side."""
        time, values = self.column(name)
        first = max(int(np.searchsorted(time, start_ns, "right")) - 1, 0)
        last = int(np.searchsorted(time, end_ns, "left")) + 1
        return values[first:last]

    def largest(self, name: str, start_ns: int, end_ns: int) -> float | None:
        """Largest of ``near``; None where nothing is known."""
        values = self.near(name, start_ns, end_ns)
        return float(values.max()) if len(values) else None


@dataclass(frozen=True, eq=False)
class ProcessSamples:
    """One process of the job."""

    rank: int
    kind: str
    cores: str
    """The cores that it may run on, in the kernel's notation; empty where not known."""
    table: SampleTable


@dataclass(frozen=True, eq=False)
class HostSamples:
    """One run of a sampler on one host."""

    host: str
    header: dict[str, Any]
    table: SampleTable
    devices: tuple[SampleTable, ...] = ()
    processes: dict[int, ProcessSamples] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def samples_in(self, start_ns: int, end_ns: int) -> int:
        """Number of samples in ``[start_ns, end_ns]``."""
        time = self.table.time_ns
        return int(np.searchsorted(time, end_ns, "right") - np.searchsorted(time, start_ns, "left"))


@dataclass(frozen=True)
class Machine:
    """One host's samples and the used steps of its ranks, on its own clock."""

    samples: HostSamples
    ranks: tuple[int, ...]
    start_ns: int
    end_ns: int
    to_picture_ns: int
    """Added to the host's time, gives the chart's."""


def read_samples(path: Path, start_ns: int, end_ns: int) -> list[HostSamples]:
    """Every sampler's run in a file that took samples between two times: one, or more after elastic restarts.

    A line that cannot be read (cut by a kill) is skipped. Raises OSError where the file cannot be read.
    """
    with path.open("rb") as stream:
        parts = list(_runs(stream, start_ns, end_ns))
    return [run for lines in parts if (run := _of_lines(lines)) is not None]


def _runs(lines: Iterable[bytes], start_ns: int, end_ns: int) -> Iterator[list[Any]]:
    """Decoded lines, a list for each header; samples outside the interval are not decoded: jobs run for days."""
    decode = msgspec.json.Decoder().decode
    current: list[Any] = []
    for line in lines:
        try:
            if line.startswith(b"[") and not start_ns <= int(line[1 : line.index(b",")]) <= end_ns:
                continue
            value = decode(line) if not line.isspace() else None
        except (msgspec.DecodeError, ValueError):
            continue
        if isinstance(value, dict) and value.get("schema") == SCHEMA:
            if current:
                yield current
            current = [value]
        elif current:
            current.append(value)
    if current:
        yield current


def _of_lines(lines: list[Any]) -> HostSamples | None:
    header = lines[0]
    described = {line["process"]: line for line in lines[1:] if isinstance(line, dict) and "process" in line}
    samples = [line for line in lines[1:] if isinstance(line, list) and len(line) == 4]
    if not samples:
        return None
    time = np.array([line[0] for line in samples], dtype=np.int64)
    order = np.argsort(time, kind="stable")  # a host's clock may be set back
    samples = [samples[index] for index in order]
    time = time[order]
    count = min((len(line[2]) for line in samples), default=0)
    return HostSamples(
        host=str(header.get("host", "")),
        header=header,
        table=_table(header, "host_columns", time, [line[1] for line in samples]),
        devices=tuple(
            _table(header, "device_columns", time, [line[2][index] for line in samples]) for index in range(count)
        ),
        processes=_processes(header, described, samples),
        problems=tuple(str(line["problem"]) for line in lines[1:] if isinstance(line, dict) and "problem" in line),
    )


def _processes(
    header: dict[str, Any], described: dict[int, dict[str, Any]], samples: list[Any]
) -> dict[int, ProcessSamples]:
    times: dict[int, list[int]] = {pid: [] for pid in described}
    rows: dict[int, list[list[float | None]]] = {pid: [] for pid in described}
    for sample in samples:
        for pid, *values in sample[3]:
            if pid in described:
                times[pid].append(sample[0])
                rows[pid].append(values)
    return {
        pid: ProcessSamples(
            rank=int(entry.get("rank", -1)),
            kind=str(entry.get("kind", "")),
            cores=str(entry.get("cores", "")),
            table=_table(header, "process_columns", np.array(times[pid], dtype=np.int64), rows[pid]),
        )
        for pid, entry in described.items()
    }


def _table(header: dict[str, Any], key: str, time: Int64, rows: list[list[float | None]]) -> SampleTable:
    columns = tuple(header.get(key, ()))
    values = np.array(
        [row if len(row) == len(columns) else [None] * len(columns) for row in rows], dtype=np.float64
    ).reshape(len(rows), len(columns))
    return SampleTable(columns, time, values)


def _covered(time: Int64, start_ns: int, end_ns: int) -> tuple[int, int] | None:
    """The part of an interval that samples span; None where that is too little of it."""
    if len(time) < 2:
        return None
    first, last = max(start_ns, int(time[0])), min(end_ns, int(time[-1]))
    return (first, last) if last - first >= math.ceil(LEAST_COVER * (end_ns - start_ns)) and last > first else None
