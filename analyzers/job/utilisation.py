"""MFU = model FLOPs / (step time x devices x peak of the type the matrix products ran in).

Where products ran in several types, each counts against its own peak: MFU is the products' ideal time, Σ FLOPs / peak,
over step time x devices. With one type that is the same number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.analyzers.rank.work.tables import SINGLE_OR_TF32
from perfscope.recording.metadata import RunMetadata
from perfscope.results.rows import Utilisation
from perfscope.trace.hardware import DevicePeaks, peaks_of

CAUSAL: Final = "full"
"""Causal attention is counted in full: recorded shapes do not show the mask."""

NEGLIGIBLE: Final = 0.01
"""Share of the model FLOPs up to which products in a type without a known peak are left out of MFU."""

Flops = dict[str | None, float]
"""FLOPs per step by the type in which they ran."""

DEVICE_BACKENDS: Final = ("nccl", "rccl", "xccl", "hccl", "mccl")
"""Backends of torch.distributed that only move data between devices."""


def utilisation(result: AlignedJob, runs: Mapping[int, RunMetadata]) -> Utilisation:
    """MFU and HFU over the recorded ranks; None, with the reason, where the data cannot support them."""
    names = device_names(result, runs)
    peaks = peaks_of(names[0]) if len(names) == 1 else None
    by_type, hardware = _counted(result, runs, peaks)
    model = sum(by_type.values())
    reason = (
        _why_no_flops(result)
        if model == 0
        else _why_no_peak(names, peaks, by_type, blind=bool(blind_ranks(result, runs)))
    )
    mfu = hfu = peak = None
    if reason is None and peaks is not None:
        devices = sum(max(len(partial.devices), 1) for partial in result.partials.values())
        capacity = result.step_ns / 1e9 * devices
        mfu, hfu = (_ideal_s(flops, peaks) / capacity for flops in (by_type, hardware))
        peak = _common_peak(by_type, peaks)
        if max(mfu, hfu) > 1:
            reason = (
                f"the count gives {max(mfu, hfu):.0%} of {peaks.model}'s {_main_type(by_type)} peak, which cannot "
                "be: the products ran in another type, or the steps are marked wrongly"
            )
            mfu = hfu = None
    return Utilisation(
        mfu=mfu,
        hfu=hfu,
        model_flops_per_step=model or None,
        flops_coverage=_coverage(result, runs),
        peak_tflops=peak,
        dtype=_main_type(by_type),
        causal=CAUSAL,
        why_absent=reason,
        peak_source=peaks.source if peaks is not None else None,
        hardware_flops_per_step=sum(hardware.values()) or None,
        flops_by_dtype={name or "not recorded": flops / model for name, flops in by_type.items() if flops},
    )


def device_names(result: AlignedJob, runs: Mapping[int, RunMetadata]) -> tuple[str, ...]:
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


def blind_ranks(result: AlignedJob, runs: Mapping[int, RunMetadata]) -> tuple[int, ...]:
    """Ranks that train on devices, of whose work none is recorded."""
    return tuple(
        rank
        for rank, partial in sorted(result.partials.items())
        if not partial.has_device_work and _trains_on_device(partial, runs.get(rank))
    )


def _trains_on_device(partial: RankPartial, run: RunMetadata | None) -> bool:
    """As the rank itself noted; else by its trace, which lists the host's devices also where none is used."""
    if partial.parse_report.unread_processes or partial.backend in DEVICE_BACKENDS:
        return True
    return partial.has_devices if run is None else run.device.type != "cpu"


def resolved_type(dtype: str | None, peaks: DevicePeaks | None) -> str | None:
    """A type of ``RankFlops`` on a device: one without TF32 of its own computes single precision as such."""
    if dtype == SINGLE_OR_TF32 and peaks is not None:
        single = peaks.tflops.get("float32")
        return "float32" if peaks.tflops.get("tf32") in (None, single) else dtype
    return dtype


def _counted(result: AlignedJob, runs: Mapping[int, RunMetadata], peaks: DevicePeaks | None) -> tuple[Flops, Flops]:
    """(model, hardware) FLOPs per step of all ranks present.

    By shapes; scaled to the run's own count on a rank that made one, which includes recomputation.
    """
    model: defaultdict[str | None, float] = defaultdict(float)
    hardware: defaultdict[str | None, float] = defaultdict(float)
    for rank, partial in result.partials.items():
        used = partial.steps.indices_of(result.steps)
        of_model, of_hardware = (table[:, used].mean(axis=1) for table in (partial.flops.model, partial.flops.hardware))
        types = [resolved_type(name, peaks) for name in partial.flops.types]
        run = runs.get(rank)
        if run is not None and run.model_flops_per_step:
            counted = float(of_hardware.sum())
            scale = run.model_flops_per_step / counted if counted else 0.0
            of_model, of_hardware = of_model * scale, of_hardware * scale
            if not counted:
                model[None] += run.model_flops_per_step
                hardware[None] += run.model_flops_per_step
        for index, name in enumerate(types):
            model[name] += float(of_model[index])
            hardware[name] += float(of_hardware[index])
    return dict(model), dict(hardware)


def _ideal_s(flops: Flops, peaks: DevicePeaks) -> float:
    """Time that the products would take on one device at its peaks; those in a type without a peak left out."""
    return sum(count / (peaks.tflops[name] * 1e12) for name, count in flops.items() if name and name in peaks.tflops)


def _common_peak(flops: Flops, peaks: DevicePeaks) -> float | None:
    """TFLOP/s that the device can reach on this mix of types; the type's own peak where it is (all but) one."""
    held: Flops = {name: count for name, count in flops.items() if name in peaks.tflops and count}
    main = _main_type(held)
    if main is not None and held[main] >= (1 - NEGLIGIBLE) * sum(held.values()):
        return peaks.tflops[main]
    return sum(held.values()) / _ideal_s(held, peaks) / 1e12 if held else None


def _main_type(flops: Flops) -> str | None:
    """The type in which most FLOPs ran."""
    return max(flops, key=lambda name: flops[name]) if any(flops.values()) else None


def _coverage(result: AlignedJob, runs: Mapping[int, RunMetadata]) -> float | None:
    if all(rank in runs and runs[rank].model_flops_per_step for rank in result.partials):
        return 1.0
    total = covered = 0
    for partial in result.partials.values():
        used = partial.steps.indices_of(result.steps)
        total += int(partial.flops.matrix_ns[used].sum())
        covered += int(partial.flops.covered_ns[used].sum())
    return covered / total if total else None


def _why_no_peak(names: tuple[str, ...], peaks: DevicePeaks | None, model: Flops, *, blind: bool) -> str | None:
    """Why there is no peak that applies; None where there is one. ``blind``: devices were used and not recorded."""
    if names == ("CPU",):
        return "the recording has no device events" if blind else "the job ran on CPUs, for which no peak is listed"
    if len(names) != 1:
        return "the ranks ran on different devices" if names else "the recording does not name the device"
    if peaks is None:
        return f"no peak is listed for {names[0]!r}"
    without = {name: count for name, count in model.items() if name not in peaks.tflops}
    if sum(without.values()) <= NEGLIGIBLE * sum(model.values()):
        return None
    dtype = _main_type(without)
    if dtype is None:
        return "the type of the matrix products is not recorded"
    if dtype == SINGLE_OR_TF32:
        return (
            "products of single precision ran in kernels whose names do not say whether they used TF32, which has a "
            "peak of its own"
        )
    return f"no {dtype} peak is listed for {peaks.model}"


def _why_no_flops(result: AlignedJob) -> str:
    if not any(partial.has_shapes for partial in result.partials.values()):
        return "operator shapes were not recorded (perfscope run records them unless --no-shapes is given)"
    return "no matrix product was recognised in the used steps"
