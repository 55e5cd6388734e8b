"""Captures that nothing planned: because a step was slow, or because somebody asked.

The training thread only leaves a proposal here; the background thread makes it to all ranks and reads what they agreed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from time import perf_counter_ns
from typing import Final

from perfscope.collectors.agreement import LEAD_S, Board
from perfscope.collectors.capture.schedule import CaptureSchedule
from perfscope.collectors.config import ENOUGH, CollectorConfig

FEWEST_STEPS_AHEAD: Final = 2
"""Ranks that wait for each other are at most about a step apart."""

MOST_STEPS: Final = 500
"""Of a capture that is asked for by its length."""

REMEMBERED: Final = 8
"""Slow steps that show whether they come regularly."""

REGULAR: Final = 3
"""So many of them show it, and at most one after so many times their period."""

WORTH_WAITING_S: Final = 120.0
"""For the next slow step at most: meanwhile nothing else is recorded."""

NS: Final = 1e9


class Trigger:
    """What one rank proposes, and when it may. Times are the session's ``perf_counter_ns``."""

    def __init__(self, config: CollectorConfig, rank: int, board: Board, schedule: CaptureSchedule) -> None:
        self._config = config
        self._rank = rank
        self._board = board
        self._schedule = schedule
        self._slow = SlowSteps(config.trigger)
        self.note = self._slow.note
        """A step has ended, of those that :attr:`watches` does not compare; set :attr:`completed`, too."""
        self.watches = config.mode == "trigger"
        """Do slow steps start captures?"""
        self._slow_steps: deque[int] = deque(maxlen=REMEMBERED)
        self._proposal: str | None = None
        self._asked = False
        self.completed = 0
        """Steps that have ended."""
        self._not_before = config.wait
        self._began_ns: int | None = None
        self._spent_ns = 0
        self.busy = False
        """Was a capture being made when the step under way began?"""

    def step_ended(self, completed: int, duration_ns: int, *, disturbed: bool, now_ns: int) -> bool:
        """A step has ended; True when the background thread should look soon."""
        self.completed = completed
        if self._began_ns is None:
            self._began_ns = now_ns
        if disturbed:
            self._spent_ns += duration_ns
            return False
        times = self._slow.step(duration_ns)
        if times is not None:
            self._slow_steps.append(completed - 1)
        if times is None or not self.watches or not self._may(completed, now_ns - self._began_ns):
            return False
        self._proposal = f"step {completed - 1} took {times:.1f}x the median on rank {self._rank}"
        return True

    def step_passed(self, completed: int, duration_ns: int, *, disturbed: bool) -> bool:
        """A step has ended and the next begins with nothing of ours at work: as :meth:`step_ended` and
        :meth:`step_begins`.
        """
        soon = self.step_ended(completed, duration_ns, disturbed=disturbed, now_ns=perf_counter_ns())
        if self.busy:  # a capture was being made when this step began
            self.step_begins(completed, busy=False, paused_ns=0)
        return soon

    def passed(self, completed: int, durations_ns: Sequence[int]) -> None:
        """The last steps of ``completed``, not yet noted, took so long, while :attr:`watches` compared none."""
        if durations_ns:
            self.completed = max(self.completed, completed)
        for duration in durations_ns:
            self.note(duration)

    def step_begins(self, completed: int, *, busy: bool, paused_ns: int) -> None:
        """The next step begins, ``paused_ns`` after the last one ended. ``busy``: a capture is being made."""
        if busy or self.busy:
            self._spent_ns += paused_ns
            self._not_before = completed + self._config.cooldown
        self.busy = busy

    def asked(self) -> None:
        """A signal asks for a capture. Called from its handler: only sets a flag."""
        self._asked = True

    def look(self) -> None:
        """Hear what was agreed, and propose what is wanted. Raises OSError when the folder cannot be used."""
        for plan in self._board.look():
            self._schedule.agree(plan)
            self._asked = False  # whoever proposed it, here it is
        proposal, self._proposal = self._proposal, None
        if self.busy or self._schedule.plans:
            return
        request = self._board.open_request()
        if request is not None:
            reason = f"requested with perfscope trigger (request {request.number})"
            self._propose(request.active, reason, asked=True, request=request.number, seconds=request.seconds)
        elif self._asked:
            self._propose(None, f"requested by a signal to rank {self._rank}", asked=True)
        elif proposal is not None and self._board.by_slow_steps < self._config.max_captures:
            self._propose(None, proposal, asked=False)

    def _may(self, completed: int, elapsed_ns: int) -> bool:
        """May a slow step start a capture? The first always may: nothing has been spent yet."""
        return completed >= self._not_before and self._spent_ns <= elapsed_ns * self._config.budget / 100

    def _propose(
        self,
        active: int | None,
        reason: str,
        *,
        asked: bool,
        request: int | None = None,
        seconds: float | None = None,
    ) -> None:
        """At a step that every rank has yet to reach when it hears of it."""
        typical_ns = self._slow.typical_ns()
        if typical_ns is not None:
            ahead = FEWEST_STEPS_AHEAD + math.ceil(LEAD_S * NS / max(typical_ns, 1))
            in_time = min(math.ceil(seconds * NS / max(typical_ns, 1)), MOST_STEPS) if seconds is not None else 0
            steps = active or in_time or self._config.active
            start = self.completed + ahead
            if not asked and steps > 1:
                # The step before it shows what is usual.
                first = self._config.warmup + 1
                due = next_slow(list(self._slow_steps), start + first)
                if due is not None and (due - start) * typical_ns <= WORTH_WAITING_S * NS:
                    start = due - first
            self._board.propose(start, steps, reason, asked=asked, request=request)


def next_slow(slow: list[int], first: int) -> int | None:
    """The first step from ``first`` on that is slow again, where steps were so at regular distances; None elsewhere."""
    if len(slow) < REGULAR:
        return None
    distances = [after - before for before, after in pairwise(slow)]
    period = math.gcd(*distances)
    if period < 2 or max(distances) > REGULAR * period:
        return None
    return slow[-1] + max(-(-(first - slow[-1]) // period), 1) * period


WINDOW: Final = 64
"""Undisturbed steps that the median is taken of."""

FEW: Final = 3
"""Steps from which the shortest stands for all: the first ones take long, and too short an answer does no harm."""

EVERY: Final = 8
"""Steps after which the median is taken anew: sorting the window at every one would cost more than all else."""


class SlowSteps:
    """Compares every undisturbed step with the median of those before it."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._window: deque[int] = deque(maxlen=WINDOW)
        self.note: Callable[[int], None] = self._window.append
        """A step has ended that is not to be compared."""
        self._since = 0
        self._median_ns = math.inf
        self._threshold = math.inf

    def step(self, duration_ns: int) -> float | None:
        """A step has ended: how many times the median it took, where that is ``factor`` or more, else None."""
        slow = duration_ns / self._median_ns if duration_ns >= self._threshold else None
        self._window.append(duration_ns)
        self._since += 1
        if self._since >= EVERY and len(self._window) >= ENOUGH:
            self._since = 0
            # Not by the statistics module: importing that takes as long as ten thousand of these.
            self._median_ns = sorted(self._window)[len(self._window) // 2]
            self._threshold = self._factor * self._median_ns
        return slow

    def typical_ns(self) -> float | None:
        """What a step takes: the median, the shortest one while there are few, None while there are hardly any."""
        seen = sorted(self._window)
        if len(seen) >= ENOUGH:
            return seen[len(seen) // 2]
        return seen[0] if len(seen) >= FEW else None
