"""What the reader must know of the machines: slowed clocks, quotas, swap, saturated disks and workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from perfscope.recording.job import Job
from perfscope.results.notes import Note, note
from perfscope.results.system import DeviceRow, HostRow, System

SLOWED: Final = 0.1
"""Share of the samples from which slowed clocks are reported."""
POWER_CAPPED: Final = 0.5
"""The same for the power cap, which a busy device touches now and then by design."""
HARMFUL: Final = (
    "hardware slowdown",
    "software thermal slowdown",
    "hardware thermal slowdown",
    "external power brake",
)
"""Reasons that a healthy machine does not have."""
HELD_BACK: Final = 0.05
"""Share of the time from which a CPU quota or a hypervisor is reported."""
STUCK: Final = 0.1
"""Share of the time from which waiting for I/O or memory is reported."""
SWAPPING: Final = 1e6
"""Bytes per second."""
FULL: Final = 0.95
"""Share of the host's memory."""
SATURATED: Final = 0.9
"""Busy share from which a loader worker does nothing but compute, and a host has no core to spare."""
CROWDED: Final = 0.2
"""Share of the cores of such a host from which other processes are reported."""
FEW: Final = 3
"""Samples during the used steps below which values are momentary."""


def system_notes(job: Job, system: System | None) -> Iterator[Note]:
    """Every note on the machines, the most severe first."""
    if system is None:
        if job.samples:
            yield note("machines", "no_samples")
        return
    for device in system.devices:
        yield from _about_clocks(device)
    for host in system.hosts:
        yield from _about_host(host)
    yield from _about_workers(system)
    few = [host for host in system.hosts if host.samples < FEW]
    if few:
        ranks = [rank for host in few for rank in host.ranks]
        yield note("machines", "few_samples", ranks, host=few[0].host, count=few[0].samples)


def _about_clocks(device: DeviceRow) -> Iterator[Note]:
    harmful = {name: share for name, share in device.throttled.items() if name in HARMFUL and share >= SLOWED}
    gpu = {"index": device.index, "host": device.host}
    clock = f", at {device.sm_mhz:.0f} of {device.sm_mhz_max:.0f} MHz" if device.sm_mhz and device.sm_mhz_max else ""
    if harmful:
        reasons = " and ".join(f"{name} ({share:.0%} of the samples)" for name, share in harmful.items())
        heat = f" It reached {device.temperature_c:.0f} °C." if device.temperature_c is not None else ""
        yield note("clocks", "slowed_clocks", device.ranks, **gpu, clock=clock, reasons=reasons, heat=heat)
    capped = device.throttled.get("power cap", 0.0)
    if capped >= POWER_CAPPED and device.power_limit_w:
        limit_w = device.power_limit_w
        yield note("clocks", "power_limit", device.ranks, **gpu, clock=clock, share=capped, limit_w=limit_w)
    if device.pcie_width and device.pcie_width_max and device.pcie_width < device.pcie_width_max:
        lanes, possible = device.pcie_width, device.pcie_width_max
        yield note("machines", "pcie_lanes", device.ranks, **gpu, lanes=lanes, possible=possible)
    if device.throttled.get("clocks set by the user", 0.0) >= POWER_CAPPED and clock:
        yield note("clocks", "clocks_set_by_hand", device.ranks, **gpu, clock=clock)


def _about_host(host: HostRow) -> Iterator[Note]:
    def found(kind: str, **values: float | None) -> Note:
        return note("machines", kind, host.ranks, host=host.host, **values)

    if _above(host.throttled_share, HELD_BACK):
        yield found("cpu_quota", cores=host.cores_usable or 0, share=host.throttled_share)
    others = host.other_cores
    # On a host with cores to spare they take none of the job's.
    if others is not None and _above(host.cpu_share, SATURATED) and others >= CROWDED * (host.cores or 0):
        yield found("other_processes", others=others, cores=host.cores, job=host.job_cores)
    if _above(host.steal_share, HELD_BACK):
        yield found("steal", share=host.steal_share)
    if _above(host.swapped_bytes_per_s, SWAPPING):
        yield found("swapping", mb_per_s=(host.swapped_bytes_per_s or 0) / 1e6)
    used = host.memory_used_bytes / host.memory_bytes if host.memory_used_bytes and host.memory_bytes else None
    if _above(used, FULL):
        yield found("memory_full", share=used)
    waited = max(host.iowait_share or 0.0, host.io_pressure_share or 0.0)
    if waited >= STUCK:
        read, written = (host.disk_read_bytes_per_s or 0) / 1e6, (host.disk_written_bytes_per_s or 0) / 1e6
        yield found("io_pressure", share=waited, read_mb_per_s=read, written_mb_per_s=written)
    if _above(host.memory_pressure_share, STUCK):
        yield found("memory_pressure", share=host.memory_pressure_share)


def _about_workers(system: System) -> Iterator[Note]:
    busy = [row for row in system.processes if row.workers and _above(row.worker_cores, SATURATED)]
    if busy:
        most = max(busy, key=lambda row: row.worker_cores or 0.0)
        yield note("machines", "busy_workers", (row.rank for row in busy), share=most.worker_cores)


def _above(value: float | None, limit: float) -> bool:
    return value is not None and value >= limit
