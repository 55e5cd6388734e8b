"""Errors that reach the user: each names what is wrong and what to do about it."""

from __future__ import annotations


class PerfscopeError(Exception):
    """A failure the user can act on; the command line prints its message without a traceback."""


class UnusableInput(PerfscopeError):
    """Nothing in the input can be analyzed; the command line exits with 2."""


class TraceError(PerfscopeError):
    """One file cannot be read as a trace. It costs its rank, not the job."""
