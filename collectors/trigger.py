"""Captures that nothing planned: because a step was slow, or because somebody asked.

The training thread only leaves a wish here; the background thread proposes it to all ranks and hears what they agreed.
"""

from __future__ import annotations

import math
from typing import Final

from perfscope.collectors.agreement import LEAD_S, Board
from perfscope.collectors.config import CollectorConfig
from perfscope.collectors.schedule import Schedule
from perfscope.collectors.slow import SlowSteps

FEWEST_STEPS_AHEAD: Final = 2
"""Ranks that wait for each other are at most about a step apart."""

NS: Final = 1e9


class Trigger:
    """One rank's wishes and what becomes of them. Times are the session's ``perf_counter_ns``."""

    def __init__(self, config: CollectorConfig, rank: int, board: Board, schedule: Schedule) -> None:
        self._config = config
        self._rank = rank
        self._board = board
        self._schedule = schedule
        self._slow = SlowSteps(config.trigger)
        self._watches = config.mode == "trigger"
        self._wish: str | None = None
        self._asked = False
        self._completed = 0
        self._not_before = config.wait
        self._began_ns: int | None = None
        self._spent_ns = 0
        self._busy = False

    def step_ended(self, completed: int, duration_ns: int, *, disturbed: bool, now_ns: int) -> bool:
        """A step has ended; True when the background thread should look soon."""
        self._completed = completed
        if self._began_ns is None:
            self._began_ns = now_ns
        if disturbed:
            self._spent_ns += duration_ns
            return False
        times = self._slow.step(duration_ns)
        if times is None or not self._watches or not self._may(completed, now_ns - self._began_ns):
            return False
        self._wish = f"step {completed - 1} took {times:.1f} times the median, seen by rank {self._rank}"
        return True

    def step_begins(self, completed: int, *, busy: bool, paused_ns: int) -> None:
        """The next step begins, ``paused_ns`` after the last one ended. ``busy``: a capture is being made."""
        if busy or self._busy:
            self._spent_ns += paused_ns
            self._not_before = completed + self._config.cooldown
        self._busy = busy

    def asked(self) -> None:
        """A signal asks for a capture. Called from its handler: only sets a flag."""
        self._asked = True

    def look(self) -> None:
        """Hear what was agreed, and propose what is wished. Raises OSError when the folder cannot be used."""
        for plan in self._board.look():
            self._schedule.agree(plan)
            self._asked = False  # whoever proposed it, here it is
        wish, self._wish = self._wish, None
        if self._busy or self._schedule.pending:
            return
        request = self._board.open_request()
        if request is not None:
            reason = f"asked for with perfscope trigger (request {request.number})"
            self._propose(request.active, reason, asked=True, request=request.number)
        elif self._asked:
            self._propose(None, f"asked for by a signal to rank {self._rank}", asked=True)
        elif wish is not None and self._board.by_slow_steps < self._config.max_captures:
            self._propose(None, wish, asked=False)

    def _may(self, completed: int, elapsed_ns: int) -> bool:
        """May a slow step start a capture? The first always may: nothing has been spent yet."""
        return completed >= self._not_before and self._spent_ns <= elapsed_ns * self._config.budget / 100

    def _propose(self, active: int | None, reason: str, *, asked: bool, request: int | None = None) -> None:
        """At a step that every rank has yet to reach when it hears of it."""
        typical_ns = self._slow.typical_ns()
        if typical_ns is not None:
            ahead = FEWEST_STEPS_AHEAD + math.ceil(LEAD_S * NS / max(typical_ns, 1))
            steps = active or self._config.active
            self._board.propose(self._completed + ahead, steps, reason, asked=asked, request=request)
