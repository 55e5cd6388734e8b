"""The machines on the page: hosts, devices and the ranks' processes during the used steps, and around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from perfscope.reports import tables
from perfscope.reports.tables import Filled, HtmlTable
from perfscope.results.summary import Summary
from perfscope.results.system import DeviceRow, HostRow, ProcessRow
from perfscope.text import byte_size, percent, plural, rank_list, significant

_NOT_REPORTED: Final = "Not reported by this system."
_column: Final = partial(tables.column, reason=_NOT_REPORTED)


def system_reading(summary: Summary) -> str:
    """What the chart shows."""
    system = summary.system
    if system is None:
        return ""
    sentences = []
    used = [row.utilisation for row in system.devices if row.ranks and row.utilisation is not None]
    if used:
        low, high = percent(min(used)), percent(max(used))
        span = low if low == high else f"{low} to {high}"
        whose = "the ranks' GPUs were" if len(used) > 1 else "the GPU was"
        sentences.append(f"In the recorded steps {whose} busy {span} of the time")
    busiest = max(system.hosts, key=lambda row: row.cpu_share or 0.0)
    if busiest.cpu_share is not None:
        start = "the" if sentences else "In the recorded steps the"
        sentences.append(f"{start} CPU of {busiest.host} was {percent(busiest.cpu_share)} busy")
    drawn = {(series.host, series.device) for series in system.series}
    left = len(system.hosts) + len(system.devices) - len(drawn)
    more = f" {plural(left, 'host or device', 'hosts and devices')} not drawn." if left > 0 else ""
    return f"{'; '.join(sentences)}.{more}" if sentences else more.strip()


def system_tables(summary: Summary) -> tuple[HtmlTable, ...]:
    """Hosts, devices and the ranks' processes; those of which nothing is known are left out."""
    system = summary.system
    if system is None:
        return ()
    made = [_hosts(system.hosts), _devices(system.devices), _processes(system.processes)]
    return tuple(table for table in made if table is not None)


def _hosts(rows: Sequence[HostRow]) -> HtmlTable:
    columns = [
        tables.words("Host", [row.host for row in rows]),
        tables.words("Ranks", [rank_list(row.ranks) for row in rows]),
        _column("Cores", [row.cores_usable for row in rows], "{:g}".format, definition="usable_cores"),
        _column("CPU busy", [row.cpu_share for row in rows], percent, definition="cpu_busy"),
        _column(
            "CPU used by the job", [row.job_cores for row in rows], significant, unit="cores", definition="job_cores"
        ),
        _column("Runnable", [row.runnable for row in rows], significant, definition="runnable"),
        *_some("CPU pressure", rows, lambda row: row.cpu_pressure_share, percent, "pressure"),
        *_some("I/O pressure", rows, lambda row: row.io_pressure_share, percent, "pressure"),
        *_some("CPU throttled", rows, lambda row: row.throttled_share or None, percent, "throttled"),
        *_some("Steal", rows, lambda row: row.steal_share or None, percent, "steal"),
        tables.sizes("Memory", [row.memory_used_bytes for row in rows], definition="host_memory", reason=_NOT_REPORTED),
        *_some("Swap", rows, lambda row: row.swapped_bytes_per_s or None, _rate),
        *_some("Disk read", rows, lambda row: row.disk_read_bytes_per_s, _rate, "disk"),
        *_some("Disk write", rows, lambda row: row.disk_written_bytes_per_s, _rate, "disk"),
        *_some("Network in", rows, lambda row: row.network_received_bytes_per_s, _rate, "network"),
        *_some("Network out", rows, lambda row: row.network_sent_bytes_per_s, _rate, "network"),
        *_some("Loopback", rows, lambda row: row.loopback_bytes_per_s, _rate, "network"),
        *_some("RDMA in", rows, lambda row: row.rdma_received_bytes_per_s, _rate, "network"),
        *_some("RDMA out", rows, lambda row: row.rdma_sent_bytes_per_s, _rate, "network"),
    ]
    fewest = min(row.samples for row in rows)
    reading = f"Means over the recorded steps, of at least {plural(fewest, 'sample')} per host."
    return tables.collapsed(tables.table("hosts", "Hosts", columns, reading), "host")


def _devices(rows: Sequence[DeviceRow]) -> HtmlTable | None:
    if not rows:
        return None
    columns = [
        tables.words("Host", [row.host for row in rows]),
        tables.column("GPU", [row.index for row in rows], str),
        tables.words("Name", [row.name for row in rows]),
        tables.words("Ranks", [rank_list(row.ranks) for row in rows], reason="No rank is known to use it."),
        _column("Busy", [row.utilisation for row in rows], percent, definition="gpu_busy"),
        tables.sizes("Memory", [row.memory_used_bytes for row in rows], reason=_NOT_REPORTED),
        _column("Clock", [row.sm_mhz for row in rows], significant, unit="MHz", definition="clock_mhz"),
        _column("of maximum", [_part(row.sm_mhz, row.sm_mhz_max) for row in rows], percent),
        _column("Power", [row.power_w for row in rows], significant, unit="W"),
        _column("of limit", [_part(row.power_w, row.power_limit_w) for row in rows], percent),
        _column("Max. temperature", [row.temperature_c for row in rows], significant, unit="°C"),
        tables.words(
            "Clocks limited by",
            [_reasons(row) for row in rows],
            definition="slowed_by",
            reason="No reason was reported.",
        ),
        *_some("NVLink in", rows, lambda row: row.nvlink_received_bytes_per_s, _rate),
        *_some("NVLink out", rows, lambda row: row.nvlink_sent_bytes_per_s, _rate),
        *_some("PCIe in", rows, lambda row: row.pcie_received_bytes_per_s, _rate),
        *_some("PCIe out", rows, lambda row: row.pcie_sent_bytes_per_s, _rate),
    ]
    return tables.table("devices", "Devices", columns)


def _processes(rows: Sequence[ProcessRow]) -> HtmlTable | None:
    if not rows:
        return None
    columns = [
        tables.ranks("Rank", [row.rank for row in rows]),
        _column("CPU used", [row.cores for row in rows], significant, unit="cores", definition="rank_cores"),
        _column("Threads", [row.threads for row in rows], "{:,.0f}".format),
        _column("Waited for a core", [row.waited_share for row in rows], percent, definition="waited_for_core"),
    ]
    if any(row.workers for row in rows):
        reason = "No data loader worker was seen."
        columns += [
            tables.column("Loader workers", [row.workers for row in rows], str),
            _column(
                "CPU per worker", [row.worker_cores for row in rows], significant, unit="cores",
                definition="worker_cores", reason=reason,
            ),
            _column(
                "busiest worker", [row.worker_cores_max for row in rows], significant, unit="cores", reason=reason
            ),
        ]  # fmt: skip
    return tables.collapsed(tables.table("processes", "CPU of the ranks' processes", columns))


def _some(
    label: str,
    rows: Sequence[Any],
    value: Callable[[Any], float | None],
    write: Callable[[float], str],
    definition: str = "",
) -> list[Filled]:
    """A column, where any row has a value for it."""
    values = [value(row) for row in rows]
    if all(each is None for each in values):
        return []
    return [_column(label, values, write, definition=definition)]


def _reasons(row: DeviceRow) -> str:
    ordered = sorted(row.throttled.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {percent(part)}" for name, part in ordered)


def _part(value: float | None, whole: float | None) -> float | None:
    return value / whole if value is not None and whole else None


def _rate(bytes_per_s: float) -> str:
    return f"{byte_size(bytes_per_s)}/s"
