"""What the side-by-side view says: which role bounds the iteration, who waits for it, and what to do first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from perfscope.results.roles.side_by_side import RoleRow, SharedDevice
from perfscope.text import percent

_LEAST: Final = 0.05
"""Waits for a smaller share of the window are not worth a headline."""


def bound_role(rows: Sequence[RoleRow]) -> RoleRow | None:
    """The role that is busy alone for longest, where another waits for it."""
    waited = {role for row in rows for role, share in row.waits.items() if share >= _LEAST}
    return max((row for row in rows if row.role in waited), key=lambda row: row.alone_share, default=None)


def headline(rows: Sequence[RoleRow], *, together: bool, stated: bool, devices: Sequence[SharedDevice]) -> str:
    """One sentence or two."""
    if not stated:
        return _of_jobs(rows, devices)
    if not together:
        most = max(rows, key=lambda row: row.busy_share)
        names = _in_words([row.role for row in rows])
        return (
            f"{_first(most.role)} takes {percent(most.busy_share)} of the time; the roles {names} were recorded "
            "one after the other, and what they do in between is not known."
        )
    bound = bound_role(rows)
    if bound is None:
        return f"No role waits long for another: {_in_words([_busy(row) for row in rows])}."
    waiting = sorted(
        (row for row in rows if row.waits.get(bound.role, 0) >= _LEAST), key=lambda row: -row.waits[bound.role]
    )
    who = _in_words([f"{row.role} waits for it {percent(row.waits[bound.role])}" for row in waiting])
    return f"{_first(bound.role)} takes {percent(bound.busy_share)} of the iteration; {who} of the time."


def first_action(bound: RoleRow | None, speedup: float | None, source: str) -> str | None:
    """What to do first about the role that bounds the iteration."""
    if bound is None:
        return None
    what = {
        "rollout": f"Give {bound.role} more devices or larger batches, or let it generate the next samples meanwhile "
        "(asynchronous rollout).",
        "reward": f"Run more of {bound.role} in parallel, or judge samples as they are generated.",
    }.get(bound.role_kind, f"Look at the steps of {bound.role}: perfscope analyze {source} --role {bound.role}.")
    gain = f" Roles that work at the same time: at most {speedup:.2f}x faster." if speedup and speedup > 1.02 else ""
    return what + gain


def _of_jobs(rows: Sequence[RoleRow], devices: Sequence[SharedDevice]) -> str:
    """Of jobs whose names state no roles: what they have to do with each other is not known."""
    names = _in_words([row.role for row in rows])
    if devices:
        first = devices[0]
        held = _in_words([f"{role} {percent(share)}" for role, share in first.shares.items()])
        return (
            f"{len(rows)} jobs ran at the same time ({names}) and share {first.device}: {held} of the time, several at "
            f"once {percent(first.together_share)}."
        )
    return f"{len(rows)} jobs ran at the same time: {names}. Each has an account of its own."


def _busy(row: RoleRow) -> str:
    return f"{row.role} is busy {percent(row.busy_share)} of the time"


def _first(role: str) -> str:
    """A role as the first word of a sentence."""
    return f"{role[:1].upper()}{role[1:]}"


def _in_words(parts: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join((", ".join(parts[:-1]), parts[-1])) if len(parts) > 1 else "".join(parts)
