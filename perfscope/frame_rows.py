"""Rows of the tables that a summary holds nested: one row for each element, with what it belongs to repeated in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from perfscope.summary import Summary
from perfscope.summary_cost import SavingRow


@dataclass(frozen=True)
class StepRow:
    """One used step of the job."""

    step: int
    """The job's own step number; counted from 0 where nothing numbers the steps."""
    step_time_us: float
    """The slowest rank's window."""


@dataclass(frozen=True)
class NamedHostRow:
    """A part of one rank's idle_host that has a visible name."""

    rank: int
    name: str
    us: float
    """Mean per step."""


@dataclass(frozen=True)
class LastArriverRow:
    """A rank that came last in collectives of one group, kind, type and size."""

    group: str
    kind: str
    dtype: str | None
    bytes: int | None
    rank: int
    share: float
    """Share of the instances in which it came last."""


@dataclass(frozen=True)
class EvidenceOfRow:
    """One number that a finding rests on."""

    finding: int
    """Row of the findings."""
    rule: str
    what: str
    value: float
    unit: str
    """Of ``value``."""
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class StretchRow:
    """A stretch of one rank's typical step that belongs to one row of the account."""

    rank: int
    step: int | None
    category: str
    start_us: float
    """From the earliest start of that step on any rank, aligned."""
    duration_us: float


@dataclass(frozen=True)
class LaneEventRow:
    """An entry of one rank's timeline of a step."""

    rank: int
    step: int | None
    lane: str
    """``compute``, ``communication``, ``copy``, ``host``, ``backward`` or ``loader``."""
    start_us: float
    """From the earliest start of that step on any rank shown, aligned."""
    duration_us: float
    name: str | None
    """Of the longest event in the entry."""
    operator: str | None
    """Innermost operator that launched it."""
    pieces: int
    """Events in the entry: those too short to be seen are merged."""
    busy_us: float
    """Sum of their lengths."""
    group: str | None
    """Of a collective, as the next two."""
    bytes: int | None
    wait_us: float | None
    """Until the last participant arrived."""


@dataclass(frozen=True)
class MemoryPointRow:
    """What an allocator held from this moment to the next."""

    rank: int
    device: int
    """-1: the host's memory."""
    time_us: float
    """From the earliest start of the first used step on any rank's host, aligned."""
    allocated_bytes: int | None
    """Sum of live tensors."""
    reserved_bytes: int | None
    """Held from the device, in use or cached."""


@dataclass(frozen=True)
class CurvePointRow:
    """One point of a setting's curve."""

    setting: str
    setting_unit: str
    """What its values count: ``MiB``, ``workers``, ``micro-batches``."""
    current: float | None
    """The value that the job was recorded with."""
    best: float
    """The value to choose."""
    value: float
    low_us: float
    mid_us: float
    high_us: float


@dataclass(frozen=True)
class FlopsRow:
    """Model FLOPs that ran in one type."""

    dtype: str
    share: float


@dataclass(frozen=True)
class HistoryStageRow:
    """A stage of one rank's steps over the whole run."""

    rank: int
    stage: str
    us: float
    """Mean per step."""


@dataclass(frozen=True)
class ThrottledRow:
    """A reason that held one device's clocks below its highest."""

    host: str
    index: int
    """As the driver counts."""
    reason: str
    share: float
    """Of the samples."""


@dataclass(frozen=True)
class SystemPointRow:
    """One look at one quantity of a host or device."""

    host: str
    device: int | None
    """None: of the host itself."""
    what: str
    """``cpu``, ``utilisation``, ``clock`` or ``power``, each as a share; or ``runnable``, threads per usable core."""
    time_us: float
    """From the start of the first used step, on the lowest rank's clock."""
    value: float


def steps(summary: Summary) -> Iterator[StepRow]:
    """The used steps in order."""
    times = summary.job.step_time_us_per_step
    numbers = summary.job.steps if len(summary.job.steps) == len(times) else range(len(times))
    return itertools.starmap(StepRow, zip(numbers, times, strict=True))


def named_host(summary: Summary) -> Iterator[NamedHostRow]:
    """The named parts of each rank's idle_host."""
    return (NamedHostRow(row.rank, name, us) for row in summary.accounting for name, us in row.named_host_us.items())


def last_arrivers(summary: Summary) -> Iterator[LastArriverRow]:
    """Who came last, for each row of the collectives, the most frequent first."""
    for row in summary.collectives:
        for rank, share in sorted(row.last_arriver.items(), key=lambda item: (-item[1], item[0])):
            yield LastArriverRow(row.group, row.kind, row.dtype, row.bytes, rank, share)


def evidence(summary: Summary) -> Iterator[EvidenceOfRow]:
    """The evidence of each finding."""
    for number, finding in enumerate(summary.findings):
        for row in finding.evidence:
            yield EvidenceOfRow(number, finding.rule, row.what, row.value, row.unit, row.ranks)


def strips(summary: Summary) -> Iterator[StretchRow]:
    """The stretches of every strip."""
    for strip in summary.strips:
        for category, start, duration in zip(strip.categories, strip.start_us, strip.duration_us, strict=True):
            yield StretchRow(strip.rank, strip.step, category, start, duration)


def lanes(summary: Summary) -> Iterator[LaneEventRow]:
    """The entries of every lane."""
    for lane in summary.lanes:
        for at in range(len(lane.start_us)):
            name, operator = lane.name[at], lane.operator[at]
            group = lane.group[at] if lane.group else None
            yield LaneEventRow(
                rank=lane.rank,
                step=lane.step,
                lane=lane.kind,
                start_us=lane.start_us[at],
                duration_us=lane.duration_us[at],
                name=None if name is None else lane.texts[name],
                operator=None if operator is None else lane.texts[operator],
                pieces=lane.pieces[at],
                busy_us=lane.busy_us[at],
                group=None if group is None else lane.texts[group],
                bytes=lane.bytes[at] if lane.bytes else None,
                wait_us=lane.wait_us[at] if lane.wait_us else None,
            )


def memory_timeline(summary: Summary) -> Iterator[MemoryPointRow]:
    """The points of every course."""
    for strip in summary.memory_timeline:
        for point in zip(strip.time_us, strip.allocated_bytes, strip.reserved_bytes, strict=True):
            yield MemoryPointRow(strip.rank, strip.device, *point)


def curves(summary: Summary) -> Iterator[CurvePointRow]:
    """The points of every curve."""
    for curve in summary.curves:
        for point in curve.points:
            yield CurvePointRow(
                curve.setting, curve.unit, curve.current, curve.best, point.value, point.low_us, point.mid_us,
                point.high_us,
            )  # fmt: skip


def flops_by_dtype(summary: Summary) -> Iterator[FlopsRow]:
    """The types in which model FLOPs ran."""
    return itertools.starmap(FlopsRow, summary.utilisation.flops_by_dtype.items())


def history_stages(summary: Summary) -> Iterator[HistoryStageRow]:
    """The stages of every rank's steps."""
    for row in summary.history.ranks if summary.history else ():
        for stage, us in row.stages_us.items():
            yield HistoryStageRow(row.rank, stage, us)


def throttled(summary: Summary) -> Iterator[ThrottledRow]:
    """The reasons of every device."""
    for row in summary.system.devices if summary.system else ():
        for reason, share in row.throttled.items():
            yield ThrottledRow(row.host, row.index, reason, share)


def savings(summary: Summary) -> Iterator[SavingRow]:
    """What the findings save, in their order, then the plan of all of them."""
    if summary.cost is not None:
        yield from summary.cost.savings
        if summary.cost.plan is not None:
            yield summary.cost.plan


def system_timeline(summary: Summary) -> Iterator[SystemPointRow]:
    """The points of every series."""
    for series in summary.system.series if summary.system else ():
        for time_us, value in zip(series.time_us, series.values, strict=True):
            yield SystemPointRow(series.host, series.device, series.what, time_us, value)
