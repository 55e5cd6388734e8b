"""Which rank of a failed job ended first, and for what reason; who failed in consequence."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from perfscope.analyzers.crash.lost_peer import is_of_communication, is_timeout
from perfscope.analyzers.hang.call_sites import waits_in_communication
from perfscope.analyzers.readers import stacks
from perfscope.analyzers.readers.flight import Frame
from perfscope.analyzers.readers.stacks import user_call
from perfscope.errors import TraceError
from perfscope.recording.job import Job
from perfscope.recording.metadata import CallMetadata, ErrorMetadata, RunMetadata
from perfscope.results.ending.crash import Crash, How, RankEnd
from perfscope.results.history import History

_ASKED: Final = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
"""Signals of launchers and users that end what has failed already, or is not wanted any more."""


_OF_SIGTERM: Final = ("SIGTERMException", "SignalException")
"""What Lightning and torchrun raise where a launcher ends them."""


def job_crash(job: Job, history: History | None) -> Crash | None:
    """How the job failed; None where it did not, or no rank is known to have ended for a reason of its own."""
    if job.launch is None or (job.launch.ended and job.launch.exit_code is None) or job.launch.exit_code == 0:
        return None
    runs = {rank: _with_error(job, run) for rank, run in sorted(job.runs.items())}
    causes = _causes(job, runs)
    if not causes:
        return None
    last = {row.rank: row.last_step + 1 for row in history.ranks} if history is not None else {}
    failed = [
        rank
        for rank, run in runs.items()
        if rank not in causes and (run.outcome == "exception" or run.exit_code not in (None, 0, *_ASKED))
    ]
    ends = (
        *(_end(runs[rank], how, last.get(rank, 0), is_cause=True) for rank, how in causes.items()),
        *(_end(runs[rank], _how(runs[rank]), last.get(rank, 0), is_cause=False) for rank in failed),
    )
    return Crash(cause_ranks=tuple(causes), ends=ends)


def _with_error(job: Job, run: RunMetadata) -> RunMetadata:
    """With what its stacks say of the exception, where the metadata of an older version do not."""
    path = job.stuck.stacks.get(run.rank)
    if run.outcome != "exception" or run.error is not None or path is None:
        return run
    try:
        kind, calls = stacks.read_uncaught(path)
    except TraceError:  # reported where the hang is looked for
        return run
    return replace(run, error=ErrorMetadata(type=kind, calls=tuple(map(_call, calls)))) if kind else run


def _causes(job: Job, runs: Mapping[int, RunMetadata]) -> dict[int, How]:
    """The ranks that ended first, for a reason of their own. Those of the first reason in this order that any has: an
    exception that is not of communication, a signal or an exit code, the end of the program before the others', an end
    that nothing saw.
    """
    errors = {rank: run.error for rank, run in runs.items() if run.outcome == "exception" and run.error is not None}
    lost = {rank for rank, error in errors.items() if _lost_peer(error)}
    own = _alike({rank: runs[rank] for rank in errors if rank not in lost and errors[rank].type not in _OF_SIGTERM})
    if own:
        return dict.fromkeys(own, "exception")
    killed = {
        rank: _how(run)
        for rank, run in runs.items()
        if run.exit_code not in (None, 0, *_ASKED)
        and rank not in errors
        and not (_stood_still(job, run) or _by_watchdog(run))
    }
    if killed or not lost:
        return _killed_alike(killed, runs)
    ended = [rank for rank, run in runs.items() if run.outcome == "finished"]
    if ended:
        return dict.fromkeys(ended, "return")
    if any(is_timeout(errors[rank]) or not errors[rank].message for rank in lost):
        return {}
    if len(lost) == max(run.world_size for run in runs.values()):
        return dict.fromkeys(_alike(runs), "exception")
    unseen = [rank for rank, run in runs.items() if rank not in lost and run.exit_code is None]
    return {} if any(_stood_still(job, runs[rank]) for rank in unseen) else dict.fromkeys(unseen, "unseen")


def _killed_alike(killed: Mapping[int, How], runs: Mapping[int, RunMetadata]) -> dict[int, How]:
    """Those of one exit code, signals first: a program that catches the exception of a lost peer may exit by itself."""
    if not killed:
        return {}
    first = min(killed, key=lambda rank: (killed[rank] != "signal", runs[rank].ended_at, rank))
    return {rank: how for rank, how in killed.items() if runs[rank].exit_code == runs[first].exit_code}


def _lost_peer(error: ErrorMetadata) -> bool:
    """Was it raised because of another rank? Without a message, was it raised in communication?"""
    if error.message:
        return is_of_communication(error)
    calls = tuple(_frames(error.calls))
    return bool(waits_in_communication((stacks.ThreadStack("MainThread", calls),)))


def _alike(runs: Mapping[int, RunMetadata]) -> list[int]:
    """The rank that ended first, and those that raised the same at the same place."""
    if not runs:
        return []
    first = min(runs, key=lambda rank: (runs[rank].ended_at or "~", rank))
    return [rank for rank, run in runs.items() if _reason(run.error) == _reason(runs[first].error)]


def _reason(error: ErrorMetadata | None) -> tuple[str, CallMetadata | None] | None:
    return (error.type, next(iter(error.calls), None)) if error is not None else None


def _stood_still(job: Job, run: RunMetadata) -> bool:
    """Had it written that it stood still, before something ended it?"""
    return run.error is None and run.rank in job.stuck.stacks


def _by_watchdog(run: RunMetadata) -> bool:
    """May NCCL's watchdog have ended it, because it waited for another rank for too long?"""
    return run.exit_code == -signal.SIGABRT and run.world_size > 1 and "nccl" in run.backend


def _how(run: RunMetadata) -> How:
    if run.outcome == "exception":
        return "exception"
    return "signal" if (run.exit_code or 0) < 0 else "exit"


def _end(run: RunMetadata, how: How, steps: int, *, is_cause: bool) -> RankEnd:
    """``steps``: those in its history, which the metadata of a rank that was killed, or left by ``os._exit``, do not
    count to the end.
    """
    error = run.error if how == "exception" else None
    call = user_call(tuple(_frames(error.calls))) if error is not None else None
    return RankEnd(
        rank=run.rank,
        how=how,
        is_cause=is_cause,
        steps=max(run.steps.seen, steps),
        counted=how not in ("signal", "unseen") and run.outcome != "running",
        error=error.type if error is not None else None,
        message=(error.message or None) if error is not None else None,
        file=call.file if call is not None else None,
        line=call.line if call is not None else None,
        function=call.function if call is not None else None,
        exit_code=run.exit_code,
        ended_at=run.ended_at or None,
    )


def _call(frame: Frame) -> CallMetadata:
    return CallMetadata(file=frame.file, line=frame.line, function=frame.function)


def _frames(calls: Iterable[CallMetadata]) -> Iterable[Frame]:
    return (Frame(call.file, call.line, call.function) for call in calls)
