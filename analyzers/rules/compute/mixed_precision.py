"""Mixed precision: fires when matrix kernels compute in single precision on a device with tensor (matrix) cores.

The ceiling is Amdahl's law on the matrix time with the ratio of the device's peaks; small kernels reach neither peak.
Elementwise kernels gain from half the bytes as well, which is not counted.
Source: PyTorch performance tuning guide, "Use mixed precision and AMP"; peaks as in ``perfscope.trace.hardware``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from perfscope.analyzers.job.utilisation import resolved_type
from perfscope.analyzers.rank.kernel_classes import PRODUCTS
from perfscope.analyzers.rank.work.tables import SINGLE_OR_TF32
from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.typed import call, fsdp1, fsdp2, in_accelerate, in_deepspeed, training_arguments
from perfscope.frozen import dataclass
from perfscope.results.findings import Action, Confidence, Evidence, Finding, code
from perfscope.results.tables import KernelRow
from perfscope.text import factor
from perfscope.trace.hardware import DevicePeaks, peaks_of

RULE: Final = "mixed-precision"
SHARE: Final = 0.05
"""Least share of the step that must be recoverable: less is not worth a change of numerics."""

_SHORT: Final = {"bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class _Products:
    """Matrix kernels of single precision (or TF32), µs per step, and what half precision can save of that."""

    kernels: tuple[KernelRow, ...]
    us: float
    saved_us: float
    tf32_saved_us: float
    """What TF32 alone can save, of those that do not use it."""


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: no such kernels, an unknown device or type, or too little of the step."""
    peaks = peaks_of(job.info.devices[0]) if len(job.info.devices) == 1 else None
    half = next((name for name in ("bfloat16", "float16") if peaks is not None and name in peaks.tflops), None)
    if peaks is None or half is None:
        return None
    products = _products(job, peaks, half)
    if products.saved_us < SHARE * job.step_time_us:
        return None
    single = sorted({_type(job, kernel, peaks) or "" for kernel in products.kernels})
    old = " and ".join(single)
    setting, new = (text.format(half=half, short=_SHORT[half]) for text in _SETTINGS[job.framework])
    return job.finding(
        RULE,
        f"Matrix products in {old} take {job.share(products.us):.0%} of the step; the tensor cores of "
        f"{peaks.model} support {_SHORT[half]}",
        products.saved_us,
        evidence=_evidence(job, products, peaks, half),
        action=Action(
            setting=setting,
            old=old,
            new=new,
            how=_how(job, products, half),
            costs="Numerics: watch the loss. bf16 has float32's range and needs no gradient scaler, fp16 needs one. "
            "Parameters stay in float32, and activations take half the memory.",
        ),
        confidence=Confidence.LOW if job.info.few_steps else Confidence.MEDIUM,
    )


def _products(job: RuleContext, peaks: DevicePeaks, half: str) -> _Products:
    kernels = tuple(
        kernel
        for kernel in job.summary.kernels
        if kernel.operator_class in PRODUCTS
        and _type(job, kernel, peaks) in peaks.tflops
        and kernel.category == "compute"
        if _type(job, kernel, peaks) in ("float32", "tf32")
    )
    alone = _not_overlapping(job)

    def saved(to: str) -> float:
        speeds: Mapping[str, float] = peaks.tflops
        shares = ((kernel, 1 - speeds[_type(job, kernel, peaks) or ""] / speeds.get(to, 1e-9)) for kernel in kernels)
        return sum(kernel.us_per_step * max(share, 0.0) for kernel, share in shares) * alone

    return _Products(kernels, sum(kernel.us_per_step for kernel in kernels) * alone, saved(half), saved("tf32"))


def _not_overlapping(job: RuleContext) -> float:
    """Compute time in the time breakdown over the sum of kernel durations: below 1 where kernels run concurrently."""
    durations = sum(kernel.us_per_step for kernel in job.summary.kernels if kernel.category == "compute")
    return min(job.typical_us("compute") / durations, 1.0) if durations else 0.0


def _type(job: RuleContext, kernel: KernelRow, peaks: DevicePeaks) -> str | None:
    """The kernel's type. Where name and device leave TF32 open, the recorded setting decides; None without one."""
    dtype = resolved_type(kernel.dtype, peaks)
    if dtype != SINGLE_OR_TF32:
        return dtype
    precision = job.settings("precision")
    if kernel.operator_class == "convolution":
        allowed = precision.get("cudnn_allow_tf32", precision.get("cudnn_conv_fp32_precision", "") in ("tf32",))
        known = "cudnn_allow_tf32" in precision or "cudnn_conv_fp32_precision" in precision
    else:
        allowed = precision.get("float32_matmul_precision") in ("high", "medium")
        known = "float32_matmul_precision" in precision
    return ("tf32" if allowed else "float32") if known else None


_SETTINGS: Final = {
    "torch": ('torch.autocast("cuda", dtype=torch.…)', "{half}"),
    "transformers": ("TrainingArguments({short}=…)", "True"),
    "lightning": ("Trainer(precision=…)", '"{short}-mixed"'),
    "fabric": ("Fabric(precision=…)", '"{short}-mixed"'),
    "accelerate": ("mixed_precision", "{short}"),
    "deepspeed": ("{short}.enabled", "true"),
    "megatron": ("--{short}", "on"),
}
"""Framework -> setting and its new value."""

_HOWS: Final = {
    "torch": "Around the forward and the loss:\n"
    + code("python", 'with torch.autocast("cuda", dtype=torch.{half}):\n    loss = loss_of(model, batch)'),
    "transformers": training_arguments(**{"{short}": True}),
    "lightning": call("trainer = Trainer", precision='"{short}-mixed"'),
    "fabric": call("fabric = Fabric", precision='"{short}-mixed"'),
    "accelerate": in_accelerate("mixed_precision: {short}"),
    "deepspeed": in_deepspeed('{{"{short}": {{"enabled": true}}}}'),
    "megatron": code("shell", "--{short}"),
}

_FSDP: Final = {
    1: fsdp1(
        "MixedPrecision",
        mixed_precision="precision",
        before="precision = MixedPrecision(param_dtype=torch.{half}, reduce_dtype=torch.float32)",
    ),
    2: fsdp2(
        "MixedPrecisionPolicy",
        mp_policy="policy",
        before="policy = MixedPrecisionPolicy(param_dtype=torch.{half}, reduce_dtype=torch.float32)",
    ),
}
_SCALED: Final = "\nWith float16, gradients have to be scaled:\n" + code(
    "python",
    'scaler = torch.amp.GradScaler("cuda")\nscaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()',
)


def _how(job: RuleContext, products: _Products, half: str) -> str:
    used = job.framework
    line = _HOWS[used]
    version = job.fsdp_version
    if used == "torch" and version in _FSDP:
        line = _FSDP[version]
    lines = [line.format(half=half, short=_SHORT[half])]
    if half == "float16" and used == "torch":
        lines[0] += _SCALED
    if job.settings("amp").get("dtype"):
        operators = sorted({kernel.operator for kernel in products.kernels if kernel.operator})
        lines[0] = (
            f"Autocast is already on, but these products run outside it ({', '.join(operators[:3])}).\n{lines[0]}"
        )
    if products.tf32_saved_us >= SHARE * job.step_time_us:
        more = job.ceiling(products.tf32_saved_us)
        tf32 = code("python", 'torch.set_float32_matmul_precision("high")')
        lines.append(
            "Or one line without autocast: TF32 has float32's range with 10 bits of mantissa. Speedup: at most "
            f"{factor(1 + more)}.\n{training_arguments(tf32=True) if used == 'transformers' else tf32}"
        )
    return "\n".join(lines)


def _evidence(job: RuleContext, products: _Products, peaks: DevicePeaks, half: str) -> tuple[Evidence, ...]:
    longest = max(products.kernels, key=lambda kernel: kernel.us_per_step)
    dtype = _type(job, longest, peaks) or ""
    return (
        Evidence("matrix kernels in single precision, per step", products.us, "us", job.ranks),
        Evidence(f"the longest: {longest.name[:80]}", longest.us_per_step, "us"),
        Evidence(f"{peaks.model}, dense peak in {dtype}", peaks.tflops[dtype], "TFLOP/s"),
        Evidence(f"{peaks.model}, dense peak in {half}", peaks.tflops[half], "TFLOP/s"),
    )
