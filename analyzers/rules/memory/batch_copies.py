"""Copies of batches that nothing overlaps: fires when devices compute nothing while they copy from pinned memory.

Such a copy is queued behind the work before it, on the same stream: ``non_blocking=True`` alone frees the host, not the
device. On a stream of its own the next batch is copied while the model computes on this one. Source: PyTorch tutorial
"A guide on good usage of non_blocking and pin_memory()".
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rules.context import RuleContext
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


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: no such copies, overlapped ones, or those of an offloaded optimizer or model."""
    copying_us = _of_batches_us(job)
    exposed_us = min(copying_us, job.typical_us("exposed_copy"))
    if exposed_us < SHARE * job.step_time_us or offloads(job):
        return None
    return job.finding(
        RULE,
        f"The devices wait for copies from pinned memory for {job.share(exposed_us):.0%} of the step",
        exposed_us,
        evidence=(
            Evidence("copies from pinned memory, per step", copying_us, "us", job.ranks),
            Evidence("exposed copies per step (median)", job.typical_us("exposed_copy"), "us", job.ranks),
        ),
        action=Action(
            setting="stream of the batches' copies",
            old="the model's",
            new="one of their own",
            how=_HOW,
            costs="Memory for one more batch on each device.",
        ),
        confidence=job.confidence(),
    )


def _of_batches_us(job: RuleContext) -> float:
    """Copies of batches per step, µs; 0 where they are many, or as much goes to the host: something is offloaded."""
    rows = [row for row in job.summary.kernels if row.category == "copy"]
    to_device = [row for row in rows if "HtoD (Pinned" in row.name]
    copying_us = sum(row.us_per_step for row in to_device)
    to_host_us = sum(row.us_per_step for row in rows if "DtoH" in row.name)
    few = sum(row.count_per_step for row in to_device) <= FEW
    return copying_us if few and to_host_us < copying_us / 2 else 0.0
