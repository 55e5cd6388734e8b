"""The load of hosts, devices and processes, from the system sampler's files as they grow."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import field
from typing import Any, Final

import msgspec

from perfscope.analyzers.live.source import Entry, Piece, Source, Tail, read_all
from perfscope.analyzers.live.state import DeviceLoad, HostLoad
from perfscope.frozen import dataclass
from perfscope.recording.samples import RANK, SCHEMA, SampledProcess, SamplerHeader
from perfscope.typed import WrongValue, build, clean

SPAN_S: Final = 5.0
"""Load is the mean of so many seconds."""

_HEAD_BYTES: Final = 256 << 10
_TAIL_BYTES: Final = 256 << 10
"""Of a long file: its beginning, which says what is in it, and its end."""

_MOST_SAMPLES: Final = 32
"""Of a host, in memory."""

_LAST_LINES: Final = 12
"""Samples of one look that are decoded: six seconds of them."""

_Sample = list[Any]


@dataclass
class _Host:
    tail: Tail = field(default_factory=Tail)
    header: SamplerHeader | None = None
    ranks: dict[int, int] = field(default_factory=dict)
    """Process -> its rank; of loader workers too."""
    rank_processes: dict[int, int] = field(default_factory=dict)
    """Rank -> its process."""
    samples: deque[_Sample] = field(default_factory=lambda: deque(maxlen=_MOST_SAMPLES))


class Hosts:
    """The load of every host that is sampled."""

    def __init__(self) -> None:
        self._hosts: dict[str, _Host] = {}

    def read(self, source: Source, entries: dict[str, Entry], names: Iterable[str]) -> None:
        """Read what is new in the files of these names."""
        pieces: list[Piece] = []
        for name in names:
            entry = entries[name]
            host = self._hosts.setdefault(name, _Host())
            if entry.size < host.tail.offset:
                host = self._hosts[name] = _Host()
            if host.header is not None and entry.size - host.tail.offset > _TAIL_BYTES:
                host.tail = Tail(entry.size - _TAIL_BYTES)
            piece = host.tail.piece(name, entry.size, _HEAD_BYTES if host.header is None else _TAIL_BYTES)
            if piece is not None:
                pieces.append(piece)
        read_all(source, pieces, self._take)

    def loads(self) -> list[HostLoad]:
        """Of each host, as of its last samples."""
        return [load for host in self._hosts.values() if (load := _load(host)) is not None]

    def ended(self) -> set[int]:
        """Ranks whose process was there and is no more, while their host is still sampled."""
        gone = set()
        for host in self._hosts.values():
            if host.samples:
                alive = {row[0] for row in _processes(host.samples[-1])}
                gone |= {rank for rank, process in host.rank_processes.items() if process not in alive}
        return gone

    def _take(self, piece: Piece, data: bytes) -> None:
        host = self._hosts[piece.name]
        whole = host.tail.take(data)
        lines, _, rest = whole.rpartition(b"\n")
        host.tail.keep(rest if len(rest) < _TAIL_BYTES else b"")
        samples = []
        for line in lines.split(b"\n"):
            if line.startswith(b"["):
                samples.append(line)
            elif line:
                if samples and line.startswith(b'{"schema"'):
                    samples.clear()
                with suppress(msgspec.MsgspecError, ValueError, WrongValue, RecursionError):
                    _describe(host, msgspec.json.decode(line, type=dict[str, Any]))
        for line in samples[-_LAST_LINES:]:
            with suppress(msgspec.MsgspecError, ValueError, RecursionError):
                sample = msgspec.json.decode(line)
                if _is_sample(sample):
                    host.samples.append(sample)


def _describe(host: _Host, value: dict[str, Any]) -> None:
    """A header, or a process that was met. Raises WrongValue."""
    if value.get("schema") == SCHEMA:
        host.header = build(SamplerHeader, value, [])
        host.ranks.clear()
        host.rank_processes.clear()
        host.samples.clear()
    elif "process" in value:
        met = build(SampledProcess, value, [])
        host.ranks[met.process] = met.rank
        if met.kind == RANK:
            host.rank_processes[met.rank] = met.process


def _is_sample(value: Any) -> bool:
    """Is it as long and as nested as a sample, with a time? Its numbers are checked where they are used."""
    return (
        isinstance(value, list)
        and len(value) == 4
        and isinstance(value[0], int)
        and all(isinstance(part, list) for part in value[1:])
        and all(isinstance(row, list) for part in value[2:] for row in part)
    )


def _processes(sample: _Sample) -> list[list[float | None]]:
    return [row for row in sample[3] if row and _number(row[0]) is not None]


def _load(host: _Host) -> HostLoad | None:
    header, samples = host.header, host.samples
    if header is None or not samples:
        return None
    last = samples[-1]
    first = next((sample for sample in samples if last[0] - sample[0] <= SPAN_S * 1e9 and sample is not last), None)
    span_ns = last[0] - first[0] if first is not None else 0
    before, after = (dict(zip(header.host_columns, each[1], strict=False)) for each in (first or last, last))
    return HostLoad(
        host=clean(header.host),
        cores=header.cores,
        time_ns=last[0],
        cpu_share=_cpu_share(before, after),
        memory_used_bytes=_number(after.get("memory_used_bytes")),
        memory_bytes=header.memory_bytes,
        devices=_devices(header, [sample for sample in samples if last[0] - sample[0] <= SPAN_S * 1e9]),
        cores_of_ranks=_cores(host, first, last, span_ns) if first is not None and span_ns > 0 else {},
    )


def _cpu_share(before: dict[str, Any], after: dict[str, Any]) -> float | None:
    """Share of the cores' time that is neither idle nor waits for I/O."""
    grown = {}
    for name in ("user_ms", "system_ms", "steal_ms", "idle_ms", "iowait_ms"):
        low, high = _number(before.get(name)), _number(after.get(name))
        grown[name] = max(high - low, 0.0) if low is not None and high is not None else 0.0
    total = sum(grown.values())
    return (grown["user_ms"] + grown["system_ms"] + grown["steal_ms"]) / total if total > 0 else None


def _devices(header: SamplerHeader, samples: list[_Sample]) -> tuple[DeviceLoad, ...]:
    loads = []
    for place, device in enumerate(header.devices):
        rows = [
            dict(zip(header.device_columns, sample[2][place], strict=False))
            for sample in samples
            if len(sample[2]) > place
        ]
        last = rows[-1] if rows else {}
        power = _mean(row.get("power_mw") for row in rows)
        utilisation = _mean(row.get("utilisation") for row in rows)
        loads.append(
            DeviceLoad(
                index=device.index,
                name=clean(device.name),
                uuid=device.uuid.removeprefix("GPU-"),
                utilisation=None if utilisation is None else utilisation / 100,
                memory_used_bytes=_number(last.get("memory_used_bytes")),
                memory_bytes=device.memory_bytes,
                power_w=None if power is None else power / 1000,
                temperature_c=_number(last.get("temperature_c")),
                sm_mhz=_number(last.get("sm_mhz")),
            )
        )
    return tuple(loads)


def _cores(host: _Host, first: _Sample, last: _Sample, span_ns: int) -> dict[int, float]:
    """Rank -> cores' worth of time that it and its loader workers used."""
    place = (
        1 + host.header.process_columns.index("cpu_ms")
        if host.header and "cpu_ms" in host.header.process_columns
        else 0
    )
    before = {row[0]: row[place] for row in _processes(first) if place and len(row) > place}
    used: dict[int, float] = {}
    for row in _processes(last):
        low = _number(before.get(row[0]))
        high = _number(row[place]) if place and len(row) > place else None
        rank = host.ranks.get(int(row[0] or 0))
        if rank is not None and low is not None and high is not None and high >= low:
            used[rank] = used.get(rank, 0.0) + (high - low) * 1e6 / span_ns
    return used


def _mean(values: Iterable[Any]) -> float | None:
    known = [number for value in values if (number := _number(value)) is not None]
    return sum(known) / len(known) if known else None


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
