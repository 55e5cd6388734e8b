"""Mixed precision: fires when matrix kernels compute in single precision on a device with tensor (matrix) cores.

What it can bring is Amdahl's law on the matrix time with the ratio of the device's peaks, a ceiling: kernels of few
elements reach neither peak. What elementwise kernels gain from half the bytes comes on top and is not counted.
Source: PyTorch performance tuning guide, "Use mixed precision and AMP"; peaks as in ``perfscope.hardware``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.flops.of_rank import SINGLE_OR_TF32
from perfscope.analyzers.rules.frameworks import framework, settings_of
from perfscope.analyzers.work.kernel_classes import PRODUCTS
from perfscope.findings import Action, Confidence, Evidence, Finding, Obtained, Severity, ceiling
from perfscope.hardware import DevicePeaks, peaks_of
from perfscope.summary_tables import KernelRow

RULE: Final = "mixed-precision"
SHARE: Final = 0.05
"""Share of the step that must be recoverable at most: what is below is not worth a change of numerics."""

_SHORT: Final = {"bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class _Products:
    """Matrix kernels of single precision (or TF32), µs per step and what half precision may take off."""

    kernels: tuple[KernelRow, ...]
    us: float
    saved_us: float
    tf32_saved_us: float
    """What TF32 alone may take off of those that do not use it."""


def evaluate(facts: JobFacts) -> Finding | None:
    """The finding, or None: no such kernels, an unknown device or type, or too little of the step."""
    peaks = peaks_of(facts.devices[0]) if len(facts.devices) == 1 else None
    half = next((name for name in ("bfloat16", "float16") if peaks is not None and name in peaks.tflops), None)
    if peaks is None or half is None:
        return None
    found = _products(facts, peaks, half)
    if found.saved_us < SHARE * facts.step_time_us:
        return None
    single = sorted({_type(facts, kernel) or "" for kernel in found.kernels})
    old = " and ".join(single)
    setting, new = (text.format(half=half, short=_SHORT[half]) for text in _SETTINGS[framework(facts)])
    return Finding(
        rule=RULE,
        title=f"Matrix products in {old} take {found.us / facts.step_time_us:.0%} of the step; {peaks.model}'s tensor "
        f"cores do them in {_SHORT[half]}",
        severity=Severity.of_share(found.saved_us / facts.step_time_us),
        evidence=_evidence(facts, found, peaks, half),
        action=Action(
            setting=setting,
            old=old,
            new=new,
            how=_how(facts, found, half),
            costs="Numerics: watch the loss. bf16 keeps float32's range and needs no gradient scaler, fp16 needs one; "
            "parameters stay in float32, and activations take half the memory.",
        ),
        confidence=Confidence.LOW if facts.few_steps else Confidence.MEDIUM,
        obtained=Obtained.BOUNDED,
        ceiling=ceiling(facts.step_time_us, found.saved_us),
    )


def _products(facts: JobFacts, peaks: DevicePeaks, half: str) -> _Products:
    kernels = tuple(
        kernel
        for kernel in facts.kernels
        if kernel.operator_class in PRODUCTS and _type(facts, kernel) in peaks.tflops and kernel.category == "compute"
        if _type(facts, kernel) in ("float32", "tf32")
    )
    alone = _not_overlapping(facts)

    def saved(to: str) -> float:
        speeds: Mapping[str, float] = peaks.tflops
        shares = ((kernel, 1 - speeds[_type(facts, kernel) or ""] / speeds.get(to, 1e-9)) for kernel in kernels)
        return sum(kernel.us_per_step * max(share, 0.0) for kernel, share in shares) * alone

    return _Products(kernels, sum(kernel.us_per_step for kernel in kernels) * alone, saved(half), saved("tf32"))


def _not_overlapping(facts: JobFacts) -> float:
    """Compute time of the account over the sum of kernels' durations: below 1 where kernels run side by side."""
    durations = sum(kernel.us_per_step for kernel in facts.kernels if kernel.category == "compute")
    return min(facts.typical_us("compute") / durations, 1.0) if durations else 0.0


def _type(facts: JobFacts, kernel: KernelRow) -> str | None:
    """The kernel's type. Where its name leaves TF32 open the run's own setting decides; without one nothing does."""
    if kernel.dtype != SINGLE_OR_TF32:
        return kernel.dtype
    precision = settings_of(facts, "precision")
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
    "accelerate": ("mixed_precision", "{short}"),
    "deepspeed": ("{short}.enabled", "true"),
    "megatron": ("--{short}", "on"),
}
"""Framework -> setting and its new value."""

_HOWS: Final = {
    "torch": 'with torch.autocast("cuda", dtype=torch.{half}): around the forward and the loss',
    "transformers": "--{short} True (TrainingArguments({short}=True))",
    "lightning": 'Trainer(precision="{short}-mixed")',
    "accelerate": "mixed_precision: {short} in the file of accelerate config, or Accelerator(mixed_precision=…)",
    "deepspeed": '"{short}": {{"enabled": true}} in the DeepSpeed JSON',
    "megatron": "--{short}",
}

_FSDP: Final = {
    1: "FullyShardedDataParallel(…, mixed_precision=MixedPrecision(param_dtype=torch.{half}, "
    "reduce_dtype=torch.float32))",
    2: "fully_shard(…, mp_policy=MixedPrecisionPolicy(param_dtype=torch.{half}, reduce_dtype=torch.float32))",
}


def _how(facts: JobFacts, found: _Products, half: str) -> str:
    used = framework(facts)
    line = _HOWS[used]
    version = settings_of(facts, "fsdp").get("version")
    if used == "torch" and version in _FSDP:
        line = _FSDP[version]
    lines = [line.format(half=half, short=_SHORT[half])]
    if half == "float16" and used == "torch":
        lines[0] += "; torch.amp.GradScaler for the gradients"
    if settings_of(facts, "amp").get("dtype"):
        operators = sorted({kernel.operator for kernel in found.kernels if kernel.operator})
        lines[0] = f"Autocast is on already: these products run outside of it ({', '.join(operators[:3])}). {lines[0]}"
    if found.tf32_saved_us >= SHARE * facts.step_time_us:
        more = ceiling(facts.step_time_us, found.tf32_saved_us)
        tf32 = "--tf32 True" if used == "transformers" else 'torch.set_float32_matmul_precision("high")'
        lines.append(
            f"{tf32}, one line without autocast: TF32 has float32's range with 10 bits of mantissa, and can bring at "
            f"most {more:.0%} more steps a second."
        )
    return "\n".join(lines)


def _evidence(facts: JobFacts, found: _Products, peaks: DevicePeaks, half: str) -> tuple[Evidence, ...]:
    heaviest = max(found.kernels, key=lambda kernel: kernel.us_per_step)
    dtype = _type(facts, heaviest) or ""
    rows = [
        Evidence(what="matrix kernels of single precision, per step", value=found.us, unit="us", ranks=facts.ranks),
        Evidence(what=f"the heaviest: {heaviest.name[:80]}", value=heaviest.us_per_step, unit="us"),
        Evidence(what=f"{peaks.model}, dense peak in {dtype}", value=peaks.tflops[dtype], unit="TFLOP/s"),
        Evidence(what=f"{peaks.model}, dense peak in {half}", value=peaks.tflops[half], unit="TFLOP/s"),
    ]
    return tuple(rows)
