"""The machines during the used steps: hosts, devices and processes, from what the system sampler recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.system.samples import HostSamples, Table, read_samples
from perfscope.analyzers.system.series import host_series, thinned_choice
from perfscope.job import Job
from perfscope.metadata import RunMetadata
from perfscope.samples import LOADER, RANK
from perfscope.summary_system import DeviceRow, HostRow, ProcessRow, System

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

AROUND_NS: Final = (10 * 10**9, 60 * 10**9)
"""Time that the picture shows before and after the used steps: five times theirs, but within these."""


@dataclass(frozen=True)
class Machine:
    """One host's samples and the used steps of its ranks, on its own clock."""

    samples: HostSamples
    ranks: tuple[int, ...]
    start_ns: int
    end_ns: int
    to_picture_ns: int
    """To be added to the host's time: makes it the picture's."""


def system(job: Job, result: Comparison, runs: Mapping[int, RunMetadata]) -> System | None:
    """What the sampler saw; None where no host was sampled during the used steps."""
    machines = _machines(job, result, runs)
    if not machines:
        return None
    devices = [row for machine in machines for row in _device_rows(machine, runs)]
    hosts = [_host_row(machine) for machine in machines]
    shown = thinned_choice(hosts, devices)
    return System(
        hosts=tuple(hosts),
        devices=tuple(devices),
        processes=tuple(
            sorted((row for machine in machines for row in _process_rows(machine)), key=lambda row: row.rank)
        ),
        window_us=(0.0, max(machine.end_ns + machine.to_picture_ns for machine in machines) / 1e3),
        series=tuple(series for machine in machines for series in host_series(machine, _usable(machine), shown)),
    )


def _machines(job: Job, result: Comparison, runs: Mapping[int, RunMetadata]) -> list[Machine]:
    offsets = {rank: result.clocks.offset_of(rank) for rank in result.windows}
    begin = min(int(start[0]) + offsets[rank] for rank, (start, _) in result.windows.items())
    by_host: dict[str, list[int]] = {}
    for rank in sorted(result.windows):
        if rank in runs:
            by_host.setdefault(runs[rank].host, []).append(rank)
    stretches = {
        host: (
            min(int(result.windows[rank][0][0]) for rank in ranks),
            max(int(result.windows[rank][1][-1]) for rank in ranks),
        )
        for host, ranks in by_host.items()
    }
    if not stretches:
        return []
    around = int(np.clip(5 * max(end - start for start, end in stretches.values()), *AROUND_NS))
    first = min(start for start, _ in stretches.values()) - around
    last = max(end for _, end in stretches.values()) + around
    machines = []
    for path in job.samples:
        try:
            found = read_samples(path, first, last)
        except OSError:
            continue
        found = [samples for samples in found if samples.host in by_host]
        if found:
            samples = max(found, key=lambda each: each.samples_in(*stretches[each.host]))
            ranks = by_host[samples.host]
            machines.append(
                Machine(samples, tuple(ranks), *stretches[samples.host], to_picture_ns=offsets[ranks[0]] - begin)
            )
    return [each for each in machines if each.samples.table.mean("idle_ms", each.start_ns, each.end_ns) is not None]


def _host_row(machine: Machine) -> HostRow:
    table, header = machine.samples.table, machine.samples.header
    span = machine.start_ns, machine.end_ns
    cpu = {name: table.rate(f"{name}_ms", *span) for name in ("user", "system", "idle", "iowait", "steal")}
    in_all = sum(value for value in cpu.values() if value is not None)

    def share(value: float | None) -> float | None:
        return value / in_all if value is not None and in_all else None

    busy = _sum([cpu["user"], cpu["system"], cpu["steal"]])
    mine = [process.table.rate("cpu_ms", *span) for process in machine.samples.processes.values()]
    return HostRow(
        host=machine.samples.host,
        ranks=machine.ranks,
        samples=machine.samples.samples_in(*span),
        cores=header.get("cores"),
        cores_physical=header.get("cores_physical"),
        cores_usable=_usable(machine),
        cpu_share=share(busy),
        iowait_share=share(cpu["iowait"]),
        steal_share=share(cpu["steal"]),
        runnable=table.mean("runnable", *span),
        cpu_pressure_share=_scaled(table.rate("cpu_pressure_us", *span), 1e-6),
        io_pressure_share=_scaled(table.rate("io_pressure_us", *span), 1e-6),
        memory_pressure_share=_scaled(table.rate("memory_pressure_us", *span), 1e-6),
        throttled_share=_scaled(table.rate("throttled_us", *span), 1e-6),
        job_cores=_scaled(_sum(mine), 1e-3),
        memory_used_bytes=table.largest("memory_used_bytes", *span),
        memory_bytes=header.get("memory_bytes"),
        shm_used_bytes=table.largest("shm_used_bytes", *span),
        swapped_bytes_per_s=table.rate("swapped_bytes", *span),
        disk_read_bytes_per_s=table.rate("disk_read_bytes", *span),
        disk_written_bytes_per_s=table.rate("disk_written_bytes", *span),
        network_received_bytes_per_s=table.rate("network_received_bytes", *span),
        network_sent_bytes_per_s=table.rate("network_sent_bytes", *span),
        loopback_bytes_per_s=table.rate("loopback_bytes", *span),
        rdma_received_bytes_per_s=table.rate("rdma_received_bytes", *span),
        rdma_sent_bytes_per_s=table.rate("rdma_sent_bytes", *span),
    )


def _usable(machine: Machine) -> float | None:
    """Cores that the ranks may use together; the host's where their bindings are not known."""
    header = machine.samples.header
    bound: set[int] = set()
    for process in machine.samples.processes.values():
        if process.kind == RANK:
            bound |= listed_cores(process.cores)
    cores = float(len(bound)) if bound else header.get("cores")
    quota = header.get("cores_quota")
    return min(cores, quota) if cores is not None and quota is not None else cores


def listed_cores(text: str) -> set[int]:
    """The cores in a list such as ``0-3,8`` (cpuset(7)); empty where it cannot be read."""
    found: set[int] = set()
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            return set()
        found.update(range(int(first), int(last or first) + 1))
    return found


def _device_rows(machine: Machine, runs: Mapping[int, RunMetadata]) -> Iterable[DeviceRow]:
    span = machine.start_ns, machine.end_ns
    for table, known in zip(machine.samples.devices, machine.samples.header.get("devices", ()), strict=False):
        memory = _scaled(known.get("memory_bytes"), 1.0)
        yield DeviceRow(
            host=machine.samples.host,
            index=int(known.get("index", 0)),
            name=str(known.get("name", "")),
            ranks=tuple(rank for rank in machine.ranks if trains_on(runs[rank], known)),
            utilisation=_scaled(table.mean("utilisation", *span), 1e-2),
            memory_used_bytes=table.largest("memory_used_bytes", *span),
            memory_bytes=memory,
            sm_mhz=table.mean("sm_mhz", *span),
            sm_mhz_max=_scaled(known.get("sm_mhz_max"), 1.0),
            memory_mhz=table.mean("memory_mhz", *span),
            power_w=_scaled(_first(table.rate("energy_mj", *span), table.mean("power_mw", *span)), 1e-3),
            power_limit_w=_scaled(known.get("power_limit_mw"), 1e-3),
            temperature_c=table.largest("temperature_c", *span),
            throttled=_reasons(table, *span),
            nvlink_sent_bytes_per_s=_scaled(table.rate("nvlink_sent_kib", *span), 1024),
            nvlink_received_bytes_per_s=_scaled(table.rate("nvlink_received_kib", *span), 1024),
            pcie_sent_bytes_per_s=_pcie(table, "sent", *span),
            pcie_received_bytes_per_s=_pcie(table, "received", *span),
            pcie_width=known.get("pcie_width"),
            pcie_width_max=known.get("pcie_width_max"),
        )


def _pcie(table: Table, way: str, start_ns: int, end_ns: int) -> float | None:
    counted = table.rate(f"pcie_{way}_bytes", start_ns, end_ns)
    return _first(counted, _scaled(table.mean(f"pcie_{way}_kbps", start_ns, end_ns), 1e3))


def _reasons(table: Table, start_ns: int, end_ns: int) -> dict[str, float]:
    masks = table.near("throttle", start_ns, end_ns).astype(np.int64)
    shares = {name: float(((masks & bit) != 0).mean()) for bit, name in REASONS.items()} if len(masks) else {}
    return {name: share for name, share in shares.items() if share > 0}


def trains_on(run: RunMetadata, device: Mapping[str, object]) -> bool:
    """Whether a rank's device is this one of the driver's: by its UUID, else by CUDA_VISIBLE_DEVICES and its index."""
    if run.device.type != "cuda" or run.device.index is None:
        return False
    uuid = str(device.get("uuid", ""))
    if run.device.uuid and uuid:
        return uuid.endswith(run.device.uuid)
    visible = run.environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return run.device.index == device.get("index")
    chosen = [entry.strip() for entry in visible.split(",")]
    if run.device.index >= len(chosen):
        return False
    entry = chosen[run.device.index]
    return int(entry) == device.get("index") if entry.isdecimal() else bool(entry) and uuid.startswith(entry)


def _process_rows(machine: Machine) -> Iterable[ProcessRow]:
    span = machine.start_ns, machine.end_ns
    for process in machine.samples.processes.values():
        if process.kind != RANK or process.rank not in machine.ranks:
            continue
        of_workers = [
            each.table.rate("cpu_ms", *span)
            for each in machine.samples.processes.values()
            if each.kind == LOADER and each.rank == process.rank
        ]
        used = [rate * 1e-3 for rate in of_workers if rate is not None]
        yield ProcessRow(
            rank=process.rank,
            host=machine.samples.host,
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
