"""Reads the samples of a host (as ``perfscope.recording.samples`` defines them) and averages them over an interval."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import numpy as np

from perfscope.frozen import dataclass
from perfscope.recording.samples import SCHEMA, SampledProcess, SamplerHeader
from perfscope.trace.trace import Float64, Int64
from perfscope.typed import WrongValue, build, clean

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


_Row = list[float | None]
_Sample = tuple[Annotated[int, msgspec.Meta(ge=0, le=2**62)], _Row, list[_Row], list[_Row]]
"""Time, values of the host, of each device, and of each process after its id."""


@dataclass(frozen=True, eq=False)
class ProcessSamples:
    """One process of the job."""

    described: SampledProcess
    table: SampleTable


@dataclass(frozen=True, eq=False)
class HostSamples:
    """One run of a sampler on one host."""

    header: SamplerHeader
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
    return [run for part in parts if (run := _of_run(part)) is not None]


@dataclass(eq=False)
class _Run:
    """The lines that follow a header, up to the next."""

    header: SamplerHeader
    processes: dict[int, SampledProcess] = field(default_factory=dict)
    samples: list[_Sample] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def _runs(lines: Iterable[bytes], start_ns: int, end_ns: int) -> Iterator[_Run]:
    """Decoded lines by header; samples outside the interval are not decoded: jobs run for days."""
    decode, decode_sample = msgspec.json.Decoder(dict[str, Any]).decode, msgspec.json.Decoder(_Sample).decode
    current: _Run | None = None
    for line in lines:
        # A damaged line is left out; before the first header nothing says what values mean.
        with suppress(msgspec.MsgspecError, ValueError, WrongValue, RecursionError):
            if line.startswith(b"["):
                if current is not None and start_ns <= int(line[1 : line.index(b",")]) <= end_ns:
                    current.samples.append(decode_sample(line))
                continue
            value = decode(line) if not line.isspace() else {}
            if value.get("schema") == SCHEMA:
                if current is not None:
                    yield current
                current = _Run(build(SamplerHeader, value, []))
            elif current is not None and "process" in value:
                met = build(SampledProcess, value, [])
                current.processes[met.process] = met
            elif current is not None and "problem" in value:
                current.problems.append(clean(str(value["problem"])))
    if current is not None:
        yield current


def _of_run(run: _Run) -> HostSamples | None:
    if not run.samples:
        return None
    samples = sorted(run.samples, key=lambda sample: sample[0])  # a host's clock may be set back
    time = np.array([sample[0] for sample in samples], dtype=np.int64)
    header, count = run.header, min(len(sample[2]) for sample in samples)
    return HostSamples(
        header=header,
        table=_table(header.host_columns, time, [sample[1] for sample in samples]),
        devices=tuple(
            _table(header.device_columns, time, [sample[2][index] for sample in samples]) for index in range(count)
        ),
        processes=_processes(run, samples),
        problems=tuple(run.problems),
    )


def _processes(run: _Run, samples: list[_Sample]) -> dict[int, ProcessSamples]:
    times: dict[int, list[int]] = {pid: [] for pid in run.processes}
    rows: dict[int, list[_Row]] = {pid: [] for pid in run.processes}
    for time, _, _, processes in samples:
        for values in processes:
            pid = int(values[0]) if values and values[0] is not None else -1
            if pid in rows:
                times[pid].append(time)
                rows[pid].append(values[1:])
    return {
        pid: ProcessSamples(met, _table(run.header.process_columns, np.array(times[pid], dtype=np.int64), rows[pid]))
        for pid, met in run.processes.items()
    }


def _table(columns: tuple[str, ...], time: Int64, rows: list[_Row]) -> SampleTable:
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
