"""The numbers of a running job that are exported as metrics, each stated once for Prometheus and OpenTelemetry.

Names follow OpenTelemetry's conventions: dots between parts, units in UCUM and not in the name. Prometheus's
follow from them by its own rules: underscores, base units as suffixes, ``_total`` for what only grows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from perfscope.analyzers.live.state import STATES, HostLoad, LiveRank, LiveState
from perfscope.frozen import dataclass
from perfscope.reports.live.words import safe
from perfscope.text import rank_list

MOST_RANKS: Final = 1024
"""Of larger jobs ranks have no metrics of their own, only stragglers do: a series each would be too many."""

SUFFIXES: Final = {"s": "seconds", "By": "bytes", "1": "ratio", "W": "watts", "Cel": "celsius"}
"""Unit in UCUM -> the suffix of a Prometheus name. Others, in braces, have none."""

Point = tuple[dict[str, str], float]
"""Attributes, which Prometheus calls labels, and a value."""


@dataclass(frozen=True)
class Metric:
    """One metric."""

    name: str
    """OpenTelemetry's, without the leading ``perfscope.``."""
    unit: str
    meaning: str
    points: Callable[[LiveState], Iterable[Point]]
    grows: bool = False
    """It is a counter: it only grows, but for restarts of the job."""
    attributes: tuple[str, ...] = ()

    @property
    def otel_name(self) -> str:
        """``perfscope.job.step.duration``."""
        return f"perfscope.{self.name}"

    @property
    def prometheus_name(self) -> str:
        """``perfscope_job_step_duration_seconds``; without the ``_total`` of counters, which the client adds."""
        suffix = f"_{SUFFIXES[self.unit]}" if self.unit in SUFFIXES else ""
        return self.otel_name.replace(".", "_") + suffix


def _one(value: Callable[[LiveState], float | None]) -> Callable[[LiveState], Iterator[Point]]:
    def points(state: LiveState) -> Iterator[Point]:
        found = value(state)
        if found is not None:
            yield {}, float(found)

    return points


def _us(value: float | None) -> float | None:
    return None if value is None else value / 1e6


def _each_rank(value: Callable[[LiveRank], float | None]) -> Callable[[LiveState], Iterator[Point]]:
    def points(state: LiveState) -> Iterator[Point]:
        for row in state.ranks if len(state.ranks) <= MOST_RANKS else ():
            if (found := value(row)) is not None:
                yield {"rank": str(row.rank)}, float(found)

    return points


def _each_host(value: Callable[[HostLoad], float | None]) -> Callable[[LiveState], Iterator[Point]]:
    def points(state: LiveState) -> Iterator[Point]:
        for host in state.hosts:
            if (found := value(host)) is not None:
                yield {"host": safe(host.host)}, float(found)

    return points


def _each_device(name: str) -> Callable[[LiveState], Iterator[Point]]:
    def points(state: LiveState) -> Iterator[Point]:
        for host in state.hosts:
            for device in host.devices:
                if (found := getattr(device, name)) is not None:
                    yield {"host": safe(host.host), "gpu": str(device.index)}, float(found)

    return points


def _states(state: LiveState) -> Iterator[Point]:
    for name in STATES:
        yield {"state": name}, float(state.state == name)


def _rank_counts(state: LiveState) -> Iterator[Point]:
    for name, number in state.rank_counts().items():
        yield {"state": name}, float(number)


def _stages(state: LiveState) -> Iterator[Point]:
    for stage, us in state.stages_us.items():
        yield {"stage": stage}, us / 1e6


def _stragglers(state: LiveState) -> Iterator[Point]:
    for row in state.stragglers:
        yield {"rank": rank_list(row.ranks), "stage": row.stage}, row.delay_us / 1e6


def _steps(state: LiveState) -> float | None:
    return state.last_step + 1 if state.last_step >= 0 else None


def _samples(state: LiveState) -> float | None:
    return state.samples_per_step * (state.last_step + 1) if state.samples_per_step is not None else None


def _last_step_at(state: LiveState) -> float | None:
    return state.time_ns / 1e9 - state.age_s if state.age_s is not None else None


METRICS: Final = (
    Metric("job.state", "{state}", "1 for the state the job is in, 0 for all others.", _states, attributes=("state",)),
    Metric("job.ranks", "{rank}", "Ranks in each state.", _rank_counts, attributes=("state",)),
    Metric("job.steps", "{step}", "Steps that all ranks have made.", _one(_steps), grows=True),
    Metric("job.samples", "{sample}", "Samples of all ranks that were trained on.", _one(_samples), grows=True),
    Metric("job.restarts", "{restart}", "Elastic restarts.", _one(lambda state: state.restarts), grows=True),
    Metric("job.last_step.timestamp", "s", "When the last step ended, since the epoch.", _one(_last_step_at)),
    Metric("job.step.duration", "s", "Step time, mean of the last seconds.", _one(lambda state: _us(state.step_us))),
    Metric("job.step.run_duration", "s", "Step time, mean of the run.", _one(lambda state: _us(state.run_step_us))),
    Metric(
        "job.sample.rate", "{sample}/s", "Samples per second, of the last seconds.",
        _one(lambda state: state.samples_per_s),
    ),
    Metric("job.stage.duration", "s", "Time per step in each stage, mean of ranks.", _stages, attributes=("stage",)),
    Metric(
        "straggler.delay", "s", "Time per step by which a rank is later than its peers, where it is the latest.",
        _stragglers, attributes=("rank", "stage"),
    ),
    Metric(
        "rank.step.duration", "s", "Step time of a rank, mean of the last seconds.",
        _each_rank(lambda row: _us(row.step_us)), attributes=("rank",),
    ),
    Metric(
        "rank.excess", "s", "Time per step above the other ranks, in stages without waiting.",
        _each_rank(lambda row: _us(row.excess_us)), attributes=("rank",),
    ),
    Metric(
        "rank.steps", "{step}", "Steps that a rank has made.",
        _each_rank(lambda row: row.last_step + 1 if row.last_step >= 0 else None), grows=True, attributes=("rank",),
    ),
    Metric(
        "rank.cpu.cores", "{cpu}", "Cores' worth of time that a rank and its loader workers use.",
        _each_rank(lambda row: row.cores), attributes=("rank",),
    ),
    Metric(
        "host.cpu.utilization", "1", "Share of a host's cores that are busy.",
        _each_host(lambda host: host.cpu_share), attributes=("host",),
    ),
    Metric(
        "host.memory.usage", "By", "A host's memory in use.",
        _each_host(lambda host: host.memory_used_bytes), attributes=("host",),
    ),
    Metric(
        "gpu.utilization", "1", "Share of the time in which a kernel ran.",
        _each_device("utilisation"), attributes=("host", "gpu"),
    ),
    Metric(
        "gpu.memory.usage", "By", "A device's memory in use.", _each_device("memory_used_bytes"),
        attributes=("host", "gpu"),
    ),
    Metric("gpu.power", "W", "A device's power.", _each_device("power_w"), attributes=("host", "gpu")),
    Metric(
        "gpu.temperature", "Cel", "A device's temperature.", _each_device("temperature_c"), attributes=("host", "gpu"),
    ),
)  # fmt: skip
