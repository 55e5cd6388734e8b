"""Copies of batches that nothing overlaps: fires when devices compute nothing while they copy from pinned memory.

Such a copy is queued behind the work before it, on the same stream: ``non_blocking=True`` alone frees the host, not the
device. On a stream of its own the next batch is copied while the model computes on this one. Source: PyTorch tutorial
"A guide on good usage of non_blocking and pin_memory()". Copies that have a stream of their own already take longer
than the computation, or are issued no sooner than the batch is needed.
"""

from __future__ import annotations

from statistics import fmean, median
from typing import Final

from perfscope.analyzers.rules.context import RuleContext, known
from perfscope.analyzers.rules.memory.offload import offloads
from perfscope.results.findings import Action, Evidence, Finding, code

RULE: Final = "batch-copies"
SHARE: Final = 0.1
"""Least share of the step that is exposed copies from pinned memory: less is usual, and a stream more takes care."""
FEW: Final = 16
"""Copies per step up to which they are those of batches: offloaded layers take more."""

_HOW: Final = "Copy the next batch on a stream of its own, from a loader with pin_memory=True:\n" + code(
    "python",
    """\
def copied(loader):
    copies, ready = torch.cuda.Stream(), None
    for batch in loader:
        with torch.cuda.stream(copies):
            following = batch.to(device, non_blocking=True)
        if ready is not None:
            yield ready
        torch.cuda.current_stream().wait_stream(copies)
        following.record_stream(torch.cuda.current_stream())
        ready = following
    if ready is not None:
        yield ready
# the loop: for batch in copied(loader):""",
)

_EARLIER: Final = (
    "Issue the copy of the next batch before the forward of this one. Copies have a stream of their own already, but "
    "are issued when the batch is needed."
)
_FEWER_BYTES: Final = """\
Copy fewer bytes per batch. Copies have a stream of their own already, and take the whole step, one after the other:
- images as uint8, converted and normalized on the device
- token ids as int32, and without padding
- no tensors that the step does not use
Check with nvidia-smi -q that each device has all lanes of its PCIe slot (Link Width)."""
_WHOLE_STEP: Final = 0.9
"""Share of the step from which on copies set its pace."""


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: no such copies, overlapped ones, or those of an offloaded optimizer or model."""
    copying_us = _of_batches_us(job)
    exposed_us = min(copying_us, job.typical_us("exposed_copy"))
    if exposed_us < SHARE * job.step_time_us or offloads(job):
        return None
    beside_us = min(_beside_us(job), copying_us)
    on_own_stream = beside_us > copying_us / 2
    return job.finding(
        RULE,
        f"The devices wait for copies from pinned memory for {job.share(exposed_us):.0%} of the step",
        exposed_us,
        evidence=(
            Evidence("copies from pinned memory, per step", copying_us, "us", job.ranks),
            *known("copies beside the computation, per step", beside_us or None, "us", job.ranks),
            Evidence("exposed copies per step (median)", job.typical_us("exposed_copy"), "us", job.ranks),
        ),
        action=_of_own_stream(beside_us >= _WHOLE_STEP * job.step_time_us) if on_own_stream else _ONTO_OWN_STREAM,
        confidence=job.confidence(),
    )


_ONTO_OWN_STREAM: Final = Action(
    setting="stream of the batches' copies", old="the model's", new="one of their own", how=_HOW,
    costs="Memory for one more batch on each device.",
)  # fmt: skip


def _of_own_stream(whole_step: bool) -> Action:
    """For copies that have one: ``whole_step`` is whether they take all of it."""
    if whole_step:
        return Action(
            setting="bytes of a batch", old="copied for the whole step", new="fewer", how=_FEWER_BYTES,
            costs="A few kernels that convert the batch on the device.",
        )  # fmt: skip
    return Action(
        setting="copy of the next batch", old="when it is needed", new="one step earlier", how=_EARLIER,
        costs="Memory for one more batch on each device.",
    )  # fmt: skip


def _beside_us(job: RuleContext) -> float:
    """Copies between host and device on another stream than the computation, per step: of the rank in the middle."""
    return median(fmean(steps.copied_beside_us) for steps in job.per_step.values()) if job.per_step else 0.0


def _of_batches_us(job: RuleContext) -> float:
    """Copies of batches per step, µs; 0 where they are many, or as much goes to the host: something is offloaded."""
    rows = [row for row in job.summary.kernels if row.category == "copy"]
    to_device = [row for row in rows if "HtoD (Pinned" in row.name]
    copying_us = sum(row.us_per_step for row in to_device)
    to_host_us = sum(row.us_per_step for row in rows if "DtoH" in row.name)
    few = sum(row.count_per_step for row in to_device) <= FEW
    return copying_us if few and to_host_us < copying_us / 2 else 0.0
