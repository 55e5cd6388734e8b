"""The machines: what hosts, devices and processes did during the used steps, as the system sampler recorded it.

Rates are means over the used steps; shares are 0..1; None where a system does not report the number.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from perfscope.frozen import dataclass
from perfscope.results.fields import BytesPerS, Cores, Share, SignedUs, Unit, Us


@dataclass(frozen=True, kw_only=True)
class HostRow:
    """One host."""

    host: str
    ranks: tuple[int, ...]
    samples: Annotated[int, "Samples taken during the used steps, their edges included."]
    cores: Annotated[int | None, Unit("cores"), "Logical cores of the host."]
    cores_physical: Annotated[int | None, Unit("cores"), "Physical cores: hyper-threads of one core counted once."]
    cores_usable: Annotated[
        Cores | None,
        "Cores that the job's ranks on this host may use together: their bindings, and their container's CPU quota.",
    ]
    cpu_share: Annotated[
        Share | None, "Share of the time of all the host's cores in which they ran anything, the job or not."
    ]
    iowait_share: Annotated[
        Share | None, "Share of the cores' time in which they were idle while something waited for I/O."
    ]
    steal_share: Annotated[Share | None, "Share of the CPU time that the hypervisor gave to other machines."]
    runnable: Annotated[
        float | None,
        Unit("threads"),
        "Threads on the whole host that ran or waited for a core, mean over the samples. More than cores: a queue.",
    ]
    cpu_pressure_share: Annotated[
        Share | None, 'Share of the time in which at least one task was stalled for lack of CPU (Linux PSI, "some").'
    ]
    io_pressure_share: Annotated[Share | None, "The same for I/O."]
    memory_pressure_share: Annotated[Share | None, "The same for memory."]
    throttled_share: Annotated[
        Share | None, "Share of the time for which the container's CPU limit kept the job from running."
    ]
    job_cores: Annotated[
        Cores | None,
        "CPU time of the ranks' processes and their data loader workers / time: how many cores they kept busy.",
    ]
    memory_used_bytes: Annotated[
        float | None, Unit("bytes"), "Largest use in the recorded steps, caches that can be dropped left out."
    ]
    memory_bytes: Annotated[float | None, Unit("bytes")]
    shm_used_bytes: Annotated[
        float | None, Unit("bytes"), "Largest use of ``/dev/shm``, through which loader workers hand over batches."
    ]
    swapped_bytes_per_s: Annotated[BytesPerS | None, "Moved between memory and swap."]
    disk_read_bytes_per_s: Annotated[
        BytesPerS | None, "Bytes per second from the host's own disks; network file systems are not among them."
    ]
    disk_written_bytes_per_s: Annotated[BytesPerS | None, "Written to disks."]
    network_received_bytes_per_s: Annotated[
        BytesPerS | None,
        "Bytes per second over all interfaces but loopback, which has its own column, as has RDMA (InfiniBand).",
    ]
    network_sent_bytes_per_s: Annotated[BytesPerS | None, "Sent over all interfaces but loopback."]
    loopback_bytes_per_s: Annotated[BytesPerS | None, "Sent to the host itself."]
    rdma_received_bytes_per_s: Annotated[BytesPerS | None, "Received by RDMA (InfiniBand, RoCE)."]
    rdma_sent_bytes_per_s: Annotated[BytesPerS | None, "Sent by RDMA (InfiniBand, RoCE)."]

    @property
    def other_cores(self) -> float | None:
        """Cores that processes besides the job's kept busy; None where that is not known."""
        if self.cpu_share is None or self.job_cores is None or not self.cores:
            return None
        return max(self.cpu_share * self.cores - self.job_cores, 0.0)


@dataclass(frozen=True, kw_only=True)
class DeviceRow:
    """One accelerator."""

    host: str
    index: Annotated[int, "As the driver counts, whatever ``CUDA_VISIBLE_DEVICES`` is."]
    name: str
    ranks: Annotated[tuple[int, ...], "Those that trained on it; empty where not known."]
    utilisation: Annotated[
        Share | None,
        "Share of the time in which any kernel ran, as the driver samples it. 100% does not mean that it was full.",
    ]
    memory_used_bytes: Annotated[float | None, Unit("bytes"), "Largest, all processes together."]
    memory_bytes: Annotated[float | None, Unit("bytes")]
    sm_mhz: Annotated[float | None, Unit("MHz"), "Mean clock of the streaming multiprocessors in the recorded steps."]
    sm_mhz_max: Annotated[float | None, Unit("MHz"), "Highest clock that they can have."]
    memory_mhz: Annotated[float | None, Unit("MHz"), "Mean clock of the device's memory."]
    power_w: Annotated[float | None, Unit("W"), "Power draw, mean."]
    power_limit_w: Annotated[float | None, Unit("W"), "Limit that the driver enforces."]
    temperature_c: Annotated[float | None, Unit("°C"), "Largest."]
    throttled: Annotated[
        dict[str, Share],
        "Reasons that the driver gave for clocks below the highest, with the share of the samples that had each; an "
        "idle device's is left out.",
    ]
    nvlink_sent_bytes_per_s: Annotated[BytesPerS | None, "Sent over NVLink."]
    nvlink_received_bytes_per_s: Annotated[BytesPerS | None, "Received over NVLink."]
    pcie_sent_bytes_per_s: Annotated[BytesPerS | None, "Sent over PCIe."]
    pcie_received_bytes_per_s: Annotated[BytesPerS | None, "Received over PCIe."]
    pcie_width: Annotated[int | None, "Lanes of its link to the host."] = None
    pcie_width_max: Annotated[int | None, "Lanes that device and slot could use."] = None


@dataclass(frozen=True, kw_only=True)
class ProcessRow:
    """One rank's process and its data loader workers."""

    rank: int
    host: str
    cores: Annotated[Cores | None, "CPU time of all threads of the rank's process / time."]
    threads: Annotated[float | None, Unit("threads"), "Threads that it had."]
    waited_share: Annotated[
        Share | None, "Share of the time in which the rank's main thread was ready to run but had no core to run on."
    ]
    workers: Annotated[int, "Loader workers seen."]
    worker_cores: Annotated[
        Cores | None,
        "CPU time / time, mean over the rank's data loader workers. 1: a worker that does nothing but compute.",
    ]
    worker_cores_max: Annotated[Cores | None, "Most cores that its data loader workers used in a sample."]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One quantity over time around the used steps, thinned."""

    host: str
    device: Annotated[int | None, "None: of the host itself."]
    what: Annotated[
        str,
        "``cpu`` (busy share of all cores), ``runnable`` (per usable core), ``utilisation``, ``clock`` (share of the "
        "device's highest), ``power`` (share of its limit).",
    ]
    time_us: Annotated[
        tuple[SignedUs, ...],
        "From the start of the first used step, on the lowest rank's clock.",
    ]
    values: Annotated[tuple[float, ...], "Measured values."]


@dataclass(frozen=True, kw_only=True)
class System:
    """What the system sampler saw."""

    hosts: tuple[HostRow, ...]
    devices: tuple[DeviceRow, ...]
    processes: tuple[ProcessRow, ...]
    window_us: Annotated[tuple[float, Us], "Beginning and end of the used steps in the time of ``series``."]
    series: tuple[Series, ...] = field(default=())
