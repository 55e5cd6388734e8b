"""Doctor's look at the machine: the output folder, shared memory, cores, counters, devices, tools beside torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from perfscope.collectors.doctor.check import Level, Probe, Surroundings, ask
from perfscope.collectors.sampler.host import ProcHost
from perfscope.recording.samples import HOST_COLUMNS
from perfscope.text import byte_size

SHM: Final = "/dev/shm"  # noqa: S108 - where the kernel has it
LEAST_SPACE: Final = 1 << 30
"""Free bytes below which a recording may not fit: 1 to 20 MB per rank for the default eight steps."""
LEAST_SHM: Final = 1 << 30
"""Below this, data loader workers of any size of batch run out; Docker gives 64 MiB."""
SHARED: Final = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "glusterfs", "wekafs", "fuse.juicefs")
"""File systems that several nodes see."""


def check_output(surroundings: Surroundings) -> Iterator[Probe]:
    """Can the folder be written, has it room, do other nodes see it?"""
    place = _nearest(surroundings.output.absolute())
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".perfscope-doctor-") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(place).free
    except OSError as error:
        yield Probe(
            "output",
            Level.BROKEN,
            f"{place} cannot be written ({error.strerror})",
            "choose another folder with --output",
        )
        return
    kind = _file_system(place, surroundings.root)
    seen = "other nodes may see it" if kind in SHARED else "only this node sees it"
    text = f"{place} can be written, {byte_size(free)} free, {kind or 'unknown file system'}: {seen}"
    if free < LEAST_SPACE:
        yield Probe("output", Level.NOTE, text, "a recording may not fit; free some space")
    elif kind not in SHARED:
        remedy = "jobs on several nodes need a shared folder, or perfscope gather afterwards"
        yield Probe("output", Level.OK, text, remedy)
    else:
        yield Probe("output", Level.OK, text)


def check_shared_memory(surroundings: Surroundings) -> Iterator[Probe]:
    """Have loader workers room to hand their batches over?"""
    place = surroundings.root / SHM.lstrip("/")
    if not place.is_dir():
        return
    size = shutil.disk_usage(place).total
    if size < LEAST_SHM:
        yield Probe(
            "shared memory",
            Level.NOTE,
            f"{SHM} holds {byte_size(size)}: data loader workers may fail with a bus error",
            f"docker run --ipc=host (or --shm-size=16g); in Kubernetes an emptyDir with medium: Memory at {SHM}",
        )
    else:
        yield Probe("shared memory", Level.OK, f"{SHM} holds {byte_size(size)}")


def check_cores(surroundings: Surroundings) -> Iterator[Probe]:
    """How many cores may be used, and does everything fit them?"""
    described = ProcHost(surroundings.root).describe()
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else described["cores"]
    quota = described["cores_quota"]
    text = f"{allowed} of {described['cores']} cores may be used"
    if quota is not None and quota < allowed:
        yield Probe(
            "cores",
            Level.NOTE,
            f"{text}, but a CPU quota allows the time of {quota:g}",
            "keep threads and loader workers of all ranks together below it, or raise the container's limit",
        )
    else:
        yield Probe("cores", Level.OK, text)


def check_sampler(surroundings: Surroundings) -> Iterator[Probe]:
    """Does the system report its counters?"""
    if not (surroundings.root / "proc/stat").exists():
        has_psutil = ask(surroundings.python, "import psutil; print('true')", surroundings.environment)
        yield Probe(
            "host counters",
            Level.OK if has_psutil else Level.NOTE,
            "by psutil" if has_psutil else "this system has no /proc, and psutil is not installed",
            "" if has_psutil else "pip install psutil in the training environment",
        )
        return
    values = dict(zip(HOST_COLUMNS, ProcHost(surroundings.root).sample(), strict=True))
    unknown = [name for name, value in values.items() if value is None and not name.startswith("rdma")]
    text = f"{len(values) - len(unknown)} of {len(values)} counters can be read"
    yield Probe("host counters", Level.OK, text + (f"; not {', '.join(unknown)}" if unknown else ""))


def check_devices(surroundings: Surroundings) -> Iterator[Probe]:
    """Does the driver report the devices' counters, and who may profile?"""
    if not (surroundings.root / "proc/driver/nvidia").exists():
        return
    code = (
        "import json, pynvml; pynvml.nvmlInit(); h = pynvml.nvmlDeviceGetHandleByIndex(0); "
        "pynvml.nvmlDeviceGetUtilizationRates(h); print(json.dumps(pynvml.nvmlDeviceGetCount()))"
    )
    count = ask(surroundings.python, code, surroundings.environment)
    if count is not None:
        yield Probe("GPU counters", Level.OK, f"NVML reports those of {count} devices")
    elif ask(surroundings.python, "import pynvml; print('true')", surroundings.environment) is None:
        yield Probe(
            "GPU counters",
            Level.NOTE,
            "the package nvidia-ml-py is missing: no clocks, power, temperature of the GPUs",
            "pip install nvidia-ml-py in the training environment",
        )
    else:
        yield Probe(
            "GPU counters",
            Level.NOTE,
            "NVML does not answer: no clocks, power, temperature of the GPUs",
            "run nvidia-smi to see the reason; in a container the driver capability 'utility' is needed "
            "(NVIDIA_DRIVER_CAPABILITIES=compute,utility)",
        )
    if "RmProfilingAdminOnly: 1" in _read(surroundings.root / "proc/driver/nvidia/params"):
        yield Probe(
            "GPU profiling",
            Level.NOTE,
            "only administrators may read hardware counters: kernels are traced, but Nsight Compute fails",
            "options nvidia NVreg_RestrictProfilingToAdminUsers=0 in /etc/modprobe.d, then reload the driver",
        )


def check_tools(surroundings: Surroundings) -> Iterator[Probe]:
    """What is there for the recording modes that need more than torch?"""
    nsys = shutil.which("nsys", path=surroundings.environment.get("PATH"))
    if nsys is None:
        yield Probe("nsys", Level.NOTE, "not found: needed only for perfscope run --with nsys")
    else:
        done = subprocess.run([nsys, "--version"], capture_output=True, text=True, timeout=60, check=False)
        lines = (done.stdout or done.stderr).strip().splitlines()
        works = done.returncode == 0 and bool(lines)
        yield Probe(
            "nsys",
            Level.OK if works else Level.NOTE,
            f"{lines[-1] if works else 'does not run'} ({nsys})",
            "" if works else f"run {nsys} --version to see the reason",
        )
        paranoid = _read(surroundings.root / "proc/sys/kernel/perf_event_paranoid")
        if paranoid.lstrip("-").isdecimal() and int(paranoid) > 2 and os.geteuid() != 0:
            yield Probe(
                "perf events",
                Level.NOTE,
                f"kernel.perf_event_paranoid is {paranoid}: nsys cannot sample the CPU",
                "sysctl kernel.perf_event_paranoid=2, or nsys with --sample=none",
            )
    code = "import json; from importlib.metadata import version; import nvtx; print(json.dumps(version('nvtx')))"
    nvtx = ask(surroundings.python, code, surroundings.environment)
    yield Probe(
        "nvtx",
        Level.OK if nvtx else Level.NOTE,
        f"nvtx {nvtx}" if nvtx else "not installed: ranges are written for torch's profiler only",
        "" if nvtx else "pip install nvtx, to see them in Nsight Systems",
    )


def check_other_profilers(surroundings: Surroundings) -> Iterator[Probe]:
    """Would another profiler be in the way? Only one at a time can own CUPTI."""
    names = ("CUDA_INJECTION64_PATH", "KINETO_USE_DAEMON", "NSYS_PROFILING_SESSION_ID")
    present = [name for name in names if surroundings.environment.get(name)]
    if present:
        yield Probe(
            "other profilers",
            Level.NOTE,
            f"{', '.join(present)} is set: another profiler may be running, and only one can record the devices",
            f"unset {' '.join(present)}, or record with --with nvtx for that profiler",
        )


def _nearest(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next((each for each in (path, *path.parents) if each.is_dir()), Path.cwd())


def _file_system(path: Path, root: Path) -> str:
    """Type of the file system that holds a path; empty where the system does not report it."""
    best, kind = "", ""
    for line in _read(root / "proc/mounts").splitlines():
        fields = line.split()
        if len(fields) > 2 and len(fields[1]) >= len(best) and path.is_relative_to(fields[1]):
            best, kind = fields[1], fields[2]
    return kind


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
