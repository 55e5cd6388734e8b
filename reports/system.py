"""The machines on the page: hosts, devices and the ranks' processes during the used steps, and around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from perfscope.reports import tables
from perfscope.reports.format import byte_size, plural, rank_list, share, significant, unit_for
from perfscope.reports.tables import Cell, Filled, Table, absent, written
from perfscope.summary import Summary
from perfscope.summary_system import DeviceRow, HostRow, ProcessRow, Series, System

COURSES: Final = 8
"""In one row of the picture; more cannot be told apart."""

_ROWS: Final = (
    ("utilisation", "GPU busy, %", 100.0, False),
    ("clock", "clock, % of highest", 100.0, False),
    ("power", "power, % of limit", 100.0, False),
    ("cpu", "CPU busy, %", 100.0, True),
    ("runnable", "runnable threads per core", 1.0, True),
)
"""Of the picture: series, axis, factor, and whether the highest or the lowest courses are kept where there are many."""

_NOT_TOLD: Final = "This system does not tell."


def system_chart(summary: Summary) -> dict[str, Any] | None:
    """The picture's rows; None where nothing was sampled."""
    system = summary.system
    if system is None or not system.series:
        return None
    unit = unit_for(max(abs(time) for series in system.series for time in (series.time_us[0], series.time_us[-1])))

    def rounded(values: Sequence[float], factor: float) -> list[float]:
        return [float(f"{value * factor:.4g}") for value in values]

    rows = []
    for what, axis, factor, highest in _ROWS:
        series = _extreme([each for each in system.series if each.what == what], highest=highest)
        if series:
            rows.append(
                {
                    "axis": axis,
                    "series": [
                        {
                            "name": _name(each, system),
                            "time": rounded(each.time_us, 1 / unit.size),
                            "values": rounded(each.values, factor),
                        }
                        for each in series
                    ],
                }
            )
    return {"unit": unit.name, "window": [edge / unit.size for edge in system.window_us], "rows": rows}


def system_reading(summary: Summary) -> str:
    """What the picture shows here."""
    system = summary.system
    if system is None:
        return ""
    sentences = []
    used = [(row.utilisation, row) for row in system.devices if row.ranks and row.utilisation is not None]
    if used:
        low, high = min(used, key=_first), max(used, key=_first)
        span = share(low[0]) if share(low[0]) == share(high[0]) else f"{share(low[0])} to {share(high[0])}"
        whose = "the ranks' GPUs were" if len(used) > 1 else "the GPU was"
        sentences.append(f"In the recorded steps {whose} busy {span} of the time")
    busiest = max(system.hosts, key=lambda row: row.cpu_share or 0.0)
    if busiest.cpu_share is not None:
        start = "the" if sentences else "In the recorded steps the"
        sentences.append(f"{start} CPU of {busiest.host} was {share(busiest.cpu_share)} busy")
    kept = {(series.host, series.device) for series in system.series}
    left = len(system.hosts) + len(system.devices) - len(kept)
    more = f" {plural(left, 'host or device', 'hosts and devices')} not drawn." if left > 0 else ""
    return f"{'; '.join(sentences)}.{more}" if sentences else more.strip()


def system_tables(summary: Summary) -> tuple[Table, ...]:
    """Hosts, devices and the ranks' processes; those of which nothing is known are left out."""
    system = summary.system
    if system is None:
        return ()
    made = [_hosts(system.hosts), _devices(system.devices), _processes(system.processes)]
    return tuple(table for table in made if table is not None)


def _hosts(rows: Sequence[HostRow]) -> Table:
    columns = [
        tables.words("Host", [row.host for row in rows]),
        tables.words("Ranks", [rank_list(row.ranks) for row in rows]),
        tables.numbers(
            "Cores",
            [written(f"{row.cores_usable or 0:g}", row.cores_usable, _NOT_TOLD) for row in rows],
            definition="usable_cores",
        ),
        tables.numbers("CPU busy", [_share(row.cpu_share) for row in rows], definition="cpu_busy"),
        tables.numbers("by the job", [_number(row.job_cores) for row in rows], unit="cores", definition="job_cores"),
        tables.numbers("Runnable", [_number(row.runnable) for row in rows], definition="runnable"),
        *_some("Waited for CPU", rows, lambda row: row.cpu_pressure_share, _share, "pressure"),
        *_some("for I/O", rows, lambda row: row.io_pressure_share, _share, "pressure"),
        *_some("CPU quota", rows, lambda row: row.throttled_share or None, _share, "throttled"),
        *_some("Steal", rows, lambda row: row.steal_share or None, _share, "steal"),
        tables.sizes("Memory", [row.memory_used_bytes for row in rows], definition="host_memory", reason=_NOT_TOLD),
        *_some("Swap", rows, lambda row: row.swapped_bytes_per_s or None, _rate),
        *_some("Disk read", rows, lambda row: row.disk_read_bytes_per_s, _rate, "disk"),
        *_some("written", rows, lambda row: row.disk_written_bytes_per_s, _rate, "disk"),
        *_some("Network in", rows, lambda row: row.network_received_bytes_per_s, _rate, "network"),
        *_some("out", rows, lambda row: row.network_sent_bytes_per_s, _rate, "network"),
        *_some("Loopback", rows, lambda row: row.loopback_bytes_per_s, _rate, "network"),
        *_some("RDMA in", rows, lambda row: row.rdma_received_bytes_per_s, _rate, "network"),
        *_some("RDMA out", rows, lambda row: row.rdma_sent_bytes_per_s, _rate, "network"),
    ]
    fewest = min(row.samples for row in rows)
    return tables.table("hosts", "Hosts", columns, f"Sampled {plural(fewest, 'time')} or more in the recorded steps.")


def _devices(rows: Sequence[DeviceRow]) -> Table | None:
    if not rows:
        return None
    columns = [
        tables.words("Host", [row.host for row in rows]),
        tables.numbers("GPU", [Cell(text=str(row.index), order=row.index) for row in rows]),
        tables.words("Name", [row.name for row in rows]),
        tables.words("Ranks", [rank_list(row.ranks) for row in rows], reason="No rank is known to train on it."),
        tables.numbers("Busy", [_share(row.utilisation) for row in rows], definition="gpu_busy"),
        tables.sizes("Memory", [row.memory_used_bytes for row in rows], reason=_NOT_TOLD),
        tables.numbers("Clock", [_number(row.sm_mhz) for row in rows], unit="MHz", definition="clock_mhz"),
        tables.numbers("of highest", [_share(_part(row.sm_mhz, row.sm_mhz_max)) for row in rows]),
        tables.numbers("Power", [_number(row.power_w) for row in rows], unit="W"),
        tables.numbers("of limit", [_share(_part(row.power_w, row.power_limit_w)) for row in rows]),
        tables.numbers("Hottest", [_number(row.temperature_c) for row in rows], unit="°C"),
        tables.words(
            "Slowed by", [_reasons(row) for row in rows], definition="slowed_by", reason="No reason was reported."
        ),
        *_some("NVLink in", rows, lambda row: row.nvlink_received_bytes_per_s, _rate),
        *_some("NVLink out", rows, lambda row: row.nvlink_sent_bytes_per_s, _rate),
        *_some("PCIe in", rows, lambda row: row.pcie_received_bytes_per_s, _rate),
        *_some("PCIe out", rows, lambda row: row.pcie_sent_bytes_per_s, _rate),
    ]
    return tables.table("devices", "Devices", columns)


def _processes(rows: Sequence[ProcessRow]) -> Table | None:
    if not rows:
        return None
    columns = [
        tables.ranks("Rank", [row.rank for row in rows]),
        tables.numbers("CPU used", [_number(row.cores) for row in rows], unit="cores", definition="rank_cores"),
        tables.numbers("Threads", [_whole(row.threads) for row in rows]),
        tables.numbers("Waited for a core", [_share(row.waited_share) for row in rows], definition="waited_for_core"),
    ]
    if any(row.workers for row in rows):
        reason = "No data loader worker was seen."
        columns += [
            tables.numbers("Loader workers", [Cell(text=str(row.workers), order=row.workers) for row in rows]),
            tables.numbers(
                "CPU of one", [_number(row.worker_cores, reason) for row in rows], unit="cores",
                definition="worker_cores",
            ),
            tables.numbers("of the busiest", [_number(row.worker_cores_max, reason) for row in rows], unit="cores"),
        ]  # fmt: skip
    return tables.table("processes", "CPU of the ranks' processes", columns)


def _some(
    label: str,
    rows: Sequence[Any],
    value: Callable[[Any], float | None],
    cell: Callable[[float | None], Cell],
    definition: str = "",
) -> list[Filled]:
    """A column, where any row has a value for it."""
    values = [value(row) for row in rows]
    if all(each is None for each in values):
        return []
    return [tables.numbers(label, [cell(each) for each in values], definition=definition)]


def _extreme(series: list[Series], *, highest: bool) -> list[Series]:
    """The courses that a row of the picture shows: the highest or lowest, in the order of their names."""

    def mean(each: Series) -> float:
        return sum(each.values) / len(each.values)

    chosen = sorted(series, key=mean, reverse=highest)[:COURSES]
    return sorted(chosen, key=lambda each: (each.host, -1 if each.device is None else each.device))


def _name(series: Series, system: System) -> str:
    """What a course is called: the host only where there are several."""
    if series.device is None:
        return series.host
    return f"GPU {series.device}" if len(system.hosts) == 1 else f"{series.host} GPU {series.device}"


def _reasons(row: DeviceRow) -> str:
    ordered = sorted(row.throttled.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {share(part)}" for name, part in ordered)


def _part(value: float | None, whole: float | None) -> float | None:
    return value / whole if value is not None and whole else None


def _share(value: float | None) -> Cell:
    return written(share(value), value, _NOT_TOLD)


def _rate(value: float | None) -> Cell:
    return written(f"{byte_size(value)}/s", value, _NOT_TOLD)


def _whole(value: float | None) -> Cell:
    """A mean of counts, without decimals."""
    return absent(_NOT_TOLD) if value is None else Cell(text=f"{value:,.0f}", order=value)


def _number(value: float | None, reason: str = _NOT_TOLD) -> Cell:
    return absent(reason) if value is None else Cell(text=significant(value), order=value)


def _first(pair: tuple[float, DeviceRow]) -> float:
    return pair[0]
