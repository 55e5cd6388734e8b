"""Logs of NCCL Inspector (nccl, ``ext-profiler/inspector``) and of RCCL's: a line for each operation of one process.

Format ``v4.0``, as ``inspector.cc`` and RCCL's documentation describe it: ``header`` (communicator, rank in it),
``metadata`` (host, process), and ``coll_perf`` or ``p2p_perf``. Fields of other plugins of the same form
(``coll_algo``, ``coll_proto``, ``coll_n_channels``) are read where they are. The plugin's thread logs the last
operation of each communicator at every interval, so operations may be missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from perfscope.analyzers.readers import sources
from perfscope.analyzers.readers.plain_values import mapping, text, whole
from perfscope.errors import TraceError
from perfscope.redact import redact_value
from perfscope.typed import MOST_RANKS

MAX_BYTES: Final = 2 << 30
MAX_LINE: Final = 1 << 20
"""Characters of a line; a verbose one has an entry for each of 64 channels."""
MAX_RECORDS: Final = 2_000_000
_PERFORMANCE: Final = ("coll_perf", "p2p_perf")
"""A line without either is about a communicator alone, and is nothing that is lost."""
_PIECE: Final = 1 << 20
_SHORTEST_US: Final = 1e-3
"""No kernel takes less than a nanosecond; the bandwidth of a number near 0 has no end."""


class Operation(NamedTuple):
    """One operation of one process."""

    communicator: str
    """Its hash."""
    name: str
    """What the application calls it; empty where unset."""
    rank: int
    """In the communicator."""
    size: int
    nodes: int
    host: str
    process: int
    operation: str
    """``AllReduce``, ``Send`` …"""
    sequence: int
    """Of collectives and, apart from them, sends and recvs of the communicator."""
    p2p: bool
    bytes: int
    """As logged."""
    us: float
    timing: str
    algorithm: str
    protocol: str
    channels: int


class Log(NamedTuple):
    """The operations of one file, and how many of its lines could not be used."""

    operations: list[Operation]
    damaged: int


def read(path: Path) -> Log:
    """Read one log. Raises TraceError, naming the file, where it holds no operation or cannot be read."""
    operations: list[Operation] = []
    damaged = 0
    decoder = msgspec.json.Decoder()
    for line in _lines(path):
        try:
            record = decoder.decode(line)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            damaged += 1
            continue
        found = _operation(record)
        if found is not None:
            operations.append(found)
        elif not isinstance(record, dict) or "header" not in record or not record.keys().isdisjoint(_PERFORMANCE):
            damaged += 1
        if len(operations) > MAX_RECORDS:
            raise TraceError(
                f"{path}: more than {MAX_RECORDS:,} operations; log fewer with a longer "
                "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS"
            )
    if not operations:
        raise TraceError(
            f"{path}: holds no operation of NCCL Inspector; run with NCCL_INSPECTOR_ENABLE=1 and, for small "
            "operations, NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES=0"
        )
    return Log(operations, damaged)


def _lines(path: Path) -> Iterator[bytes]:
    """Each line but empty ones; longer ones than ``MAX_LINE`` are cut, and so are damaged."""
    rest, total = bytearray(), 0
    piece = memoryview(bytearray(_PIECE))
    with sources.opened(path) as source:
        while got := source.readinto(piece):
            total += got
            if total > MAX_BYTES:
                raise TraceError(f"{path}: larger than {MAX_BYTES >> 30} GiB; log fewer operations")
            rest += piece[:got]
            *lines, last = rest.split(b"\n")
            yield from (bytes(line[:MAX_LINE]) for line in lines if line.strip())
            rest = last[: MAX_LINE + 1]
    if rest.strip():
        yield bytes(rest)


def _operation(record: Any) -> Operation | None:
    """The operation of one line; None where it is none."""
    document = mapping(record)
    p2p = "p2p_perf" in document
    prefix, header = ("p2p" if p2p else "coll"), mapping(document.get("header"))
    done, process = mapping(document.get(f"{prefix}_perf")), mapping(document.get("metadata"))
    us, size = done.get(f"{prefix}_exec_time_us"), whole(header.get("n_ranks"))
    if not isinstance(us, (int, float)) or not _SHORTEST_US <= us < 1e12 or not 1 <= size <= MOST_RANKS:
        return None
    name, rank = text(header.get("comm_name")), whole(header.get("rank"), -1)
    return Operation(
        communicator=text(header.get("id")),
        name="" if name == "unknown" else redact_value(name),
        rank=rank if 0 <= rank < MOST_RANKS else -1,
        size=size,
        nodes=max(whole(header.get("nnodes"), 1), 1),
        host=text(process.get("hostname")),
        process=whole(process.get("pid")),
        operation=text(done.get(prefix)),
        sequence=whole(done.get(f"{prefix}_sn"), -1),
        p2p=p2p,
        bytes=max(whole(done.get(f"{prefix}_msg_size_bytes")), 0),
        us=float(us),
        timing=text(done.get(f"{prefix}_timing_source")),
        algorithm=text(done.get(f"{prefix}_algo")),
        protocol=text(done.get(f"{prefix}_proto")),
        channels=whole(done.get(f"{prefix}_n_channels")),
    )
