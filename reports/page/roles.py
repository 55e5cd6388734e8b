"""Roles side by side on the page and in the terminal: who is busy, who waits for whom, who holds shared devices."""

from __future__ import annotations

from typing import Any

from perfscope.reports import tables
from perfscope.reports.tables import HtmlTable
from perfscope.results.categories import BY_ID
from perfscope.results.roles.side_by_side import RoleJobRow, RoleRow, Roles, SharedDevice
from perfscope.results.summary import Summary
from perfscope.text import duration, percent, plural, ranks_in_words

_NAMED = 3
"""Categories and ranges named in a cell: the largest."""
_VISIBLE = 0.01


def values(summary: Summary) -> dict[str, Any]:
    """What the template shows; ``roles`` is None where the recording has one role."""
    roles = summary.roles
    if roles is None:
        return {"roles": None}
    made = [_roles(roles), _jobs(roles), *([_devices(roles)] if roles.devices else [])]
    return {"roles": {"reading": reading(roles), "main": roles.main, "tables": made}}


def reading(roles: Roles) -> str:
    """The window, and what is known of the iterations in it."""
    length = duration(roles.window_us)
    if not roles.together:
        return (
            f"The roles were recorded one after the other, within {length}. Shares are of that time; what a role does "
            "while it is not recorded is not known."
        )
    if roles.iteration_us is None:
        window = f"Shares are of the {length} in which all were recorded."
    else:
        window = f"Shares are of {plural(int(roles.iterations), 'whole iteration')} of {duration(roles.iteration_us)}."
    at_once = (
        f" If all roles worked at the same time, an iteration would be at most {roles.overlap_speedup:.2f}x faster."
        if roles.overlap_speedup is not None and roles.overlap_speedup > 1.02
        else ""
    )
    return f"{window} Pauses shorter than {duration(roles.pause_us)} count as busy.{at_once}"


def terminal_lines(roles: Roles) -> list[str]:
    """A line for each role, and for each device that several share."""
    width = max(len(row.role) for row in roles.rows)
    lines = [f"Roles side by side. {reading(roles)}"]
    lines += [f"  {row.role:<{width}}  {line_of(row)}" for row in roles.rows]
    lines += [f"  {_device_line(device)}" for device in roles.devices]
    lines.append(f"The rest is of {roles.main}; perfscope analyze --role NAME shows another.")
    return lines


def line_of(row: RoleRow) -> str:
    """What one role does: ``busy 40%, waits for rollout 59%, idle 2%``."""
    parts = [f"busy {percent(row.busy_share)}"]
    parts += [f"waits for {role} {percent(share)}" for role, share in _largest(row.waits)]
    if row.idle_share >= _VISIBLE:
        parts.append(f"idle {percent(row.idle_share)}")
    phases = _in_words(row.phases)
    return ", ".join(parts) + (f" ({phases})" if phases else "")


def _device_line(device: SharedDevice) -> str:
    held = ", ".join(f"{role} {percent(share)}" for role, share in device.shares.items())
    return f"{_name(device)}: {held}, several at once {percent(device.together_share)}"


def _name(device: SharedDevice) -> str:
    return f"{device.device} of {device.host}" if device.host else device.device


def _roles(roles: Roles) -> HtmlTable:
    rows = roles.rows
    return tables.table(
        "roles-table",
        "What each role does",
        [
            tables.words("Role", [row.role for row in rows]),
            tables.words("Processes", [_processes(row) for row in rows]),
            tables.column("Busy", [row.busy_share for row in rows], percent, definition="role_busy"),
            tables.column("Busy alone", [row.alone_share for row in rows], percent, definition="role_alone"),
            tables.words(
                "Waits for", [_in_words(row.waits) for row in rows], definition="role_waits", reason="No other role."
            ),
            tables.column("Idle", [row.idle_share for row in rows], percent, definition="role_idle"),
            tables.column("Turns", [row.turns for row in rows], str, definition="role_turns"),
            tables.durations("A turn", [row.turn_us for row in rows], definition="role_turn"),
            tables.words("Ranges", [_in_words(row.phases) for row in rows], reason="It records no range of its own."),
        ],
    )


def _processes(row: RoleRow) -> str:
    jobs = f" in {plural(int(row.jobs), 'job')}" if row.jobs > 1 else ""
    return f"{plural(int(row.rank_count), 'rank')}{jobs}"


def _jobs(roles: Roles) -> HtmlTable:
    rows = roles.jobs
    return tables.table(
        "role-jobs",
        "Each job by itself",
        [
            tables.words("Job", [row.job for row in rows]),
            tables.words("Ranks", [_ranks(row) for row in rows]),
            tables.column("Steps", [row.steps or None for row in rows], str, reason="Nothing marks its steps."),
            tables.durations("Step", [row.step_time_us for row in rows], reason="Nothing marks its steps."),
            tables.column("Busy", [row.busy_share for row in rows], percent, definition="role_busy"),
            tables.words("Its time", [_breakdown(row) for row in rows]),
            tables.words("By itself", [row.headline for row in rows]),
        ],
        "Ranks, steps and time breakdown are each job's own; perfscope analyze --role JOB shows all of one.",
    )


def _ranks(row: RoleJobRow) -> str:
    ranks = ranks_in_words(row.ranks)
    return f"{ranks} of {row.world_size}" if row.world_size not in (None, len(row.ranks)) else ranks


def _devices(roles: Roles) -> HtmlTable:
    rows = roles.devices
    return tables.table(
        "shared-devices",
        "Devices that several roles use",
        [
            tables.words("Device", [_name(row) for row in rows]),
            tables.words("Held by", [_in_words(row.shares) for row in rows]),
            tables.column("Several at once", [row.together_share for row in rows], percent),
            tables.column("Free", [row.free_share for row in rows], percent),
            tables.column("Hand-overs", [row.hand_overs for row in rows], str, definition="hand_overs"),
            tables.words("Known by", [row.known_by for row in rows], definition="device_known_by"),
        ],
    )


def _breakdown(row: RoleJobRow) -> str:
    return ", ".join(f"{BY_ID[name].short} {percent(share)}" for name, share in _largest(row.time_breakdown))


def _in_words(shares: dict[str, float]) -> str:
    return ", ".join(f"{name} {percent(share)}" for name, share in _largest(shares))


def _largest(shares: dict[str, float]) -> list[tuple[str, float]]:
    """The largest few, those that can be seen."""
    return [item for item in sorted(shares.items(), key=lambda item: -item[1])[:_NAMED] if item[1] >= _VISIBLE]
