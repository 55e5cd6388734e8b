"""Watching a job: look at it again and again, show what is found, until the user quits or the job has ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Final

from perfscope.analyzers.live.job import LiveJob
from perfscope.analyzers.live.state import ENDED, FAILED, LiveState
from perfscope.reports.live.screen import rows_that_fit, screen
from perfscope.reports.live.terminal import Terminal
from perfscope.reports.live.view import View
from perfscope.reports.paint import Paint

REST: Final = 9.0
"""Times that a look takes that at least lie between two: a slow file system is not read all the time."""

Seen = Callable[[LiveState], None]


def on_terminal(job: LiveJob, terminal: Terminal, view: View, seen: Seen) -> None:
    """Show the job on a terminal until the user quits. ``seen`` gets every state."""
    coloured = not os.environ.get("NO_COLOR")
    with ThreadPoolExecutor(1) as thread:  # keys are answered while a file system is slow
        pending: Future[LiveState] | None = None
        latest = shown = LiveState(folder=job.name, time_ns=time.time_ns(), reason="reading the folder")
        due = 0.0
        chosen: View | None = view
        while chosen is not None:
            view = chosen
            if pending is None and time.monotonic() >= due:
                pending = thread.submit(job.look)
                pending.add_done_callback(lambda _: terminal.wake())
            if pending is not None and pending.done():
                latest, pending = pending.result(), None
                due = time.monotonic() + pause_s(latest, view.interval_s)
                seen(latest)
            shown = shown if view.paused else latest
            columns, lines = terminal.size()
            paint = Paint(coloured, columns)
            page = max(rows_that_fit(shown, view, paint, lines), 1)
            view = replace(view, page=page, top=min(view.top, max(len(shown.ranks) - page, 0)))
            terminal.draw(screen(shown, view, paint, lines))
            chosen = view
            try:
                keys = terminal.keys(view.interval_s if pending is not None else due - time.monotonic())
            except EOFError:
                return
            for key in keys:
                if chosen is not None:
                    chosen = chosen.after(key)
            if chosen is not None and chosen.interval_s != view.interval_s:
                due = min(due, time.monotonic() + chosen.interval_s)


def in_lines(job: LiveJob, interval_s: float, seen: Seen, *, once: bool) -> None:
    """Hand over a state every interval, until the job has ended or after the first one."""
    while True:
        state = job.look(whole=once)
        if not once and state.state in (ENDED, FAILED):
            state = job.look(whole=True)  # no other comes
        seen(state)
        if once or state.state in (ENDED, FAILED):
            return
        time.sleep(pause_s(state, interval_s))


def pause_s(state: LiveState, interval_s: float) -> float:
    """Time until the next look."""
    return max(interval_s, REST * state.reading_s)
