"""Execution traces of PyTorch (``torch.profiler.ExecutionTraceObserver``) among a folder's files.

They hold operators with shapes, tensors and process groups, but no times: they complete the traces beside them.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from perfscope.recording import paths, remote
from perfscope.recording.captures import TraceSource, natural, rank_in_name

_SUFFIXES: Final = (".json", ".json.gz")
_HEAD_BYTES: Final = 1024
_HEAD: Final = re.compile(rb'\s*\{\s*"schema"\s*:\s*"\d[\w.-]*"\s*,\s*"pid"\s*:\s*(\d+)')
"""How the observer begins a file, of any version of its schema."""
_HINT: Final = re.compile(r"(?:^|[^a-z])et(?:[^a-z]|$)|execution|chakra", re.IGNORECASE)
"""In the names of remote files that are looked into: each look is a request to the store."""
_GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS
_WORKER_PID: Final = re.compile(r"_(\d+)\.\d{10,}\.pt\.trace\.json")
"""In names that torch.profiler's tensorboard_trace_handler gives."""


def find(files: Iterable[Path]) -> dict[Path, int]:
    """Those of ``files`` that are execution traces, by content, with the process that each is of."""
    found = {path: process_of(path) for path in files if _may_be_one(path)}
    return {path: pid for path, pid in found.items() if pid is not None}


def process_of(path: Path) -> int | None:
    """The id of the process that an execution trace is of; None for other files."""
    try:
        head = remote.read_head(path, _HEAD_BYTES)
        if head[:2] == b"\x1f\x8b":
            head = zlib.decompressobj(_GZIP_WINDOW).decompress(head)
    except (OSError, zlib.error):
        return None
    match = _HEAD.match(head)
    return int(match[1]) if match else None


def beside(
    sources: Sequence[TraceSource], found: Mapping[Path, int], capture: int | None
) -> tuple[tuple[TraceSource, ...], list[Path]]:
    """The traces with the execution trace of each, and the execution traces of which nothing shows the rank.

    ``capture`` is the number of the capture that ``sources`` are of, where this project recorded it. Of several of a
    rank the last one counts.
    """
    of_rank: dict[int, Path] = {}
    of_process: dict[int, Path] = {}
    nameless = []
    for path in sorted(found, key=lambda each: natural(each.name)):
        named = paths.rank_and_capture_of_execution_trace(path)
        if named is not None and capture is not None and named[1] != capture:
            continue
        rank = rank_in_name(path) if named is None else named[0]
        if rank is not None:
            of_rank[rank] = path
        else:
            nameless.append(path)
            of_process[found[path]] = path
    if len(sources) == len(found) == 1:
        return (replace(sources[0], execution=next(iter(found))),), []
    complete = []
    for source in sources:
        pid = _WORKER_PID.search(source.path.name)
        own = of_process.get(int(pid[1])) if pid else None
        if own is None and source.named_rank is not None:
            own = of_rank.get(source.named_rank)
        complete.append(replace(source, execution=own))
    used = {source.execution for source in complete}
    return tuple(complete), [path for path in nameless if path not in used]


def _may_be_one(path: Path) -> bool:
    if not path.name.endswith(_SUFFIXES) or paths.rank_and_capture_of_trace_file(path) is not None:
        return False
    return not remote.is_remote(path) or _HINT.search(path.name) is not None
