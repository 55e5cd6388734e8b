"""Comparison: what changed between recordings, as typed values (schema ``perfscope.comparison/1``).

``before`` is the first recording given; every other one is a ``Difference`` to it. Times are µs per step, fractions
0..1, a delta is always after - before. What the data cannot support is None. ``real`` says whether a change is beyond
the noise: True, False, or None where that cannot be judged; ``docs/compare.md`` says how.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Final

SCHEMA: Final = "perfscope.comparison/1"

BETWEEN_RANKS: Final = "between_ranks"
"""Row beside those of ``summary.ROWS``: what the slowest rank's step exceeds the mean of all ranks' by. With it the
rows add up to the job's step time, which is the slowest rank's."""


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One of the recordings compared."""

    label: str
    """Short and different for each: the end of its path, or as the user named it."""
    source: str
    headline: str
    """Its own verdict."""
    started_at: str | None
    world_size: int | None
    ranks: int
    """Ranks in the recording."""
    devices: tuple[str, ...]
    steps: int
    """Used steps; 0 where nothing marks steps."""
    step_time_us: float
    step_time_us_per_step: tuple[float, ...]
    rows_us: dict[str, float]
    """Rows of the account, mean over ranks, and ``between_ranks``; they add up to ``step_time_us``. Empty where no rank
    was accounted."""
    mfu: float | None
    perturbation: float | None


@dataclass(frozen=True, kw_only=True)
class StepChange:
    """The step time before and after, and whether the difference is more than noise."""

    before_us: float
    after_us: float
    delta_us: float
    verdict: str
    """``faster``, ``slower``, ``same`` (no difference beyond the noise) or ``unknown`` (too few steps to judge)."""
    low_us: float | None
    """Ends of the 99 % confidence interval of the difference of the means (Welch); None below two steps."""
    high_us: float | None
    p: float | None
    """Chance of a difference as large where there is none, two-sided: the smaller of Welch's test of the means and
    Yuen's of the typical steps, doubled."""
    typical_delta_us: float | None
    """Difference of the means of the middle three fifths of the steps: what odd steps do not move."""
    floor_us: float
    """Differences below this are never claimed: what runs of one job are expected, or were seen, to differ by."""
    floor_from: str
    noise_us: float | None
    """What a difference of the means must exceed: the interval's half width, at least the floor."""
    steps_before: int
    steps_after: int
    why: str
    """How sure this is, in a sentence."""
    confirmed: bool | None = None
    """Do the other steps of the whole runs, which nobody profiled, show the same? False: the recorded stretches differ,
    the runs do not, so the verdict is ``same``. None where too few other steps are known."""
    unprofiled_before_us: float | None = None
    """Median step outside of the recording."""
    unprofiled_after_us: float | None = None


@dataclass(frozen=True, kw_only=True)
class RowChange:
    """One row of the account (mean over ranks), or ``between_ranks``."""

    name: str
    before_us: float
    after_us: float
    delta_us: float
    low_us: float | None
    """Ends of the 99 % confidence interval; None where the recordings hold no rows step by step."""
    high_us: float | None
    real: bool | None


@dataclass(frozen=True, kw_only=True)
class PathChange:
    """The critical path's time in one category, all ranks; these too add up to the change of the step time."""

    category: str
    before_us: float
    after_us: float
    delta_us: float


@dataclass(frozen=True, kw_only=True)
class CollectiveChange:
    """Collectives of one group, kind, type and size. Times are per step: instances x mean transfer of one."""

    group: str
    kind: str
    dtype: str | None
    bytes: int | None
    status: str
    """``both``, ``gone`` or ``new``."""
    count_before: float
    """Instances per step."""
    count_after: float
    transfer_before_us: float | None
    """Of one instance."""
    transfer_after_us: float | None
    busbw_before_gbps: float | None
    busbw_after_gbps: float | None
    before_us: float
    after_us: float
    delta_us: float
    wait_delta_us: float | None
    """Change of the waiting for the last to arrive, per step and participant."""
    real: bool | None


@dataclass(frozen=True, kw_only=True)
class WorkChange:
    """A kernel (device time), or an operator (device time and its own host time), per rank and step."""

    name: str
    category: str
    """The kernel's category or the operator's class."""
    status: str
    """``both``, ``gone`` or ``new``."""
    count_before: float
    count_after: float
    before_us: float
    after_us: float
    delta_us: float
    from_count_us: float
    """Part of the change that more or fewer calls explain, at the mean of both durations."""
    from_duration_us: float
    """Part that longer or shorter calls explain; both add up to the change."""
    real: bool | None


@dataclass(frozen=True, kw_only=True)
class RankChange:
    """One rank that both recordings hold."""

    rank: int
    host_before: str
    host_after: str
    before_us: float
    after_us: float
    delta_us: float
    rows_us: dict[str, float]
    """Change of each row of its account; they add up to ``delta_us``."""
    stands_out: bool
    """Its own work (all but waiting for others) changed otherwise than that of the ranks' median, beyond the noise."""


@dataclass(frozen=True, kw_only=True)
class FindingChange:
    """A finding of either recording."""

    rule: str
    status: str
    """``gone``, ``new`` or ``still``."""
    title: str
    """As the later recording that has it says it."""
    severity_before: str | None
    severity_after: str | None


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A change that a finding before had advised, and that was made: did the prediction come true?"""

    rule: str
    title: str
    settings: dict[str, str]
    """What was advised, as settings of ``perfscope whatif``."""
    before: dict[str, str]
    after: dict[str, str]
    """What the settings were afterwards."""
    as_advised: bool
    """Every setting has the very value advised."""
    predicted_us: dict[str, float] | None
    """low, mid, high of the step time; None where only a bound was stated."""
    ceiling: float | None
    measured_us: float
    verdict: str
    """``came true``, ``brought more``, ``brought less``, ``made it slower``, ``no effect`` or ``not judged``."""
    realised: float | None
    """Share of the predicted saving that was measured; 1: all of it."""
    also_changed: tuple[str, ...]
    """Other settings that changed at the same time, and so share in the effect."""


@dataclass(frozen=True, kw_only=True)
class SettingChange:
    """Something about the runs that differs."""

    about: str
    """``setting``, ``version``, ``job``, ``device`` or ``command``."""
    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True, kw_only=True)
class MetricChange:
    """One number of the whole job."""

    name: str
    unit: str
    """``us``, ``share``, ``bytes`` or ``per_second``."""
    better: str
    """``higher`` or ``lower``."""
    before: float | None
    after: float | None
    delta: float | None
    real: bool | None
    """What follows the step time is judged as that is, shares of the time as their rows are; counts and sizes do not
    vary from step to step."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One recording against the first."""

    before: int
    """Index into ``Comparison.runs``."""
    after: int
    step: StepChange
    rows: tuple[RowChange, ...]
    """Add up to ``step.delta_us``; empty where a recording has no account."""
    path: tuple[PathChange, ...]
    """Empty where a recording has no critical path."""
    metrics: tuple[MetricChange, ...]
    collectives: tuple[CollectiveChange, ...]
    kernels: tuple[WorkChange, ...]
    operators: tuple[WorkChange, ...]
    ranks: tuple[RankChange, ...]
    findings: tuple[FindingChange, ...]
    tried: tuple[Tried, ...]
    settings: tuple[SettingChange, ...]
    notes: tuple[str, ...]
    """What makes the two hard to compare."""

    def self_check(self) -> None:
        """Raise ValueError where parts do not add up to what they are parts of (to rounding)."""
        if self.rows:
            _add_up("rows", [row.delta_us for row in self.rows], self.step.delta_us, self.step.before_us)
        if self.path:
            _add_up("critical path", [row.delta_us for row in self.path], self.step.delta_us, self.step.before_us)
        for rank in self.ranks:
            _add_up(f"rank {rank.rank}", list(rank.rows_us.values()), rank.delta_us, rank.before_us)
        for work in (*self.kernels, *self.operators):
            _add_up(work.name, [work.from_count_us, work.from_duration_us], work.delta_us, work.before_us)


@dataclass(frozen=True, kw_only=True)
class ScalingRow:
    """One run of a series over numbers of devices, against the one with the fewest."""

    run: int
    devices: int
    step_time_us: float
    work_ratio: float
    """Work of one device in a step over that in the smallest run: 1 is weak scaling, 1/k with k times the devices
    strong scaling."""
    kind: str
    """``base``, ``same`` (as many devices), ``weak``, ``strong`` or ``mixed``."""
    speedup: float
    """Work done per second, over the smallest run's."""
    efficiency: float
    """Work per second and device, over the smallest run's: 1 is perfect scaling."""
    ideal_step_us: float
    """What a step would take at efficiency 1."""
    lost_us: dict[str, float]
    """Where the step's time beyond the ideal went, by row: after - work_ratio x before. Adds up to step - ideal."""

    def self_check(self) -> None:
        """Raise ValueError where the losses do not add up."""
        if self.lost_us:
            lost = self.step_time_us - self.ideal_step_us
            _add_up(f"run {self.run}", list(self.lost_us.values()), lost, self.step_time_us)


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """How the job scales over the runs' numbers of devices."""

    rows: tuple[ScalingRow, ...]
    """Fewest devices first."""
    work_from: str
    """What the work of a device was told by: ``model FLOPs``, ``batch`` or ``assumed equal``."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two or more recordings side by side."""

    runs: tuple[RunRow, ...]
    """In the order given; the first is what the others are compared with."""
    differences: tuple[Difference, ...]
    """One for each other run."""
    scaling: Scaling | None
    """None where all runs have the same number of devices, or it is not known."""
    baselines: tuple[RunRow, ...] = ()
    """Further recordings of the first job: what differs among them is noise."""
    perfscope_version: str = ""
    schema: str = field(default=SCHEMA, init=False)

    def to_dict(self) -> dict[str, Any]:
        """The JSON value of schema ``perfscope.comparison/1``."""
        return {"schema": self.schema, **dataclasses.asdict(self)}

    def self_check(self) -> None:
        """Raise ValueError where parts do not add up."""
        for difference in self.differences:
            difference.self_check()
        for row in self.scaling.rows if self.scaling else ():
            row.self_check()


def _add_up(what: str, parts: list[float], whole: float, scale: float) -> None:
    total = math.fsum(parts)
    if not math.isclose(total, whole, rel_tol=1e-9, abs_tol=max(abs(scale), 1.0) * 1e-9):
        raise ValueError(f"{what}: the parts add up to {total} us, the whole is {whole} us")
