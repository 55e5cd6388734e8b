"""One process records a rank: the first to claim it, or its successor after an elastic restart.

The claim is a file whose creation succeeds for one process alone, also on a shared file system.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perfscope.recording.paths import BOOTSTRAP_FOLDER, host_in_name


@dataclass(frozen=True)
class Claim:
    """Who records a rank."""

    host: str
    pid: int
    started: str
    """When the process started, as the kernel counts it: a later process with the same pid has another."""
    attempt: int
    """Elastic restarts before it."""

    @classmethod
    def mine(cls, attempt: int) -> Claim:
        """The claim that this process would make."""
        return cls(socket.gethostname(), os.getpid(), _start_time(os.getpid()), attempt)

    def alive(self) -> bool:
        """Does the process still run? One on another host counts as alive, since nothing here can find out."""
        if self.host != socket.gethostname():
            return True
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return _start_time(self.pid) == self.started


def claim_rank(folder: Path, rank: int, attempt: int, *, recorded: bool) -> Claim | None:
    """Claim a rank of the recording in ``folder`` for this process; the present holder if it keeps the claim.

    A later attempt takes over from an earlier one. Within one attempt a dead holder is replaced unless it left a
    recording of this rank (``recorded``). Raises OSError when the folder cannot be written.
    """
    return _claim(_path(folder, f"{rank:05d}"), attempt, recorded=recorded)


def claim_host(folder: Path, attempt: int) -> Claim | None:
    """Claim to be the process that has this host sampled, as ``claim_rank`` does; the present holder if it keeps it."""
    return _claim(_path(folder, f"host-{host_in_name(socket.gethostname())}"), attempt, recorded=False)


def holder_of_rank(folder: Path, rank: int) -> Claim | None:
    """Who has claimed a rank; None where nobody has, or the claim is unreadable."""
    return _read(_path(folder, f"{rank:05d}"))


def holders(folder: Path) -> Iterator[tuple[int, Claim]]:
    """Every rank that has been claimed, and who did."""
    for path in (folder / BOOTSTRAP_FOLDER).glob("claim-*.json"):
        rank = path.stem.removeprefix("claim-")
        if rank.isdecimal() and (claim := _read(path)) is not None:
            yield int(rank), claim


def _path(folder: Path, what: str) -> Path:
    return folder / BOOTSTRAP_FOLDER / f"claim-{what}.json"


def _claim(path: Path, attempt: int, *, recorded: bool) -> Claim | None:
    mine = Claim.mine(attempt)
    if write_first(path, asdict(mine)):
        return None
    holder = _read(path)
    if holder is not None and holder != mine:
        keeps = holder.alive() if holder.attempt == attempt else holder.attempt > attempt
        if keeps or (recorded and holder.attempt == attempt):
            return holder
    write_over(path, asdict(mine), mine)
    return None


def write_first(path: Path, record: Mapping[str, Any]) -> bool:
    """Write a file that nobody has written yet; False where it is there. Raises OSError."""
    try:
        with path.open("x", encoding="utf-8") as file:
            json.dump(record, file)
    except FileExistsError:
        return False
    return True


def write_over(path: Path, record: Mapping[str, Any], mine: Claim) -> None:
    """Replace a file whole, by way of a name that only this process has on any host. Raises OSError."""
    replacement = path.with_name(f"{path.name}.{mine.host}-{mine.pid}")
    replacement.write_text(json.dumps(record), encoding="utf-8")
    replacement.replace(path)


def _read(path: Path) -> Claim | None:
    """The claim in a file; None where it is unreadable, as when its writer died over it."""
    try:
        return Claim(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _start_time(pid: int) -> str:
    """Field 22 of ``/proc/PID/stat``; empty where there is no such file. The name before it may hold spaces."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
