"""Each training that a command runs is a job with a recording of its own: the first lies in the recording's folder,
further ones in folders ``job-N`` of it.

A notebook's cell may train alone before it launches ranks; a script may start two trainings side by side, each of which
takes itself for rank 0. Processes are of one job where they agree on its size, on the port where its ranks meet and on
their role, and where no other process records the same rank.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from perfscope.collectors.agreement import open_board
from perfscope.collectors.claims import Claim, claim_rank, holders, write_first, write_over
from perfscope.collectors.identity import Identity, attempt, rendezvous
from perfscope.recording.metadata import RunMetadata, load_run
from perfscope.recording.paths import BOOTSTRAP_FOLDER, LAUNCH_FILE, job_folder, run_file

MOST_JOBS: Final = 8
"""Recordings that one command makes: a search over settings may run hundreds of trainings."""

MOST_JOBS_OF_ROLES: Final = 64
"""The same for processes that state a role: each that generates may be a job of its own."""

JOB_FILE: Final = "claim-job.json"
"""In a job's bootstrap folder: what its processes have in common."""


@dataclass(frozen=True)
class _Traits:
    """What the processes of one job have in common."""

    world_size: int
    port: str
    """Where the ranks meet; empty where the environment does not say. Not the host: it may have several names."""
    first: Claim
    """The first of its processes; of a later attempt, where that made its size or port another."""
    role: str = ""
    """What part of a job of several roles it is (``role.stated_role``)."""

    def agree(self, other: _Traits) -> bool:
        """May processes with these be of one job?"""
        same = (self.world_size, self.role) == (other.world_size, other.role)
        return same and len({self.port, other.port} - {""}) < 2


def join_job(folder: Path, identity: Identity, role: str = "") -> Path | Claim:
    """The folder in which this process records its rank, made where it is missing; who records the rank, where this
    process is not to. Raises OSError when the folder cannot be written.
    """
    me = Claim.mine(attempt())
    mine = _Traits(identity.world_size, rendezvous(os.environ).rpartition(":")[2], me, role)
    holder = me
    for place in (job_folder(folder, each) for each in range(MOST_JOBS_OF_ROLES if role else MOST_JOBS)):
        if place != folder:
            _open(place, folder)
        if not _agrees(place, mine):
            continue
        recorded = earlier_run(place, identity.rank) is not None
        kept = claim_rank(place, identity.rank, me.attempt, recorded=recorded)
        if kept is None:
            return place
        holder = kept
        if kept.attempt > me.attempt:
            break  # the job was restarted without this process
    return holder


def earlier_run(folder: Path, rank: int) -> RunMetadata | None:
    """What an earlier process recorded of a rank; None where none did."""
    try:
        earlier = load_run(run_file(folder, rank))
    except ValueError:
        return None
    return earlier if earlier.captures else None


def _open(place: Path, folder: Path) -> None:
    """Make the folder of a further job, if this is the first process that looks there."""
    (place / BOOTSTRAP_FOLDER).mkdir(parents=True, exist_ok=True)
    open_board(place)
    with suppress(FileNotFoundError):
        shutil.copyfile(folder / LAUNCH_FILE, place / LAUNCH_FILE)


def _agrees(place: Path, mine: _Traits) -> bool:
    """Is this process of the job in ``place``? The first to look decides what job that is."""
    path = place / BOOTSTRAP_FOLDER / JOB_FILE
    if write_first(path, asdict(mine)):
        return True
    there = _read(path)
    if there is not None and mine.first.attempt <= there.first.attempt:
        if mine.agree(there) or mine.first.attempt < there.first.attempt:
            return True
        if there.first.alive() or any(_keeps(place, rank, claim) for rank, claim in holders(place)):
            return False
    write_over(path, asdict(mine), mine.first)
    return True


def _keeps(place: Path, rank: int, claim: Claim) -> bool:
    """Does a process record this rank there, or has it?"""
    return claim.alive() or earlier_run(place, rank) is not None


def _read(path: Path) -> _Traits | None:
    """What the first process wrote; None where it died over it."""
    for _ in range(10):  # it may be about to
        with suppress(OSError, ValueError, TypeError):
            there = json.loads(path.read_text(encoding="utf-8"))
            return _Traits(**{**there, "first": Claim(**there["first"])})
        time.sleep(0.02)
    return None
