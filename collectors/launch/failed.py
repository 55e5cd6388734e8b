"""How ranks ended: what they wrote themselves, and what torchrun saw. A rank that is killed, or leaves by ``os._exit``,
writes nothing at its end.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

from perfscope.collectors.config import CollectorConfig
from perfscope.collectors.ending import uncaught
from perfscope.grouping import grouped
from perfscope.recording.metadata import RunMetadata, load_run, save
from perfscope.recording.paths import further_jobs, run_file
from perfscope.text import ranks_in_words

_ERRORS: Final = "torch.distributed.elastic.multiprocessing.errors"
"""Module of the exception with which torchrun ends where ranks failed."""


_LINES: Final = 3
"""Different ends that are reported; the page has all."""

_MESSAGE_SHOWN: Final = 160
"""Characters of an exception's message."""


def failed_ranks(runs: Iterable[RunMetadata]) -> list[str]:
    """A line for ranks that failed in one way, the first to end first."""
    ends = sorted((run.ended_at or "~", run.rank, words) for run in runs if (words := _failed(run)))
    together = grouped((words, rank) for _, rank, words in ends)
    return [f"{ranks_in_words(ranks)} {words}" for words, ranks in together.items()][:_LINES]


def _failed(run: RunMetadata) -> str:
    """How a rank failed; empty where it did not, or a launcher ended it because others had."""
    if run.error is not None:
        message = run.error.message.strip().partition("\n")[0]
        told = f": {message[:_MESSAGE_SHOWN]}{'…' * (len(message) > _MESSAGE_SHOWN)}" if message else ""
        return f"raised {run.error.type}{told}"
    if run.exit_code in (None, 0, -signal.SIGTERM):
        return ""
    return f"ended by signal {-run.exit_code}" if run.exit_code < 0 else f"ended with exit code {run.exit_code}"


def note_failed_ranks(folder: str) -> None:
    """An exception ends a process that launches ranks: put their exit codes into their metadata. ``folder`` is the
    bootstrap's.
    """
    kind = getattr(sys.modules.get(_ERRORS), "ChildFailedError", None)
    error: Any = uncaught()
    if kind is None or not isinstance(error, kind):
        return
    recording = CollectorConfig.load(Path(folder)).folder
    for rank, failure in error.failures.items():
        for job in (recording, *further_jobs(recording)):
            with suppress(OSError, ValueError):  # it left no metadata in this one
                _note(run_file(job, rank), failure)


def _note(path: Path, failure: Any) -> None:
    """Raises OSError, and ValueError without metadata."""
    run = load_run(path)
    if run.pid != failure.pid:
        return
    ended_at = datetime.fromtimestamp(failure.timestamp, timezone.utc).isoformat(timespec="milliseconds")
    save(replace(run, exit_code=failure.exitcode, ended_at=run.ended_at or ended_at), path)
