"""The machines during the used steps: hosts, devices and processes, from what the system sampler recorded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.system.samples import HostSamples, Machine, SampleTable, read_samples
from perfscope.grouping import grouped
from perfscope.recording.job import Job
from perfscope.recording.metadata import RunMetadata
from perfscope.recording.samples import LOADER, RANK, SampledDevice
from perfscope.results.system import DeviceRow, HostRow, ProcessRow, Series, System
from perfscope.trace.trace import Float64, Int64

REASONS: Final = {
    0x2: "clocks set by the user",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "external power brake",
    0x100: "display clocks",
}
"""NVML's bit (``nvmlClocksEventReason…``) -> reason; 0x1, an idle device, is none."""

_STALLS: Final = ("cpu_pressure", "io_pressure", "memory_pressure", "throttled")
_BYTES: Final = (
    "swapped_bytes", "disk_read_bytes", "disk_written_bytes", "network_received_bytes", "network_sent_bytes",
    "loopback_bytes", "rdma_received_bytes", "rdma_sent_bytes",
)  # fmt: skip
"""Counters of a host: of stalled microseconds, and of bytes."""

AROUND_NS: Final = (10 * 10**9, 60 * 10**9)
"""Bounds of the time that the curves show before and after the used steps, which is five times their duration."""

HOSTS_SHOWN: Final = 8
DEVICES_SHOWN: Final = 32
"""More do not fit into one chart: the busiest hosts and the least used devices are shown."""

_DIGITS: Final = 6
"""Of the largest number that can be a core's."""

POINTS: Final = 240
"""Points in one series; more samples are averaged over intervals."""

_Place = tuple[str, int | None]
"""(host, device index); None for the host itself."""


def system(job: Job, result: AlignedJob, runs: Mapping[int, RunMetadata]) -> System | None:
    """What the sampler recorded; None where no host was sampled during the used steps."""
    machines = _machines(job, result, runs)
    if not machines:
        return None
    devices = [row for machine in machines for row in _device_rows(machine, runs)]
    hosts = [_host_row(machine) for machine in machines]
    shown = _shown(hosts, devices)
    return System(
        hosts=tuple(hosts),
        devices=tuple(devices),
        processes=tuple(
            sorted((row for machine in machines for row in _process_rows(machine)), key=lambda row: row.rank)
        ),
        window_us=(0.0, max(machine.end_ns + machine.to_picture_ns for machine in machines) / 1e3),
        series=tuple(series for machine in machines for series in _host_series(machine, _usable(machine), shown)),
    )


def _machines(job: Job, result: AlignedJob, runs: Mapping[int, RunMetadata]) -> list[Machine]:
    offsets = {rank: result.clocks.offset_of(rank) for rank in result.windows}
    begin = min(int(start[0]) + offsets[rank] for rank, (start, _) in result.windows.items())
    by_host = grouped((runs[rank].host, rank) for rank in sorted(result.windows) if rank in runs)
    windows = {
        host: (
            min(int(result.windows[rank][0][0]) for rank in ranks),
            max(int(result.windows[rank][1][-1]) for rank in ranks),
        )
        for host, ranks in by_host.items()
    }
    if not windows:
        return []
    around = int(np.clip(5 * max(end - start for start, end in windows.values()), *AROUND_NS))
    first = min(start for start, _ in windows.values()) - around
    last = max(end for _, end in windows.values()) + around
    machines = []
    for path in job.samples:
        try:
            runs_of_sampler = read_samples(path, first, last)
        except OSError:
            continue
        runs_of_sampler = [samples for samples in runs_of_sampler if samples.header.host in by_host]
        if runs_of_sampler:
            samples = max(runs_of_sampler, key=lambda each: _spans(each, *windows[each.header.host]))
            ranks = by_host[samples.header.host]
            machines.append(
                Machine(samples, tuple(ranks), *windows[samples.header.host], to_picture_ns=offsets[ranks[0]] - begin)
            )
    return [each for each in machines if _spans(each.samples, each.start_ns, each.end_ns)[0]]


def _spans(samples: HostSamples, start_ns: int, end_ns: int) -> tuple[bool, int]:
    """Whether samples span the used steps, and how many lie inside them: a few short steps may have none inside, but
    one before and one after, while another sampler on this host began only after them.
    """
    return samples.table.mean("idle_ms", start_ns, end_ns) is not None, samples.samples_in(start_ns, end_ns)


def _host_row(machine: Machine) -> HostRow:
    table, header = machine.samples.table, machine.samples.header
    span = machine.start_ns, machine.end_ns
    cpu = {name: table.rate(f"{name}_ms", *span) for name in ("user", "system", "idle", "iowait", "steal")}
    cpu_total = sum(value for value in cpu.values() if value is not None)

    def share(value: float | None) -> float | None:
        return value / cpu_total if value is not None and cpu_total else None

    busy = _sum([cpu["user"], cpu["system"], cpu["steal"]])
    mine = [process.table.rate("cpu_ms", *span) for process in machine.samples.processes.values()]
    return HostRow(
        host=machine.samples.header.host,
        ranks=machine.ranks,
        samples=machine.samples.samples_in(*span),
        cores=header.cores,
        cores_physical=header.cores_physical,
        cores_usable=_usable(machine),
        cpu_share=share(busy),
        iowait_share=share(cpu["iowait"]),
        steal_share=share(cpu["steal"]),
        runnable=table.mean("runnable", *span),
        **{f"{name}_share": _scaled(table.rate(f"{name}_us", *span), 1e-6) for name in _STALLS},
        job_cores=_scaled(_sum(mine), 1e-3),
        memory_used_bytes=table.largest("memory_used_bytes", *span),
        memory_bytes=header.memory_bytes,
        shm_used_bytes=table.largest("shm_used_bytes", *span),
        **{f"{name}_per_s": table.rate(name, *span) for name in _BYTES},
    )


def _usable(machine: Machine) -> float | None:
    """Cores that the ranks may use together; all of the host's where their bindings are not known."""
    header = machine.samples.header
    bound: set[int] = set()
    for process in machine.samples.processes.values():
        if process.described.kind == RANK:
            bound |= listed_cores(process.described.cores)
    cores = float(len(bound)) if bound else header.cores
    quota = header.cores_quota
    return min(cores, quota) if cores is not None and quota is not None else cores


def listed_cores(text: str) -> set[int]:
    """The cores in a list such as ``0-3,8`` (cpuset(7)); empty where it cannot be read."""
    cores: set[int] = set()
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            return set()
        if len(last or first) > _DIGITS:
            return set()
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def _device_rows(machine: Machine, runs: Mapping[int, RunMetadata]) -> Iterable[DeviceRow]:
    span = machine.start_ns, machine.end_ns
    for table, known in zip(machine.samples.devices, machine.samples.header.devices, strict=False):
        memory = _scaled(known.memory_bytes, 1.0)
        yield DeviceRow(
            host=machine.samples.header.host,
            index=known.index,
            name=known.name,
            ranks=tuple(rank for rank in machine.ranks if trains_on(runs[rank], known)),
            utilisation=_scaled(table.mean("utilisation", *span), 1e-2),
            memory_used_bytes=table.largest("memory_used_bytes", *span),
            memory_bytes=memory,
            sm_mhz=table.mean("sm_mhz", *span),
            sm_mhz_max=_scaled(known.sm_mhz_max, 1.0),
            memory_mhz=table.mean("memory_mhz", *span),
            power_w=_scaled(_first(table.rate("energy_mj", *span), table.mean("power_mw", *span)), 1e-3),
            power_limit_w=_scaled(known.power_limit_mw, 1e-3),
            temperature_c=table.largest("temperature_c", *span),
            throttled=_reasons(table, *span),
            nvlink_sent_bytes_per_s=_scaled(table.rate("nvlink_sent_kib", *span), 1024),
            nvlink_received_bytes_per_s=_scaled(table.rate("nvlink_received_kib", *span), 1024),
            pcie_sent_bytes_per_s=_pcie(table, "sent", *span),
            pcie_received_bytes_per_s=_pcie(table, "received", *span),
            pcie_width=known.pcie_width,
            pcie_width_max=known.pcie_width_max,
        )


def _pcie(table: SampleTable, way: str, start_ns: int, end_ns: int) -> float | None:
    counted = table.rate(f"pcie_{way}_bytes", start_ns, end_ns)
    return _first(counted, _scaled(table.mean(f"pcie_{way}_kbps", start_ns, end_ns), 1e3))


def _reasons(table: SampleTable, start_ns: int, end_ns: int) -> dict[str, float]:
    masks = table.near("throttle", start_ns, end_ns).astype(np.int64)
    shares = {name: float(((masks & bit) != 0).mean()) for bit, name in REASONS.items()} if len(masks) else {}
    return {name: share for name, share in shares.items() if share > 0}


def trains_on(run: RunMetadata, device: SampledDevice) -> bool:
    """Whether a rank trains on this device of the driver: by UUID, else by CUDA_VISIBLE_DEVICES and index."""
    if run.device.type != "cuda" or run.device.index is None:
        return False
    if run.device.uuid and device.uuid:
        return device.uuid.endswith(run.device.uuid)
    visible = run.environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return run.device.index == device.index
    chosen = [entry.strip() for entry in visible.split(",")]
    if run.device.index >= len(chosen):
        return False
    entry = chosen[run.device.index]
    return int(entry) == device.index if entry.isdecimal() else bool(entry) and device.uuid.startswith(entry)


def _process_rows(machine: Machine) -> Iterable[ProcessRow]:
    span = machine.start_ns, machine.end_ns
    for process in machine.samples.processes.values():
        if process.described.kind != RANK or process.described.rank not in machine.ranks:
            continue
        of_workers = [
            each.table.rate("cpu_ms", *span)
            for each in machine.samples.processes.values()
            if each.described.kind == LOADER and each.described.rank == process.described.rank
        ]
        used = [rate * 1e-3 for rate in of_workers if rate is not None]
        yield ProcessRow(
            rank=process.described.rank,
            host=machine.samples.header.host,
            cores=_scaled(process.table.rate("cpu_ms", *span), 1e-3),
            threads=process.table.mean("threads", *span),
            waited_share=_scaled(process.table.rate("waited_ms", *span), 1e-3),
            workers=len(used),
            worker_cores=sum(used) / len(used) if used else None,
            worker_cores_max=max(used, default=None),
        )


def _scaled(value: float | None, factor: float) -> float | None:
    return value * factor if value is not None else None


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _shown(hosts: Sequence[HostRow], devices: Sequence[DeviceRow]) -> set[_Place]:
    """The hosts and devices whose series are in the summary."""
    busiest = sorted(hosts, key=lambda row: -(row.cpu_share or 0.0))[:HOSTS_SHOWN]
    idlest = sorted(devices, key=lambda row: 2.0 if row.utilisation is None else row.utilisation)[:DEVICES_SHOWN]
    return {(row.host, None) for row in busiest} | {(row.host, row.index) for row in idlest}


def _host_series(machine: Machine, usable: float | None, shown: set[_Place]) -> Iterator[Series]:
    """The series of one host and its devices among those ``shown``."""
    host = machine.samples.header.host
    if (host, None) in shown:
        yield from _series(machine, None, "cpu", *_busy(machine.samples.table))
        if usable:
            time, values = machine.samples.table.column("runnable")
            yield from _series(machine, None, "runnable", time, values / usable)
    for table, known in zip(machine.samples.devices, machine.samples.header.devices, strict=False):
        index = known.index
        if (host, index) not in shown:
            continue
        for what, column, whole in (
            ("utilisation", "utilisation", 100),
            ("clock", "sm_mhz", known.sm_mhz_max),
            ("power", "power_mw", known.power_limit_mw),
        ):
            time, values = table.column(column)
            if whole:
                yield from _series(machine, index, what, time, values / whole)


def _busy(table: SampleTable) -> tuple[Int64, Float64]:
    """Busy share of all cores between samples, at the middle between them."""
    time, idle = table.column("idle_ms")
    resting = idle + _values(table, "iowait_ms", len(idle))
    working = sum(_values(table, name, len(idle)) for name in ("user_ms", "system_ms", "steal_ms"))
    rested, worked = np.diff(resting), np.diff(working)
    known = (rested >= 0) & (worked >= 0) & (rested + worked > 0)
    middle = (time[1:] + time[:-1]) // 2
    return middle[known], worked[known] / (rested + worked)[known]


def _values(table: SampleTable, name: str, count: int) -> Float64:
    values = table.column(name)[1]
    return values if len(values) == count else np.zeros(count)


def _series(machine: Machine, device: int | None, what: str, time_ns: Int64, values: Float64) -> Iterator[Series]:
    if len(time_ns) < 2:
        return
    interval = -(-len(time_ns) // POINTS)
    starts = np.arange(0, len(time_ns), interval)
    sizes = np.diff(np.append(starts, len(time_ns)))
    at = np.add.reduceat((time_ns + machine.to_picture_ns) / 1e3, starts) / sizes
    mean = np.add.reduceat(values, starts) / sizes
    yield Series(
        host=machine.samples.header.host,
        device=device,
        what=what,
        time_us=tuple(at.tolist()),
        values=tuple(mean.tolist()),
    )
