"""What is known of a running job at one moment: all that terminals, JSON lines, Prometheus and OpenTelemetry show."""

from __future__ import annotations

from dataclasses import field
from typing import Final

from perfscope.frozen import dataclass

WAITING: Final = "waiting"
STARTING: Final = "starting"
RUNNING: Final = "running"
STALLED: Final = "stalled"
ENDED: Final = "ended"
FAILED: Final = "failed"
STATES: Final = (WAITING, STARTING, RUNNING, STALLED, ENDED, FAILED)
"""``waiting``: no recording in the folder yet. ``starting``: the command runs, no step has been written. ``stalled``:
no rank makes steps any more. ``failed``: the command ended with another exit code than 0."""

RANK_STATES: Final = ("starting", "stepping", "behind", "silent", "gone", "failed", "finished")
"""``starting``: has written no step yet. ``behind``: fewer steps than the others, by more than ranks write at once.
``silent``: has written no step for longer than ranks need to. ``gone``: its process is no longer there. ``failed``: an
exception ended it."""


@dataclass(frozen=True, kw_only=True)
class DeviceLoad:
    """A device, over the last seconds. None where it does not report a value."""

    index: int
    name: str
    uuid: str
    utilisation: float | None
    """Share of the time in which a kernel ran, 0 to 1."""
    memory_used_bytes: float | None
    memory_bytes: int | None
    power_w: float | None
    temperature_c: float | None
    sm_mhz: float | None


@dataclass(frozen=True, kw_only=True)
class HostLoad:
    """A host, over the last seconds."""

    host: str
    cores: int | None
    time_ns: int
    """Of its last sample, ns since the epoch."""
    cpu_share: float | None
    """Of all cores, 0 to 1."""
    memory_used_bytes: float | None
    memory_bytes: int | None
    devices: tuple[DeviceLoad, ...] = ()
    cores_of_ranks: dict[int, float] = field(default_factory=dict)
    """Rank -> cores' worth of time that it and its loader workers use."""


@dataclass(frozen=True, kw_only=True)
class LiveRank:
    """One rank."""

    rank: int
    host: str = ""
    state: str = "stepping"
    """One of ``RANK_STATES``."""
    last_step: int = -1
    age_s: float | None = None
    """Since its last step that is known ended."""
    step_us: float | None = None
    """Mean of the last seconds, as are the stages."""
    run_step_us: float | None = None
    """Mean over the run."""
    stages_us: dict[str, float] = field(default_factory=dict)
    """Stage -> time per step; those that are measured, and ``other``."""
    excess_us: float | None = None
    """Time per step over the median of the other ranks, in stages where ranks do not wait for each other."""
    cores: float | None = None
    device: DeviceLoad | None = None


@dataclass(frozen=True, kw_only=True)
class LiveStraggler:
    """A rank that the others wait for, or several that are slow in the same way."""

    ranks: tuple[int, ...]
    stage: str
    """The stage with the largest excess."""
    delay_us: float
    """Mean per step: by how much it is later than the median of the other ranks, where it is the latest."""
    share_of_step: float
    share_of_steps: float
    """Share of the last steps in which it was the latest."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to the job."""

    time_ns: int
    text: str


@dataclass(frozen=True, kw_only=True)
class LiveState:
    """A job at one moment. Numbers that are not known are None or empty."""

    folder: str
    time_ns: int
    state: str = WAITING
    """One of ``STATES``."""
    reason: str = ""
    """In words: why it is in that state."""
    command: tuple[str, ...] = ()
    started_ns: int | None = None
    exit_code: int | None = None
    world_size: int | None = None
    hosts_count: int = 0
    strategies: tuple[str, ...] = ()
    backend: str = ""
    restarts: int = 0
    last_step: int = -1
    """The last step that all ranks that make steps have written."""
    first_step: int = 0
    """The first step that sums over the run include: 0, unless watching began late in a long run."""
    age_s: float | None = None
    """Since the last step that any rank has written ended."""
    step_us: float | None = None
    """Median over ranks of the mean of the last seconds."""
    step_p95_us: float | None = None
    """95th percentile of the last steps of all ranks."""
    run_step_us: float | None = None
    """Median over ranks of the mean over the run."""
    samples_per_step: float | None = None
    """Of all ranks together; None where not known, and where ranks share samples."""
    samples_per_s: float | None = None
    run_samples_per_s: float | None = None
    """Over the run, everything between steps included."""
    stages_us: dict[str, float] = field(default_factory=dict)
    """Stage -> mean per step over all ranks, of the last seconds; those that are measured, and ``other``."""
    stragglers: tuple[LiveStraggler, ...] = ()
    """The largest delay first."""
    not_compared: str = ""
    """Why no stragglers were looked for; empty where they were."""
    ranks: tuple[LiveRank, ...] = ()
    missing_ranks: tuple[int, ...] = ()
    """Ranks of the world that have written nothing."""
    hosts: tuple[HostLoad, ...] = ()
    trend_us: tuple[float, ...] = ()
    """Mean step time of equal parts of what was watched, the oldest first."""
    captures: int = 0
    hang_files: tuple[int, ...] = ()
    """Ranks that have written where they stand still."""
    events: tuple[Event, ...] = ()
    """What happened while it was watched, the oldest first."""
    further_jobs: tuple[str, ...] = ()
    """Folders in this one with further trainings of the command."""
    problem: str = ""
    """Why the folder could not be read at this moment."""
    reading_s: float = 0.0
    """What reading took."""

    @property
    def times_stages(self) -> bool:
        """Are stages of the step measured beside the optimizer, which is what the default mode times?"""
        return len(self.stages_us) > 2

    def rank_counts(self) -> dict[str, int]:
        """State -> number of ranks in it."""
        counts = dict.fromkeys(RANK_STATES, 0)
        for rank in self.ranks:
            counts[rank.state] += 1
        return counts
