"""Doctor's look at torch: is it there, and does its profiler record the CPU and the devices?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from perfscope.collectors.doctor.check import Level, Probe, Surroundings, ask

OLDEST_TORCH: Final = (2, 1)

_TRIAL: Final = """
import json, os, sys, tempfile
found = {"version": "", "devices": [], "backends": [], "kineto": False, "cpu_events": 0, "kernels": 0, "error": ""}
try:
    import torch
    found["version"] = str(torch.__version__)
    found["kineto"] = bool(torch.profiler.kineto_available())
    found["threads"] = torch.get_num_threads()
    if torch.cuda.is_available():
        found["devices"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if torch.distributed.is_available():
        found["backends"] = [
            name for name in ("nccl", "gloo", "mpi") if getattr(torch.distributed, f"is_{name}_available")()
        ]
    activities = [torch.profiler.ProfilerActivity.CPU]
    device = "cpu"
    if found["devices"]:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        device = "cuda"
    with torch.profiler.profile(activities=activities) as profiler:
        a = torch.ones(64, 64, device=device)
        (a @ a).sum().item()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path) as file:
            events = json.load(file)["traceEvents"]
    found["cpu_events"] = sum(event.get("cat") == "cpu_op" for event in events)
    found["kernels"] = sum(event.get("cat") == "kernel" for event in events)
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}"
print()
print(json.dumps(found))
"""

_NO_KERNELS: Final = (
    "another profiler may own CUPTI (nsys, ncu, DCGM's profiling: dcgmi profiling --pause), the CUPTI library may be "
    "missing or of another CUDA version (reinstall the nvidia-cuda-cupti package that torch's wheel asks for), or the "
    "driver may allow profiling to administrators only"
)


def check_torch(surroundings: Surroundings) -> Iterator[Probe]:
    """Torch and its profiler, tried on one matrix product."""
    trial = ask(surroundings.python, _TRIAL, surroundings.environment)
    if trial is None:
        yield Probe(
            "torch",
            Level.BROKEN,
            "importing torch and profiling one matrix product ended the process, or took minutes",
            f"see the reason: {surroundings.python} -c 'import torch; torch.profiler.profile().start()'",
        )
        return
    if not trial["version"]:
        yield Probe(
            "torch",
            Level.BROKEN,
            f"torch cannot be imported ({trial['error']})",
            "run perfscope doctor in the training environment, or name its interpreter with --python",
        )
        return
    yield _version(trial)
    yield _profiler(trial)
    if trial["devices"]:
        yield _kernels(trial)


def _version(trial: dict[str, Any]) -> Probe:
    match = re.match(r"(\d+)\.(\d+)", trial["version"])
    devices = f", {len(trial['devices'])} × {trial['devices'][0]}" if trial["devices"] else ", no CUDA device"
    backends = ", ".join(trial["backends"]) or "no backend of torch.distributed"
    text = f"torch {trial['version']}{devices}, {backends}"
    if match and tuple(map(int, match.groups())) < OLDEST_TORCH:
        return Probe("torch", Level.BROKEN, text, "the collector needs torch 2.1 or newer")
    return Probe("torch", Level.OK, text)


def _profiler(trial: dict[str, Any]) -> Probe:
    if trial["cpu_events"] and not trial["error"]:
        return Probe("profiler", Level.OK, f"records operators ({trial['cpu_events']} for one matrix product)")
    silent = "no operator was recorded" if trial["kineto"] else "this torch was built without Kineto"
    return Probe(
        "profiler",
        Level.BROKEN,
        f"torch.profiler does not record ({trial['error'] or silent})",
        "install an official build of torch; builds without USE_KINETO record nothing",
    )


def _kernels(trial: dict[str, Any]) -> Probe:
    if trial["kernels"]:
        return Probe("device tracing", Level.OK, f"records kernels ({trial['kernels']} for one matrix product)")
    return Probe("device tracing", Level.BROKEN, "kernels on the device are not recorded", _NO_KERNELS)
