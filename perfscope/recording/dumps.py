"""What a job that stands still leaves: dumps of torch's flight recorder, and stacks of its ranks' threads.

They lie in a recording under its own names, elsewhere under those that torch, py-spy and users give them. The content
decides what a file is, its name only which rank it is of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import field
from pathlib import Path
from typing import Final

from perfscope.frozen import dataclass
from perfscope.recording import paths, remote
from perfscope.recording.captures import rank_in_name

STACK_SUFFIXES: Final = (".stack", ".stacks", ".txt")

_HEAD_BYTES: Final = 4096
_LAST_NUMBER: Final = re.compile(
    r"(\d{1,9})(?:\.(?:flight|json|pickle|pkl|pt|bin|dump|gz|zst|stacks?|txt))*$", re.IGNORECASE
)
"""``_dump_3``, ``nccl_trace_rank_3``, ``comm_lib_trace_rank_3``, ``rank3.pickle``: torch puts the rank last."""
_PICKLE: Final = re.compile(rb"\x80[\x02-\x05].{0,4000}?(?:pg_config|pg_status|comm_lib_version|entries)", re.DOTALL)
_JSON: Final = re.compile(
    rb'\s*\{\s*"(?:comm_lib_version|nccl_version|nccl_comm_state|entries|pg_config|pg_status|version)"\s*:'
)
_TRACE: Final = re.compile(rb'"(?:traceEvents|schemaVersion|distributedInfo|displayTimeUnit)"')
_STACK: Final = re.compile(
    rb"^(?:(?:Current thread|Thread) 0x[0-9a-fA-F]+|Thread (?:0x)?[0-9a-fA-F]+ \()", re.MULTILINE
)
"""How faulthandler and py-spy begin a thread."""


@dataclass(frozen=True)
class StuckFiles:
    """Dumps and stacks by rank, and those whose rank no name shows."""

    flights: dict[int, Path] = field(default_factory=dict)
    stacks: dict[int, Path] = field(default_factory=dict)
    unnamed: tuple[Path, ...] = ()
    second: tuple[Path, ...] = ()
    """Other dumps of ranks that have one."""

    def __bool__(self) -> bool:
        return bool(self.flights or self.stacks or self.unnamed)

    def others(self, files: Iterable[Path]) -> list[Path]:
        """``files`` without these."""
        own = {*self.flights.values(), *self.stacks.values(), *self.unnamed, *self.second}
        return [path for path in files if path not in own]


def find(files: Iterable[Path]) -> StuckFiles:
    """Those of ``files`` that are dumps or stacks. Of two of one rank the pickle is taken, which has stacks in it."""
    found = StuckFiles()
    unnamed, second = [], []
    for path in sorted(files, key=lambda entry: (entry.name.endswith(".json"), entry.name)):
        is_flight = is_flight_dump(path)
        if not is_flight and not _is_stack(path):
            continue
        rank = _rank_of(path)
        if rank is None:
            unnamed.append(path)
        elif (found.flights if is_flight else found.stacks).setdefault(rank, path) != path:
            second.append(path)
    return StuckFiles(found.flights, found.stacks, tuple(unnamed), tuple(second))


def is_flight_dump(path: Path) -> bool:
    """Does a file hold a flight-recorder dump? Of remote files only the name is looked at, unless it may be one."""
    if paths.rank_of_flight_file(path) is not None:
        return True
    if remote.is_remote(path) and not re.search(r"(?:dump|trace_rank|flight)\w*$", path.name.split(".")[0]):
        return False
    head = _head(path)
    return bool(_PICKLE.match(head)) or bool(_JSON.match(head) and not _TRACE.search(head))


def _is_stack(path: Path) -> bool:
    if paths.rank_of_stacks_file(path) is not None:
        return True
    return path.name.endswith(STACK_SUFFIXES) and _STACK.search(_head(path)) is not None


def _head(path: Path) -> bytes:
    try:
        return remote.read_head(path, _HEAD_BYTES)
    except OSError:
        return b""


def _rank_of(path: Path) -> int | None:
    rank = rank_in_name(path)
    if rank is not None:
        return rank
    match = _LAST_NUMBER.search(path.name)
    return int(match[1]) if match else None
