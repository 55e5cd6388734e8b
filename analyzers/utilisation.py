"""MFU = model FLOPs / (step time x devices x peak of the type the matrix products ran in)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from perfscope.analyzers.comparison import Comparison
from perfscope.hardware import DevicePeaks, peaks_of
from perfscope.metadata import RunMetadata
from perfscope.summary import Utilisation

CAUSAL: Final = "full"
"""Causal attention is counted in full: recorded shapes do not show the mask."""


def utilisation(result: Comparison, runs: Mapping[int, RunMetadata]) -> Utilisation:
    """MFU and HFU over the ranks present; absent, with the reason, where the data cannot support them."""
    counts = {rank: _flops(result, rank, runs.get(rank)) for rank in result.partials}
    model = sum(count[0] for count in counts.values())
    hardware = sum(count[1] for count in counts.values())
    coverage = _coverage(result, runs)
    dtype = _common({partial.flops.dtype for partial in result.partials.values() if partial.flops.dtype})
    names = device_names(result, runs)
    peaks, reason = _peak(names, dtype)
    peak = peaks.tflops[dtype] if peaks is not None and dtype is not None else None
    if model == 0:
        reason = _why_no_flops(result)
    mfu = hfu = None
    if reason is None and peak is not None:
        devices = sum(max(len(partial.devices), 1) for partial in result.partials.values())
        capacity = result.step_ns / 1e9 * devices * peak * 1e12
        mfu, hfu = model / capacity, hardware / capacity
        if mfu > 1:
            reason = (
                f"the count gives {mfu:.0%} of {peaks.model if peaks else 'the device'}'s {dtype} peak, which cannot "
                "be: the products ran in another type, or the steps are marked wrongly"
            )
            mfu = hfu = None
    return Utilisation(
        mfu=mfu,
        hfu=hfu,
        model_flops_per_step=model or None,
        flops_coverage=coverage,
        peak_tflops=peak,
        dtype=dtype,
        causal=CAUSAL,
        why_absent=reason,
        peak_source=peaks.source if peaks is not None else None,
    )


def device_names(result: Comparison, runs: Mapping[int, RunMetadata]) -> tuple[str, ...]:
    """Distinct names of the devices that the ranks trained on; ``CPU`` for a rank without device work."""
    names: dict[str, None] = {}
    for rank, partial in result.partials.items():
        run = runs.get(rank)
        if not partial.has_device_work:
            names["CPU"] = None
        elif partial.devices:
            names.update(dict.fromkeys(device.name for device in partial.devices if device.name))
        elif run is not None and run.device.name:
            names[run.device.name] = None
    return tuple(names)


def _flops(result: Comparison, rank: int, run: RunMetadata | None) -> tuple[float, float]:
    """(model, hardware) FLOPs per step of one rank: the run's own count where there is one, else by shapes."""
    partial = result.partials[rank]
    if run is not None and run.model_flops_per_step:
        return run.model_flops_per_step, run.model_flops_per_step
    used = partial.steps.indices_of(result.steps)
    return float(partial.flops.model[used].mean()), float(partial.flops.hardware[used].mean())


def _coverage(result: Comparison, runs: Mapping[int, RunMetadata]) -> float | None:
    if all(rank in runs and runs[rank].model_flops_per_step for rank in result.partials):
        return 1.0
    shares = [partial.flops.coverage for partial in result.partials.values() if partial.flops.coverage is not None]
    return sum(shares) / len(shares) if shares else None


def _common(values: set[str]) -> str | None:
    return values.pop() if len(values) == 1 else None


def _peak(names: tuple[str, ...], dtype: str | None) -> tuple[DevicePeaks | None, str | None]:
    """The one peak that applies, or why there is none."""
    if names == ("CPU",):
        return None, "the job ran on CPUs, for which no peak is listed"
    if len(names) != 1:
        return None, "the ranks ran on different devices" if names else "the recording does not name the device"
    peaks = peaks_of(names[0])
    if peaks is None:
        return None, f"no peak is listed for {names[0]!r}"
    if dtype is None:
        return peaks, "the type of the matrix products is not recorded"
    if dtype not in peaks.tflops:
        return None, f"no {dtype} peak is listed for {peaks.model}"
    return peaks, None


def _why_no_flops(result: Comparison) -> str:
    if not any(partial.has_shapes for partial in result.partials.values()):
        return "operator shapes were not recorded; record with shapes (perfscope run records them)"
    return "no matrix product was recognised in the used steps"
