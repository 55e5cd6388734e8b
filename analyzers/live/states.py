"""Whether the job runs, which of its ranks do, and what happens to it."""

from __future__ import annotations

import os
import signal
import socket
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import field
from typing import Final

from perfscope.analyzers.live.facts import Facts, RankFacts
from perfscope.analyzers.live.state import ENDED, FAILED, RUNNING, STALLED, STARTING, WAITING, Event
from perfscope.analyzers.live.steps import JobSteps
from perfscope.frozen import dataclass
from perfscope.text import duration, ranks_in_words

WRITES_S: Final = 8.0
"""Within this time of a step's end its rank has written it (``collectors.capture.history``), and it can be read."""

_PATIENCE_STEPS: Final = 10
"""A rank is silent after the time of so many steps."""

_MOST_EVENTS: Final = 50


def patience_s(step_us: float | None) -> float:
    """Time without a new step after which a rank is silent."""
    return WRITES_S + _PATIENCE_STEPS * (step_us or 0.0) / 1e6


def exit_in_words(code: int) -> str:
    """``exit code 1``, ``killed by SIGKILL``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def process_is_gone(facts: RankFacts | None) -> bool:
    """Is a rank's process known to be gone? Only of this host that can be said; no other is asked."""
    if facts is None or not facts.pid or facts.host != socket.gethostname():
        return False
    try:
        os.kill(facts.pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def rank_state(
    facts: RankFacts | None, age_s: float | None, *, stepping: bool, silent_s: float, gone: bool, ended: bool
) -> str:
    """One of ``RANK_STATES``. ``gone``: its host's samples say that its process is; ``ended``: the whole job has."""
    if facts is not None and facts.outcome == "exception":
        return "failed"
    if facts is not None and facts.outcome == "finished":
        return "finished"
    if gone or (ended and facts is not None):  # a process that ends by itself says how
        return "gone"
    if age_s is None or age_s > silent_s:
        return "gone" if process_is_gone(facts) else "silent" if age_s is not None else "starting"
    return "stepping" if stepping else "behind"


@dataclass
class Log:
    """What happened while the job was watched."""

    events: deque[Event] = field(default_factory=lambda: deque(maxlen=_MOST_EVENTS))
    _state: str = ""
    _restarts: int = 0
    _captures: int = 0
    _lost: dict[int, str] = field(default_factory=dict)
    _hangs: set[int] = field(default_factory=set)

    def look(
        self,
        now_ns: int,
        state: str,
        reason: str,
        steps: JobSteps,
        captures: int,
        lost: Mapping[int, str],
        hangs: Iterable[int],
    ) -> None:
        """Note what has changed since the last look."""
        first = not self._state
        if steps.restarts > self._restarts and not first:
            self._note(now_ns, f"the job was restarted (attempt {steps.restarts + 1}); steps are counted from 0 again")
        self._restarts = steps.restarts
        if lost_now := {rank: how for rank, how in lost.items() if self._lost.get(rank) != how}:
            self._note(now_ns, lost_in_words(lost_now))
        self._lost = dict(lost)
        if hangs_now := set(hangs) - self._hangs:
            self._note(now_ns, f"{ranks_in_words(hangs_now)} wrote stacks: perfscope analyze shows what is missing")
        self._hangs = set(hangs)
        if captures > self._captures and not first:
            self._note(now_ns, f"capture {captures - 1} was written")
        self._captures = captures
        if state != self._state and (not first or state not in (RUNNING, STARTING)):
            again = "again" if self._state == STALLED else "now"
            self._note(now_ns, f"the job makes steps {again}" if state == RUNNING else reason)
        self._state = state

    def _note(self, now_ns: int, text: str) -> None:
        self.events.append(Event(time_ns=now_ns, text=text))


def job_state(
    facts: Facts,
    steps: JobSteps,
    *,
    there: bool,
    age_s: float | None,
    silent_s: float,
    lost: Mapping[int, str],
    hangs: list[int],
) -> tuple[str, str]:
    """One of ``STATES``, and why."""
    code = facts.launch.exit_code if facts.launch is not None else None
    if code is not None:
        also = f"; {lost_in_words(lost, hangs)}" if lost and code else ""
        return (ENDED if code == 0 else FAILED), f"the job has ended: {exit_in_words(code)}{also}"
    known = any(each.last_step >= 0 for each in steps.ranks.values())
    if not known:
        if facts.launch is None and not facts.ranks:
            return WAITING, "waiting for perfscope run to record into this folder" if there else (
                "waiting: the folder does not exist yet"
            )
        return STARTING, "the command runs; no rank has written a step yet"
    outcomes = {each.outcome for each in facts.ranks.values()}
    if (facts.launch is None or facts.launch.ended) and outcomes and outcomes <= {"finished"}:
        return ENDED, "all ranks have finished"
    if facts.launch is not None and facts.launch.ended:
        return (
            FAILED if lost else ENDED
        ), f"the recording has ended{f': {lost_in_words(lost, hangs)}' if lost else ''}"
    if age_s is not None and age_s > silent_s:
        seconds = duration(age_s * 1e6)
        if lost:
            return STALLED, f"no rank has made a step for {seconds}: {lost_in_words(lost)}, the command still runs"
        also = f"; {ranks_in_words(hangs)} wrote stacks" if hangs else ""
        return STALLED, f"no rank has made a step for {seconds}: the job hangs, evaluates, or was killed{also}"
    if lost:
        return RUNNING, f"running, but {lost_in_words(lost)}"
    return RUNNING, "running"


def lost_in_words(lost: Mapping[int, str], hangs: Collection[int] = ()) -> str:
    """``rank 1 is gone (killed, or crashed) and ranks 0, 2 failed``; of ``gone`` and ``failed`` ranks. Those of the
    gone ones in ``hangs`` wrote stacks before, as they stood still.
    """
    stood = [rank for rank, how in lost.items() if how == "gone" and rank in hangs]
    gone = [rank for rank, how in lost.items() if how == "gone" and rank not in hangs]
    failed = [rank for rank, how in lost.items() if how != "gone"]
    parts = [f"{ranks_in_words(gone)} {'is' if len(gone) == 1 else 'are'} gone (killed, or crashed)"] if gone else []
    if stood:
        parts.insert(0, f"{ranks_in_words(stood)} stood still (and wrote stacks)")
    return " and ".join([*parts, *([f"{ranks_in_words(failed)} failed"] if failed else [])])
