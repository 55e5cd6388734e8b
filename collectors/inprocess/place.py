"""Where a recording that the program starts lies: the same folder on all ranks, and never one of another recording.

No launcher prepares the folder here, so the ranks do. They agree on an identity of the recording, and the first of them
to open the folder writes it there; the others find it. A folder with another recording is left alone: a number is put
after the name, and all ranks of the job count alike. Nodes without a shared file system each open a folder of theirs.

The identity travels through the store of ``torch.distributed``: the first to ask sets it, nobody waits, and no
collective is added to the job's own. Where there is no process group it is made of what the launcher's variables say.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from perfscope.collectors.agreement import open_board
from perfscope.collectors.claims import holder_of_rank, write_first
from perfscope.collectors.config import CollectorConfig
from perfscope.collectors.identity import Identity, attempt, identify
from perfscope.collectors.jobs import earlier_run
from perfscope.collectors.launch.folder import describe_launch, holds_recording, remove_recording
from perfscope.recording.metadata import LaunchMetadata, load_launch, now, save
from perfscope.recording.paths import BOOTSTRAP_FOLDER, LAUNCH_FILE
from perfscope.recording.whole import write_text

OPENED_FILE: Final = "opened.json"
"""In the bootstrap folder: which recording the folder is of."""

MOST_FOLDERS: Final = 1000
"""Numbers that are tried."""

PATIENCE_S: Final = 30.0
"""How long to wait for another rank that removes an older recording."""

JOB_VARIABLES: Final = (
    "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "PMI_JOBID", "FLUX_JOB_ID",
    "TRAINING_JOB_NAME", "MASTER_ADDR",
)  # fmt: skip
"""What launchers set alike on all ranks of a job, and after elastic restarts too."""


@dataclass(frozen=True)
class Opened:
    """What a folder says about its recording."""

    identity: str
    """Of the recording: no other has it."""
    job: str
    """Of the job, as its launcher names it; not always different from a later job's."""
    attempt: int
    """Elastic restarts before it was opened."""


def agree(name: str, identity: Identity) -> str:
    """The identity of a recording, the same on all ranks that ask with this ``name``."""
    mine = uuid.uuid4().hex
    with suppress(Exception):  # a store of another kind, or one that is gone
        distributed: Any = sys.modules["torch.distributed.distributed_c10d"]
        if identity.backend:
            answer = distributed._get_default_store().compare_set(f"perfscope/{name}", "", mine)
            return str(answer.decode() if isinstance(answer, bytes) else answer)
    if identity.world_size == 1:
        return mine
    return hashlib.sha256(f"{name} {_job()} {os.environ.get('MASTER_PORT', '')}".encode()).hexdigest()[:32]


def settle(config: CollectorConfig, name: str, *, overwrite: bool) -> tuple[CollectorConfig, bool]:
    """``config`` with the folder that this rank's recording goes to, prepared; was it this process that opened it?

    ``name`` tells recordings of one process apart, alike on all ranks. Raises OSError where no folder can be written.
    """
    identity = identify()
    mine = Opened(agree(name, identity), _job(), attempt())
    folder, first = _open(config.folder, mine, identity.rank, overwrite=overwrite)
    config = replace(config, output=str(folder))
    open_board(folder)
    if first:
        config.save(folder / BOOTSTRAP_FOLDER)
        save(describe_launch(config, [os.path.basename(sys.orig_argv[0]), *sys.orig_argv[1:]]), folder / LAUNCH_FILE)  # noqa: PTH119 - a mere name
    return config, first


def finish(folder: Path, exit_code: int | None) -> None:
    """The process that opened the recording says that it has ended; with its exit code, where that is known. Raises
    OSError.
    """
    with suppress(ValueError):
        record = load_launch(folder / LAUNCH_FILE)
        end = {"exit_code": exit_code, "ended": True, "ended_at": now("milliseconds")}
        save(LaunchMetadata(**{**vars(record), **end}), folder / LAUNCH_FILE)


def _open(wanted: Path, mine: Opened, rank: int, *, overwrite: bool) -> tuple[Path, bool]:
    if mine.attempt and (earlier := _of_earlier_attempt(wanted, mine)) is not None:
        return earlier, False
    number = 1
    while number <= MOST_FOLDERS:
        folder = _numbered(wanted, number)
        there = _read(folder)
        if there is not None and there.identity == mine.identity and not _left(folder, rank):
            return folder, False
        if there is None and not holds_recording(folder) and not _mark(folder, mine).exists():
            (folder / BOOTSTRAP_FOLDER).mkdir(parents=True, exist_ok=True)
            if write_first(folder / BOOTSTRAP_FOLDER / OPENED_FILE, asdict(mine)):
                return folder, True
            _wait_for(folder)
            continue
        if there is None and _read(folder) is not None:
            continue  # another rank has opened it since
        if overwrite and number == 1:
            overwrite = False
            if _replaced(folder, mine):
                return folder, True
            continue
        number += 1
    raise OSError(f"{wanted} and {MOST_FOLDERS - 1} folders after it hold recordings; choose another folder")


def _numbered(wanted: Path, number: int) -> Path:
    return wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")


def _of_earlier_attempt(wanted: Path, mine: Opened) -> Path | None:
    """The folder that this job recorded into before it was restarted: the last one with its name."""
    found = None
    for number in range(1, MOST_FOLDERS):
        folder = _numbered(wanted, number)
        if not folder.is_dir():
            break
        there = _read(folder)
        if there is not None and there.job == mine.job and there.attempt <= mine.attempt:
            found = folder
    return found


def _left(folder: Path, rank: int) -> bool:
    """Did a process that has ended record this rank there? Then what is there is of an earlier job."""
    holder = holder_of_rank(folder, rank)
    return holder is not None and not holder.alive() and earlier_run(folder, rank) is not None


def _mark(folder: Path, mine: Opened) -> Path:
    """There from when a rank of this recording begins to remove an older one."""
    return folder / BOOTSTRAP_FOLDER / f"opening-{mine.identity}"


def _replaced(folder: Path, mine: Opened) -> bool:
    """Remove an older recording, or wait until another rank of this job has; was it this process?

    The mark stays, and what says whose the folder is changes last and at once: a rank that comes meanwhile waits.
    """
    mark, opened = _mark(folder, mine), folder / BOOTSTRAP_FOLDER / OPENED_FILE
    mark.parent.mkdir(parents=True, exist_ok=True)
    if write_first(mark, asdict(mine)):
        remove_recording(folder, kept=(mark.name, OPENED_FILE))
        write_text(opened, json.dumps(asdict(mine)))
        return True
    _wait_for(folder, mine.identity)
    return False


def _wait_for(folder: Path, identity: str | None = None) -> None:
    """Until the folder says whose it is."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        there = _read(folder)
        if there is not None and identity in (None, there.identity):
            return
        time.sleep(0.02)
    raise OSError(f"another process has begun to open {folder}, and has not finished")


def _job() -> str:
    return " ".join(os.environ.get(variable, "") for variable in JOB_VARIABLES).strip()


def _read(folder: Path) -> Opened | None:
    with suppress(OSError, ValueError, TypeError):
        return Opened(**json.loads((folder / BOOTSTRAP_FOLDER / OPENED_FILE).read_text(encoding="utf-8")))
    return None
