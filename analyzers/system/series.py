"""The machines over time, around the used steps, for a picture: few series, few points."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from perfscope.analyzers.system.samples import Table
from perfscope.summary_system import DeviceRow, HostRow, Series
from perfscope.trace import Float64, Int64

if TYPE_CHECKING:
    from perfscope.analyzers.system.table import Machine

HOSTS_SHOWN: Final = 8
DEVICES_SHOWN: Final = 32
"""More than these do not fit a picture: the busiest hosts and the least used devices are kept."""

POINTS: Final = 240
"""In one series; means over stretches where there are more samples."""

Place = tuple[str, int | None]


def thinned_choice(hosts: Sequence[HostRow], devices: Sequence[DeviceRow]) -> set[Place]:
    """(host, device) pairs whose series are kept; the device is None for the host itself."""
    busiest = sorted(hosts, key=lambda row: -(row.cpu_share or 0.0))[:HOSTS_SHOWN]
    idlest = sorted(devices, key=lambda row: 2.0 if row.utilisation is None else row.utilisation)[:DEVICES_SHOWN]
    return {(row.host, None) for row in busiest} | {(row.host, row.index) for row in idlest}


def host_series(machine: Machine, usable: float | None, shown: set[Place]) -> Iterator[Series]:
    """The series of one host and its devices among those ``shown``."""
    host = machine.samples.host
    if (host, None) in shown:
        yield from _made(machine, None, "cpu", *_busy(machine.samples.table))
        if usable:
            time, values = machine.samples.table.column("runnable")
            yield from _made(machine, None, "runnable", time, values / usable)
    for table, known in zip(machine.samples.devices, machine.samples.header.get("devices", ()), strict=False):
        index = int(known.get("index", 0))
        if (host, index) not in shown:
            continue
        for what, column, whole in (
            ("utilisation", "utilisation", 100),
            ("clock", "sm_mhz", known.get("sm_mhz_max")),
            ("power", "power_mw", known.get("power_limit_mw")),
        ):
            time, values = table.column(column)
            if whole:
                yield from _made(machine, index, what, time, values / whole)


def _busy(table: Table) -> tuple[Int64, Float64]:
    """Busy share of all cores between samples, at the middle between them."""
    time, idle = table.column("idle_ms")
    resting = idle + _values(table, "iowait_ms", len(idle))
    working = sum(_values(table, name, len(idle)) for name in ("user_ms", "system_ms", "steal_ms"))
    rested, worked = np.diff(resting), np.diff(working)
    known = (rested >= 0) & (worked >= 0) & (rested + worked > 0)
    middle = (time[1:] + time[:-1]) // 2
    return middle[known], worked[known] / (rested + worked)[known]


def _values(table: Table, name: str, count: int) -> Float64:
    values = table.column(name)[1]
    return values if len(values) == count else np.zeros(count)


def _made(machine: Machine, device: int | None, what: str, time_ns: Int64, values: Float64) -> Iterator[Series]:
    if len(time_ns) < 2:
        return
    stretch = -(-len(time_ns) // POINTS)
    starts = np.arange(0, len(time_ns), stretch)
    sizes = np.diff(np.append(starts, len(time_ns)))
    at = np.add.reduceat((time_ns + machine.to_picture_ns) / 1e3, starts) / sizes
    mean = np.add.reduceat(values, starts) / sizes
    yield Series(
        host=machine.samples.host,
        device=device,
        what=what,
        time_us=tuple(float(time) for time in at),
        values=tuple(float(value) for value in mean),
    )
