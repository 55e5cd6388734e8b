"""Errors that reach the user: each names what is wrong and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable


class PerfscopeError(Exception):
    """A failure the user can act on; the command line prints its message without a traceback."""


class UnusableInput(PerfscopeError):
    """Nothing in the input can be analyzed; the command line exits with 2."""


class TraceError(PerfscopeError):
    """One file cannot be read as a trace. It costs its rank, not the job."""


class TooLittleMemory(TraceError):
    """A trace has more events than memory holds now. It is tried again when no other is read beside it."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` (did you mean num_workers?)`` where one of the ``known`` names is similar to ``name``, else an empty
    string.
    """
    import difflib  # only where something is misspelt: jobs import this module

    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
