"""The summary's account of the machines: what hosts, devices and processes did during the used steps.

``system`` is a key beyond the contract of ``perfscope.summary``, made from what the system sampler recorded.
Rates are means over the used steps; shares are 0..1; None where a system did not tell.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class HostRow:
    """One host."""

    host: str
    ranks: tuple[int, ...]
    samples: int
    """Looks that the sampler took during the used steps, their edges included."""
    cores: int | None
    """Logical cores of the host."""
    cores_physical: int | None
    """The same, hyper-threads of one core counted once."""
    cores_usable: float | None
    """Of these, what the job's ranks may use together: their bindings, and the control group's quota."""
    cpu_share: float | None
    """Time that cores were busy / cores."""
    iowait_share: float | None
    """Time that cores were idle while something waited for I/O / cores."""
    steal_share: float | None
    """Time that the hypervisor gave to others / cores."""
    runnable: float | None
    """Threads of the whole host that ran or waited for a core, mean."""
    cpu_pressure_share: float | None
    """Time in which some thread waited for a core; likewise for I/O and memory (Linux's "some" pressure)."""
    io_pressure_share: float | None
    memory_pressure_share: float | None
    throttled_share: float | None
    """Time for which the CPU quota of the job's control group kept it from running."""
    job_cores: float | None
    """CPU time of the job's ranks and loader workers / time: how many cores they kept busy."""
    memory_used_bytes: float | None
    """Largest."""
    memory_bytes: float | None
    shm_used_bytes: float | None
    """Largest use of ``/dev/shm``, through which loader workers hand over batches."""
    swapped_bytes_per_s: float | None
    disk_read_bytes_per_s: float | None
    disk_written_bytes_per_s: float | None
    network_received_bytes_per_s: float | None
    """All interfaces but loopback; without RDMA, which has its own."""
    network_sent_bytes_per_s: float | None
    loopback_bytes_per_s: float | None
    rdma_received_bytes_per_s: float | None
    rdma_sent_bytes_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class DeviceRow:
    """One accelerator."""

    host: str
    index: int
    """As the driver counts, whatever ``CUDA_VISIBLE_DEVICES`` says."""
    name: str
    ranks: tuple[int, ...]
    """Those that trained on it; empty where that cannot be told."""
    utilisation: float | None
    """Share of the time in which a kernel ran, as the driver samples it: 1 does not mean that the device was full."""
    memory_used_bytes: float | None
    """Largest, all processes together."""
    memory_bytes: float | None
    sm_mhz: float | None
    sm_mhz_max: float | None
    memory_mhz: float | None
    power_w: float | None
    power_limit_w: float | None
    temperature_c: float | None
    """Largest."""
    throttled: dict[str, float]
    """Reason for clocks below the device's highest -> share of the samples; an idle device's is left out."""
    nvlink_sent_bytes_per_s: float | None
    nvlink_received_bytes_per_s: float | None
    pcie_sent_bytes_per_s: float | None
    pcie_received_bytes_per_s: float | None
    pcie_width: int | None = None
    """Lanes of its link to the host, and those that device and slot could use."""
    pcie_width_max: int | None = None


@dataclass(frozen=True, kw_only=True)
class ProcessRow:
    """One rank's process and its data loader workers."""

    rank: int
    host: str
    cores: float | None
    """CPU time of the rank's process / time."""
    threads: float | None
    """Threads that it had."""
    waited_share: float | None
    """Time in which its main thread was ready to run and waited for a core."""
    workers: int
    """Loader workers seen."""
    worker_cores: float | None
    """CPU time of one worker / time, mean over workers: 1 is a worker that does nothing but compute."""
    worker_cores_max: float | None


@dataclass(frozen=True, kw_only=True)
class Series:
    """One quantity over time around the used steps, thinned."""

    host: str
    device: int | None
    """None: of the host itself."""
    what: str
    """``cpu`` (busy share of all cores), ``runnable`` (per usable core), ``utilisation``, ``clock`` (share of the
    device's highest), ``power`` (share of its limit)."""
    time_us: tuple[float, ...]
    """From the start of the first used step, on the lowest rank's clock."""
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class System:
    """What the system sampler saw."""

    hosts: tuple[HostRow, ...]
    devices: tuple[DeviceRow, ...]
    processes: tuple[ProcessRow, ...]
    window_us: tuple[float, float]
    """Beginning and end of the used steps in the time of ``series``."""
    series: tuple[Series, ...] = field(default=())
