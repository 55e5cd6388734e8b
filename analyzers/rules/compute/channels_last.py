"""Memory format: fires when cuDNN writes tensors with their channels last for its convolutions, and back.

Convolutions on tensor cores want the channels last. Where tensors have them first, cuDNN converts them before and after
each convolution. With ``memory_format=torch.channels_last`` nothing is converted. What else changes is not known from
the recording: other kernels may be chosen, and operators without a kernel for that format convert in their turn.
Source: PyTorch tutorial "Channels Last Memory Format in PyTorch"; NVIDIA, "Convolutional Layers User's Guide", 2.1.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rules.context import RuleContext
from perfscope.results.findings import Action, Confidence, Evidence, Finding, code

RULE: Final = "channels-last"
SHARE: Final = 0.02
"""Least share of the step that conversions take: the change is two lines."""
_CHANGE: Final = {"layout.conversions": "0"}


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: tensors are not converted, or their channels are last already."""
    converted = job.conversions
    if converted is None or converted.us < SHARE * job.step_time_us:
        return None
    prediction = job.predict(_CHANGE) if job.predict is not None else None
    saved_us = converted.us if prediction is None else job.step_time_us - prediction.mid
    if saved_us < SHARE * job.step_time_us:
        return None
    convolutions = sum(row.us_per_step for row in job.summary.kernels if row.operator_class == "convolution")
    return job.finding(
        RULE,
        f"Converting tensors to channels last and back takes {job.share(converted.us):.0%} of the step",
        saved_us,
        evidence=(
            Evidence(
                "converting the memory format around convolutions, per step (median)", converted.us, "us", job.ranks
            ),
            Evidence("kernels that convert, per step", converted.count, ranks=job.ranks),
            Evidence("convolutions themselves, per step", convolutions, "us", job.ranks),
        ),
        action=Action(
            setting="memory_format",
            old="torch.contiguous_format",
            new="torch.channels_last",
            how=_HOW,
            costs="No memory. Results may differ in their last bits: other kernels compute them. Convolutions get "
            "faster or slower with those, which is not predicted: the gain is that of the conversions alone. Operators "
            "without a kernel for channels last convert on their own: look for conversions that are left.",
        ),
        confidence=Confidence.LOW if job.info.few_steps else Confidence.MEDIUM,
        predicted=prediction,
        whatif=_CHANGE,
    )


_HOW: Final = (
    "After the model is made, and in the loop, after the batch is on the device:\n"
    + code(
        "python",
        "model = model.to(memory_format=torch.channels_last)\nimages = images.to(memory_format=torch.channels_last)",
    )
    + "\nWith three-dimensional convolutions: torch.channels_last_3d."
)
