"""Puts together what no trace holds of a rank: one RunMetadata."""

from __future__ import annotations

import dataclasses
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from perfscope.collectors.describe.execution import describe_execution, describe_scaler
from perfscope.collectors.describe.groups import describe_groups
from perfscope.collectors.describe.model import describe_model
from perfscope.collectors.describe.strategies import describe_strategies
from perfscope.collectors.device import device_types, memory_counts
from perfscope.collectors.discovery import JobObjects
from perfscope.collectors.problems import Problems
from perfscope.collectors.ranges.ranges import Ranges
from perfscope.recording.metadata import DeviceMetadata, RunMetadata

_FRAMEWORKS: Final = (
    "accelerate", "deepspeed", "horovod", "lightning", "megatron.core", "pytorch_lightning", "transformers", "triton",
)  # fmt: skip


def describe_run(
    process: RunMetadata, objects: JobObjects, optimizers: Iterable[Any], ranges: Ranges, problems: Problems
) -> RunMetadata:
    """``process`` and what a capture found out. A part that cannot be described is left out, with a problem."""
    optimizers = list(optimizers)
    strategies, settings = problems.guard(
        "describing the strategies",
        describe_strategies,
        objects,
        optimizers,
        process.world_size,
        problems,
        ranges.frameworks.observed,
    ) or ((), {})
    settings |= describe_execution(objects, optimizers, problems)
    amp = problems.guard("describing the gradient scaler", describe_scaler, objects) or {}
    amp = {**settings.get("amp", {}), **amp}
    if ranges.autocast:
        amp = {"dtype": ranges.autocast.removeprefix("torch."), **amp}
    # A pipeline's backwards are its micro-batches.
    accumulation = {} if "pipeline" in strategies else ranges.accumulation.settings()
    settings |= {name: part for name, part in (("amp", amp), ("gradient_accumulation", accumulation)) if part}
    return dataclasses.replace(
        process,
        device=problems.guard("describing the device", describe_device, objects) or process.device,
        versions=problems.guard("finding versions", find_versions) or {},
        cpu_threads=settings.get("threads", {}).get("intraop"),
        strategies=strategies,
        settings=settings,
        process_groups=problems.guard("describing process groups", describe_groups) or (),
        model=problems.guard("describing the model", describe_model, objects),
        batch_shape=ranges.loaders.batch_shape,
        dataloaders=ranges.loaders.records(),
    )


def describe_device(objects: JobObjects) -> DeviceMetadata:
    """The device that holds the model's parameters, or that they are taken to."""
    import torch

    kinds = device_types(objects.roots)
    if not kinds:
        return DeviceMetadata(type="cpu", name=_processor_name())
    kind = kinds[0]
    library: Any = getattr(torch, kind)
    held = (each.device.index for root in objects.roots for each in root.parameters() if each.device.type == kind)
    index = next((index for index in held if index is not None), None)
    if index is None:  # as with offloaded parameters
        index = library.current_device()
    properties = library.get_device_properties(index)
    return DeviceMetadata(
        type=kind,
        index=index,
        name=library.get_device_name(index),
        uuid=str(getattr(properties, "uuid", "")),
        capacity_bytes=getattr(properties, "total_memory", None),
        **memory_counts(library, index),
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
