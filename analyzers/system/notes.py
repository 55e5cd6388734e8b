"""What the reader must know of the machines: slowed clocks, quotas, swap, saturated disks and workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from perfscope.job import Job
from perfscope.summary import Note
from perfscope.summary_system import DeviceRow, HostRow, System

SLOWED: Final = 0.1
"""Share of the samples from which slowed clocks are told."""
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
"""Share of the time from which a CPU quota or a hypervisor is told."""
STUCK: Final = 0.1
"""Share of the time from which waiting for I/O or memory is told."""
SWAPPING: Final = 1e6
"""Bytes a second."""
FULL: Final = 0.95
"""Share of the host's memory."""
SATURATED: Final = 0.9
"""Busy share from which a loader worker does nothing but compute, and a host has no core to spare."""
CROWDED: Final = 0.2
"""Share of the cores of such a host from which other processes are told."""
FEW: Final = 3
"""Samples during the used steps below which figures are those of moments."""


def system_notes(job: Job, system: System | None) -> Iterator[Note]:
    """Every note on the machines, the gravest first."""
    if system is None:
        if job.samples:
            yield Note(
                about="machines",
                text="The system sampler took no sample during the recorded steps, or its clock is not the traces': "
                "nothing is said of the machines. perfscope run --sample-every 0.1 samples more often.",
            )
        return
    for device in system.devices:
        yield from _about_clocks(device)
    for host in system.hosts:
        yield from _about_host(host)
    yield from _about_workers(system)
    few = [host for host in system.hosts if host.samples < FEW]
    if few:
        yield Note(
            about="machines",
            text=f"{few[0].host} was sampled {_times(few[0].samples)} during the recorded steps: its clocks, "
            "temperatures and queues are those of moments. Record longer, or perfscope run --sample-every 0.1.",
            ranks=tuple(rank for host in few for rank in host.ranks),
        )


def _about_clocks(device: DeviceRow) -> Iterator[Note]:
    harmful = {name: share for name, share in device.throttled.items() if name in HARMFUL and share >= SLOWED}
    place = f"GPU {device.index} of {device.host}"
    clock = f", at {device.sm_mhz:.0f} of {device.sm_mhz_max:.0f} MHz" if device.sm_mhz and device.sm_mhz_max else ""
    if harmful:
        reasons = " and ".join(f"{name} ({share:.0%} of the samples)" for name, share in harmful.items())
        heat = f" It reached {device.temperature_c:.0f} °C." if device.temperature_c is not None else ""
        yield Note(
            about="clocks",
            text=f"{place} was slowed down{clock}: {reasons}.{heat} Check its cooling and power supply "
            "(nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER).",
            ranks=device.ranks,
        )
    capped = device.throttled.get("power cap", 0.0)
    if capped >= POWER_CAPPED and device.power_limit_w:
        yield Note(
            about="clocks",
            text=f"{place} ran at its power limit of {device.power_limit_w:.0f} W in {capped:.0%} of the samples"
            f"{clock}.",
            ranks=device.ranks,
        )
    if device.pcie_width and device.pcie_width_max and device.pcie_width < device.pcie_width_max:
        yield Note(
            about="machines",
            text=f"{place} is connected by {device.pcie_width} of {device.pcie_width_max} PCIe lanes: reseat it, or "
            "move it to another slot.",
            ranks=device.ranks,
        )
    chosen = device.throttled.get("clocks set by the user", 0.0)
    if chosen >= POWER_CAPPED and clock:
        yield Note(
            about="clocks",
            text=f"The clocks of {place} are set by hand{clock} (nvidia-smi --reset-gpu-clocks undoes it).",
            ranks=device.ranks,
        )


def _about_host(host: HostRow) -> Iterator[Note]:
    told: list[str] = []
    if _above(host.throttled_share, HELD_BACK):
        told.append(
            f"The CPU quota of the job on {host.host} ({host.cores_usable or 0:g} cores) kept it from running for "
            f"{host.throttled_share:.0%} of the time. Raise the container's CPU limit, or use fewer threads and "
            "workers."
        )
    others = _others(host)
    if _above(others, CROWDED):
        told.append(
            f"Other processes kept {(others or 0) * (host.cores or 0):.1f} of the {host.cores} cores of {host.host} "
            f"busy, the job {host.job_cores:.1f}: it was slowed down from outside."
        )
    if _above(host.steal_share, HELD_BACK):
        told.append(f"The hypervisor gave {host.steal_share:.0%} of the CPU time of {host.host} to other machines.")
    if _above(host.swapped_bytes_per_s, SWAPPING):
        told.append(
            f"{host.host} swapped {(host.swapped_bytes_per_s or 0) / 1e6:.0f} MB/s: it is short of memory. Use fewer "
            "loader workers, a smaller prefetch_factor, or more memory."
        )
    used = host.memory_used_bytes / host.memory_bytes if host.memory_used_bytes and host.memory_bytes else None
    if _above(used, FULL):
        told.append(f"{used:.0%} of the memory of {host.host} was in use: the next process may be killed for it.")
    waited = max(host.iowait_share or 0.0, host.io_pressure_share or 0.0)
    if waited >= STUCK:
        told.append(
            f"Something on {host.host} waited for disks for {waited:.0%} of the time "
            f"({(host.disk_read_bytes_per_s or 0) / 1e6:.0f} MB/s read, "
            f"{(host.disk_written_bytes_per_s or 0) / 1e6:.0f} MB/s written)."
        )
    if _above(host.memory_pressure_share, STUCK):
        told.append(f"Something on {host.host} waited for memory for {host.memory_pressure_share:.0%} of the time.")
    for text in told:
        yield Note(about="machines", text=text, ranks=host.ranks)


def _others(host: HostRow) -> float | None:
    """Share of the host's cores that processes besides the job's kept busy, on a host without a core to spare."""
    if host.cpu_share is None or host.job_cores is None or not host.cores or host.cpu_share < SATURATED:
        return None
    return host.cpu_share - host.job_cores / host.cores


def _about_workers(system: System) -> Iterator[Note]:
    busy = [row for row in system.processes if row.workers and _above(row.worker_cores, SATURATED)]
    if busy:
        most = max(busy, key=lambda row: row.worker_cores or 0.0)
        yield Note(
            about="machines",
            text=f"The data loader's workers do nothing but compute ({most.worker_cores:.0%} of a core each): only "
            "more of them, or cheaper batches, load faster.",
            ranks=tuple(row.rank for row in busy),
        )


def _above(value: float | None, limit: float) -> bool:
    return value is not None and value >= limit


def _times(count: int) -> str:
    return {0: "not at all", 1: "once", 2: "twice"}.get(count, f"{count} times")
