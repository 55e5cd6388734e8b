"""Puts together what a trace cannot tell of a rank: one RunMetadata."""

from __future__ import annotations

import dataclasses
import os
import platform
import socket
import sys
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

from perfscope._version import __version__
from perfscope.collectors.device import device_types
from perfscope.collectors.discovery import Found
from perfscope.collectors.identity import Identity, attempt
from perfscope.collectors.model import describe_model
from perfscope.collectors.problems import Problems
from perfscope.collectors.ranges import Ranges
from perfscope.collectors.redact import performance_environment, redact_command
from perfscope.collectors.strategies import describe_strategies
from perfscope.metadata import DeviceRecord, RunMetadata

_FRAMEWORKS: Final = ("accelerate", "deepspeed", "horovod", "lightning", "pytorch_lightning", "transformers", "triton")


def describe_process(identity: Identity) -> RunMetadata:
    """What is known before anything was recorded."""
    affinity = getattr(os, "sched_getaffinity", None)
    return RunMetadata(
        perfscope_version=__version__,
        attempt=attempt(),
        rank=identity.rank,
        local_rank=identity.local_rank,
        world_size=identity.world_size,
        local_world_size=identity.local_world_size,
        host=socket.gethostname(),
        cpu_count=len(affinity(0)) if affinity is not None else os.cpu_count(),
        pid=os.getpid(),
        started_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        # Where the interpreter was installed says nothing about the run.
        command=redact_command([os.path.basename(sys.orig_argv[0]), *sys.orig_argv[1:]]),  # noqa: PTH119 - a mere name
        backend=identity.backend,
        environment=performance_environment(os.environ),
    )


def describe_run(
    process: RunMetadata, found: Found, optimizers: Iterable[Any], ranges: Ranges, problems: Problems
) -> RunMetadata:
    """``process`` completed by what a capture found out. A part that cannot be described is left out, and said."""
    strategies, settings = problems.guard(
        "describing the strategies", describe_strategies, found, optimizers, process.world_size, problems
    ) or ((), {})
    if ranges.autocast:
        settings["amp"] = {"dtype": ranges.autocast.removeprefix("torch.")}
    return dataclasses.replace(
        process,
        device=problems.guard("describing the device", describe_device, found) or process.device,
        versions=problems.guard("finding versions", find_versions) or {},
        strategies=strategies,
        settings=settings,
        model=problems.guard("describing the model", describe_model, found),
        batch_shape=ranges.batch_shape,
        dataloaders=ranges.loaders.records(),
    )


def describe_device(found: Found) -> DeviceRecord:
    """The device that holds the model's parameters."""
    import torch

    kinds = device_types(found.roots)
    if not kinds:
        return DeviceRecord(type="cpu", name=_processor_name())
    kind = kinds[0]
    device = next(each.device for root in found.roots for each in root.parameters() if each.device.type == kind)
    library: Any = getattr(torch, kind)
    index = device.index if device.index is not None else library.current_device()
    properties = library.get_device_properties(index)
    return DeviceRecord(
        type=kind,
        index=index,
        name=library.get_device_name(index),
        capacity_bytes=getattr(properties, "total_memory", None),
        peak_bytes=library.max_memory_reserved(index) if hasattr(library, "max_memory_reserved") else None,
    )


def find_versions() -> dict[str, str]:
    """Versions of Python, torch, what torch was built with, and the frameworks that the script has imported."""
    import torch

    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("cuda", "hip", "xpu"):
        version = getattr(torch.version, name, None)
        if version:
            versions[name] = str(version)
    if torch.cuda.is_available() and torch.distributed.is_available() and torch.distributed.is_nccl_available():
        nccl: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        versions["nccl"] = ".".join(map(str, nccl)) if isinstance(nccl, tuple) else str(nccl)
    for name in _FRAMEWORKS:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            versions[name] = version
    if "nvtx" in sys.modules:
        from importlib.metadata import version as installed

        versions["nvtx"] = installed("nvtx")
    return versions


def _processor_name() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()
