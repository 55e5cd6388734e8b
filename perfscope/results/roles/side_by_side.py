"""Several roles side by side: who is busy when, who waits for whom, and which role bounds the iteration.

Roles are jobs that were recorded together and are not ranks of one training (rollout, reward, update); each has an
account of its own.
"""

from __future__ import annotations

from typing import Annotated, Literal

from perfscope.frozen import dataclass
from perfscope.results.fields import Count, Share, Us


@dataclass(frozen=True, kw_only=True)
class RoleRow:
    """One role, all its instances together, over the common window."""

    role: Annotated[str, "Its name, from metadata, folders or files."]
    role_kind: Annotated[str, "``update``, ``rollout``, ``reward``, ``reference``, ``critic`` or ``other``."]
    jobs: Annotated[Count, "Instances: jobs of their own."]
    rank_count: Annotated[Count, "Processes of all instances that were recorded."]
    busy_share: Annotated[
        Share,
        "Share of the window in which any of its processes works: device work or, without a device, operators, and "
        "ranges whose names state a role's work. Pauses shorter than ``Roles.pause_us`` count as busy.",
    ]
    alone_share: Annotated[Share, "Share of the window in which it is busy and no other role is."]
    waits: Annotated[
        dict[str, Share],
        "Other role -> share of the window in which this one is idle while that one is busy; of several the one that "
        "ends last before this one goes on.",
    ]
    idle_share: Annotated[Share, "Share of the window in which it is idle and no other role is busy."]
    turns: Annotated[Count, "Times that it began to be busy in the window."]
    turn_us: Annotated[Us | None, "Median length of one; None without any."]
    phases: Annotated[
        dict[str, Share], "Range of the user's own -> share of the window in which any of its processes is inside."
    ]


@dataclass(frozen=True, kw_only=True)
class RoleJobRow:
    """One job of a role by itself: the account of its own steps."""

    job: Annotated[str, "Name of the job; ``perfscope analyze --role`` takes it."]
    role: str
    path: Annotated[str, "Folder or file of its first trace."]
    ranks: Annotated[tuple[int, ...], "Its recorded ranks, numbered within the job."]
    world_size: Annotated[int | None, "Ranks that it has; None where not known."]
    hosts: tuple[str, ...]
    steps: Annotated[Count, "Its own used steps; 0 where nothing marks steps."]
    step_time_us: Annotated[Us | None, "Its own mean step; None without steps."]
    busy_share: Annotated[Share, "Share of the common window in which any of its processes is busy."]
    time_breakdown: Annotated[
        dict[str, Share], "Category -> share of its own steps (without steps of its recording), mean over its ranks."
    ]
    headline: Annotated[str, "What limits it by itself."]


@dataclass(frozen=True, kw_only=True)
class RoleTurn:
    """A stretch of one role on the common clock."""

    role: str
    start_us: Annotated[Us, "From the begin of the common window."]
    end_us: Annotated[Us, "From the same begin."]
    doing: Annotated[Literal["busy", "waits", "idle", "unrecorded"], "What it does."]
    what: Annotated[str, "The longest range while it is busy; the role that it waits for."] = ""


@dataclass(frozen=True, kw_only=True)
class SharedDevice:
    """One device on which several roles work."""

    device: Annotated[str, "The device by its name and number."]
    host: str
    known_by: Annotated[
        Literal["uuid", "process", "number"],
        "How it is known to be one device: its UUID, a process that has several roles, or the device's number alone; "
        "each process numbers the devices that it sees.",
    ]
    shares: Annotated[dict[str, Share], "Role -> share of the window in which it has work on the device."]
    together_share: Annotated[Share, "Share of the window in which several have."]
    free_share: Annotated[Share, "Share of the window in which none has."]
    hand_overs: Annotated[Count, "Times that the device went from one role to another."]


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The roles of one recording side by side. The rest of the summary is the account of ``main`` alone."""

    main: Annotated[str, "The job that the rest of the summary is about."]
    headline: Annotated[str, "Which role bounds the iteration, and who waits for it."]
    bound: Annotated[str | None, "The role that is busy alone for longest; None where no role waits for another."]
    together: Annotated[
        bool, "All roles were recorded over one window. False: in turns, and what is outside is not known."
    ]
    stated: Annotated[bool, "Names or metadata state the roles. False: only their times show that they ran together."]
    window_us: Annotated[Us, "The common window: whole iterations, where these show."]
    start: Annotated[str, "When it begins, ISO 8601, UTC."]
    pause_us: Annotated[Us, "Shorter pauses of a role count as busy."]
    iterations: Annotated[Count, "Whole iterations in the window: ``main``'s role takes its turn after others."]
    iteration_us: Annotated[Us | None, "Mean of one; None where fewer than two show."]
    overlap_speedup: Annotated[
        float | None, "At most so many times faster if all roles worked at the same time; None where they were not."
    ]
    rows: tuple[RoleRow, ...]
    jobs: tuple[RoleJobRow, ...]
    turns: Annotated[tuple[RoleTurn, ...], "Stretches of every role, the longest of them, in order."]
    devices: Annotated[tuple[SharedDevice, ...], "Devices that several roles use; empty without any."]
