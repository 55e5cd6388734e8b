"""Doctor's look at torch: is it there, and does its profiler record the CPU and the devices?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from perfscope.collectors.doctor import OLDEST_TORCH, Check, State, Surroundings, ask

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
    "driver may keep profiling to administrators"
)


def check_torch(surroundings: Surroundings) -> Iterator[Check]:
    """Torch and its profiler, tried on one matrix product."""
    found = ask(surroundings.python, _TRIAL, surroundings.environment)
    if found is None:
        yield Check(
            name="torch",
            state=State.BROKEN,
            text="importing torch and profiling one product ended the process, or took minutes",
            remedy=f"see why: {surroundings.python} -c 'import torch; torch.profiler.profile().start()'",
        )
        return
    if not found["version"]:
        yield Check(
            name="torch",
            state=State.BROKEN,
            text=f"torch cannot be imported ({found['error']})",
            remedy="run perfscope doctor in the training environment, or name its interpreter with --python",
        )
        return
    yield _version(found)
    yield _profiler(found)
    if found["devices"]:
        yield _kernels(found)


def _version(found: dict[str, Any]) -> Check:
    match = re.match(r"(\d+)\.(\d+)", found["version"])
    devices = f", {len(found['devices'])} × {found['devices'][0]}" if found["devices"] else ", no CUDA device"
    backends = ", ".join(found["backends"]) or "no backend of torch.distributed"
    text = f"torch {found['version']}{devices}, {backends}"
    if match and tuple(map(int, match.groups())) < OLDEST_TORCH:
        return Check(name="torch", state=State.BROKEN, text=text, remedy="the collector needs torch 2.1 or newer")
    return Check(name="torch", state=State.OK, text=text)


def _profiler(found: dict[str, Any]) -> Check:
    if found["cpu_events"] and not found["error"]:
        return Check(name="profiler", state=State.OK, text=f"records operators ({found['cpu_events']} of one product)")
    silent = "no operator was recorded" if found["kineto"] else "this torch was built without Kineto"
    return Check(
        name="profiler",
        state=State.BROKEN,
        text=f"torch.profiler does not record ({found['error'] or silent})",
        remedy="install an official build of torch; builds without USE_KINETO record nothing",
    )


def _kernels(found: dict[str, Any]) -> Check:
    if found["kernels"]:
        return Check(name="device tracing", state=State.OK, text=f"records kernels ({found['kernels']} of one product)")
    return Check(
        name="device tracing", state=State.BROKEN, text="kernels on the device are not recorded", remedy=_NO_KERNELS
    )
