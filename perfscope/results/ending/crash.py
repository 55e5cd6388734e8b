"""How a job failed: the ranks that ended first and why, and those that failed in consequence."""

from __future__ import annotations

import signal
from pathlib import PurePath
from typing import Annotated, Final, Literal

from perfscope.frozen import dataclass

How = Literal["exception", "signal", "exit", "return", "unseen"]

_MESSAGE_SHOWN: Final = 200
"""Characters of a message in a sentence."""


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How one rank of a failed job ended."""

    rank: int
    how: Annotated[
        How,
        "An uncaught exception; a signal; an exit code other than 0; the end of its program while other ranks went on; "
        "or nothing saw it: it was killed, or left by ``os._exit``.",
    ]
    is_cause: Annotated[bool, "Else it failed in consequence."]
    steps: Annotated[int, "Steps that it completed; where it was killed, or left by ``os._exit``, at least."]
    error: Annotated[str | None, "Class of the exception."] = None
    message: Annotated[str | None, "What the exception says, without secrets."] = None
    file: Annotated[
        str | None, "Source file of the call that raised it, the user's own code before that of libraries."
    ] = None
    line: Annotated[int | None, "Line in the file."] = None
    function: Annotated[str | None, "The function there."] = None
    counted: Annotated[bool, "Are these all its steps? Else it wrote their number before it ended."] = True
    exit_code: Annotated[int | None, "As torchrun saw it; negative: the signal."] = None
    ended_at: Annotated[str | None, "ISO 8601, UTC."] = None

    def in_words(self) -> str:
        """How it ended, in words that follow its name."""
        if self.how == "exception":
            said = (self.message or "").strip().partition("\n")[0]
            cut = "…" if len(said) > _MESSAGE_SHOWN else ""
            what = f": {said[:_MESSAGE_SHOWN]}{cut}" if said else ""
            where = f" (in {self.function}, {PurePath(self.file).name}:{self.line})" if self.file else ""
            return f"raised {self.error or 'an exception'}{what}{where}"
        if self.how == "signal" and self.exit_code is not None:
            return f"ended by signal {-self.exit_code}{_signal_name(-self.exit_code)}"
        if self.how == "exit":
            return f"ended with exit code {self.exit_code}"
        if self.how == "return":
            return "ended before the others"
        return "ended unseen, killed or by os._exit"


@dataclass(frozen=True, kw_only=True)
class Crash:
    """The answer for a job that failed."""

    cause_ranks: Annotated[tuple[int, ...], "Ranks that ended first, for a reason of their own."]
    ends: Annotated[tuple[RankEnd, ...], "Those of the cause first, then those that failed in consequence."]


def _signal_name(number: int) -> str:
    known = {each.value: each.name for each in signal.Signals}
    return f" ({known[number]})" if number in known else ""
