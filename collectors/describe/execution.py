"""How the process executes: threads, precision, compiled code, optimizers, gradient scaling, recomputation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any, Final

from perfscope.collectors.discovery import JobObjects
from perfscope.collectors.problems import Problems

Settings = dict[str, dict[str, Any]]

_PRECISION: Final = {
    "float32_matmul_precision": "get_float32_matmul_precision",
    "cuda_matmul_allow_tf32": "backends.cuda.matmul.allow_tf32",
    "cuda_matmul_fp32_precision": "backends.cuda.matmul.fp32_precision",
    "cuda_matmul_allow_bf16_reduced_precision_reduction": "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cudnn_allow_tf32": "backends.cudnn.allow_tf32",
    "cudnn_conv_fp32_precision": "backends.cudnn.conv.fp32_precision",
    "cudnn_benchmark": "backends.cudnn.benchmark",
    "deterministic_algorithms": "are_deterministic_algorithms_enabled",
    "default_dtype": "get_default_dtype",
}
"""Setting -> where torch holds it. Two interfaces for one setting exclude each other: torch refuses the other."""

_COMPILER: Final = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable", "compiler_fn")
"""Where each layer around a compiler keeps the next one, in newer and older versions of torch."""


def describe_execution(objects: JobObjects, optimizers: Iterable[Any], problems: Problems) -> Settings:
    """The settings that decide how fast the same model runs, by subject; subjects without any are left out."""
    optimizers = list(optimizers)
    subjects: dict[str, Callable[[], dict[str, Any]]] = {
        "threads": _threads,
        "precision": _precision,
        "autograd": _autograd,
        "compile": lambda: _compile(objects.compiled),
        "optimizer": lambda: _optimizer(optimizers),
        "activation_checkpointing": lambda: _checkpointing(objects.modules),
    }
    described = {name: problems.guard(f"describing {name}", describe) for name, describe in subjects.items()}
    return {name: settings for name, settings in described.items() if settings}


def describe_scaler(objects: JobObjects) -> dict[str, Any]:
    """The gradient scaler in use; empty without one. Its scale is left out: asking for it waits for the device."""
    scaler = next((each for each in objects.scalers if each.is_enabled()), None)
    if scaler is None:
        return {}
    return {"scaler": type(scaler).__name__, "growth_interval": int(scaler.get_growth_interval())}


def _threads() -> dict[str, Any]:
    import torch

    return {"intraop": torch.get_num_threads(), "interop": torch.get_num_interop_threads()}


def _precision() -> dict[str, Any]:
    import torch

    settings: dict[str, Any] = {}
    for name, path in _PRECISION.items():
        try:
            value: Any = reduce(getattr, path.split("."), torch)
            value = value() if callable(value) else value
        except (AttributeError, RuntimeError):  # another version of torch, or set by the other interface
            continue
        settings[name] = value if isinstance(value, (bool, int)) else str(value).removeprefix("torch.")
    return settings


def _autograd() -> dict[str, Any]:
    """Whether gradients are searched for NaN; empty where they are not, as is usual."""
    import torch

    return {"detect_anomaly": True} if torch.is_anomaly_enabled() else {}


def _compile(contexts: list[Any]) -> dict[str, Any]:
    """Backend, mode and options of what ``torch.compile`` made, those of most regions where they differ."""
    regions = [_compiled_region(context) for context in contexts]
    if not regions:
        return {}
    common = max(regions, key=regions.count)
    return {**common, "regions": len(regions), "alike": regions.count(common) == len(regions)}


def _compiled_region(context: Any) -> dict[str, Any]:
    layer = context.callback
    while (inner := _inner(layer)) is not None:
        layer = inner
    options = getattr(layer, "config", None) or getattr(layer, "kwargs", None) or {}
    backend = getattr(layer, "compiler_name", None) or getattr(layer, "__name__", None) or type(layer).__name__
    return {
        "backend": str(backend),
        "mode": _mode(options) if hasattr(layer, "config") else None,
        "options": {str(name): _plain(value) for name, value in options.items()},
        "fullgraph": bool(getattr(context, "fullgraph", False)),
        "dynamic": getattr(context, "_dynamic", getattr(context, "dynamic", None)),
    }


def _inner(layer: Any) -> Any:
    """The next compiler inwards; None at the innermost, which torch itself may wrap once more in a function."""
    names = () if hasattr(layer, "config") and hasattr(layer, "compiler_name") else _COMPILER
    return next((vars(layer)[name] for name in names if name in getattr(layer, "__dict__", {})), None)


def _mode(options: dict[str, Any]) -> str | None:
    """The mode that stands for these options of Inductor's; None where none does."""
    if not options:
        return "default"
    from torch import _inductor

    modes: dict[str, dict[str, Any]] = _inductor.list_mode_options()
    return next((mode for mode, meant in modes.items() if meant == options), None)


def _optimizer(optimizers: list[Any]) -> dict[str, Any]:
    """Classes of the optimizers that have stepped, how many, and which implementation the first one uses."""
    if not optimizers:
        return {}
    defaults = getattr(optimizers[0], "defaults", {})
    chosen = {name: defaults[name] for name in ("fused", "foreach", "capturable") if name in defaults}
    classes = sorted({type(optimizer).__name__ for optimizer in optimizers})
    return {"classes": classes, "count": len(optimizers), **chosen}


def _checkpointing(modules: list[Any]) -> dict[str, Any]:
    """Modules whose activations are computed again in backward, as far as their classes or flags show."""
    wrapped = sum(type(module).__name__ == "CheckpointWrapper" for module in modules)
    flagged = sum(vars(module).get("gradient_checkpointing") is True for module in modules)
    return {"modules": wrapped + flagged} if wrapped + flagged else {}


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
