"""What the system sampler writes of a host: the columns of its file, stated once for the writer and the readers.

A file is JSON lines, so that a kill leaves all but the last line whole. Each is one of

- a header (an object with ``schema``): who samples, what the host and its devices are, how the columns are called. A
  later sampler of the same host (elastic restart) writes another one, and what follows is its own;
- a process (an object with ``process``): a rank, or a data loader worker of one, met for the first time;
- a problem (an object with ``problem``): what could not be sampled, one sentence;
- a sample (an array): ``[time_ns, host values, [values of each device], [[pid, values] of each process]]``.

Times are ns since the epoch, as in the traces. A value that the system does not report is null. *Counters* only grow:
the difference of two samples belongs to the time between them; all else is as found at that moment.
"""

from __future__ import annotations

from typing import Final

from perfscope.frozen import dataclass

SCHEMA: Final = "perfscope.samples/1"

HOST_COLUMNS: Final = {
    "user_ms": True,
    "system_ms": True,
    "idle_ms": True,
    "iowait_ms": True,
    "steal_ms": True,
    "runnable": False,
    "blocked": False,
    "cpu_pressure_us": True,
    "io_pressure_us": True,
    "memory_pressure_us": True,
    "throttled_us": True,
    "memory_used_bytes": False,
    "swap_used_bytes": False,
    "swapped_bytes": True,
    "shm_used_bytes": False,
    "disk_read_bytes": True,
    "disk_written_bytes": True,
    "network_received_bytes": True,
    "network_sent_bytes": True,
    "loopback_bytes": True,
    "rdma_received_bytes": True,
    "rdma_sent_bytes": True,
}
"""Column -> whether it is a counter. CPU time is of all cores together. ``runnable``: threads of the whole host that
run or wait for a core, without the sampler. ``…_pressure_us``: time in which at least one task was stalled for lack of
it (Linux's pressure stall information). ``throttled_us``: time for which its CPU quota kept the job's control group
from running. ``swapped_bytes``: to and from swap. Network: all interfaces but loopback; RDMA: InfiniBand's ports."""

DEVICE_COLUMNS: Final = {
    "utilisation": False,
    "memory_utilisation": False,
    "memory_used_bytes": False,
    "sm_mhz": False,
    "memory_mhz": False,
    "power_mw": False,
    "energy_mj": True,
    "temperature_c": False,
    "throttle": False,
    "nvlink_sent_kib": True,
    "nvlink_received_kib": True,
    "pcie_sent_bytes": True,
    "pcie_received_bytes": True,
    "pcie_sent_kbps": False,
    "pcie_received_kbps": False,
}
"""Column -> whether it is a counter. ``utilisation``: per cent of the driver's last sampling period in which a kernel
ran. ``throttle``: NVML's mask of reasons for the present clocks. ``pcie_…_kbps``: kB/s, asked of one device in turn
where the device has no counters, because each answer takes the driver 20 ms."""

PROCESS_COLUMNS: Final = {"cpu_ms": True, "threads": False, "resident_bytes": False, "waited_ms": True}
"""Column -> whether it is a counter. ``waited_ms``: the main thread was ready to run and waited for a core."""

RANK: Final = "rank"
LOADER: Final = "loader"
"""Kinds of processes: a rank, and a worker of one of its data loaders."""


@dataclass(frozen=True, kw_only=True)
class SampledDevice:
    """What a header says of one device: what does not change while a job runs."""

    index: int = 0
    """The driver's."""
    name: str = ""
    uuid: str = ""
    memory_bytes: int | None = None
    power_limit_mw: float | None = None
    sm_mhz_max: float | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None


@dataclass(frozen=True, kw_only=True)
class SamplerHeader:
    """What a header says, as far as it is read again."""

    host: str = ""
    cores: int | None = None
    cores_physical: int | None = None
    cores_quota: float | None = None
    """Cores' worth of time that the job's control group may use."""
    memory_bytes: int | None = None
    devices: tuple[SampledDevice, ...] = ()
    host_columns: tuple[str, ...] = ()
    device_columns: tuple[str, ...] = ()
    process_columns: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SampledProcess:
    """A process of the job, as the line says that was written when it was met."""

    process: int
    """Its id on its host."""
    rank: int
    kind: str
    cores: str = ""
    """The cores that it may run on, in the kernel's notation; empty where not known."""
