"""The answer as the verdict's sentences."""

from __future__ import annotations

import signal
from typing import Final

from perfscope.results.ending.crash import Crash
from perfscope.results.rows import Verdict
from perfscope.text import plural, ranks_in_words

_KILLED: Final = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit codes of a process that was killed, seen by its parent or by a shell between."""


def verdict(crash: Crash) -> Verdict:
    """The verdict of a job that failed."""
    first = crash.ends[0]
    after = f"{'' if first.counted else 'at least '}{plural(first.steps, 'step')}"
    others = [end.rank for end in crash.ends if not end.is_cause]
    then = f"; {ranks_in_words(others)} failed in consequence" if others else ""
    return Verdict(
        headline=f"The job failed: {ranks_in_words(crash.cause_ranks)} {first.in_words()}, after {after}{then}.",
        healthy=False,
        first_action=_first_action(crash),
    )


def _first_action(crash: Crash) -> str:
    first, ranks = crash.ends[0], ranks_in_words(crash.cause_ranks)
    if first.how == "exception" and first.file:
        return f"Look at {first.function} ({first.file}:{first.line}), where {ranks} raised it."
    if first.exit_code in _KILLED:
        return f"See whether the host of {ranks} ran out of memory (dmesg, journalctl -k), or who killed it."
    if first.how == "return":
        return f"Find out why {ranks} ended: by sys.exit, or with fewer batches than the others."
    return f"Look at what {ranks} printed last, and at what may end it there."
