"""Pinned memory: fires when batches are copied to devices from pageable memory and the step waits for that.

A copy from pageable memory goes through a buffer of the driver, blocks the host until it is done, and reaches a
fraction of the link's bandwidth. From pinned memory, with ``non_blocking=True``, it overlaps compute.
Source: PyTorch performance tuning guide, "Enable asynchronous data loading and augmentation"; Nsight Systems' recipe
``cuda_memcpy_async`` looks for the same.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.job.tables.syncs import SyncRow
from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.memory.offload import offloads
from perfscope.analyzers.rules.typed import call, data_loader, training_arguments
from perfscope.results.findings import Action, Confidence, Evidence, Finding, code
from perfscope.results.tables import KernelRow

RULE: Final = "pinned-memory"
SHARE: Final = 0.05
"""Least share of the step that waits for the copies."""

_COPYING: Final = ("aten::copy_", "aten::_to_copy")


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: no copies from pageable memory, overlapped ones, or those of an offloaded optimizer."""
    copies = _pageable(job)
    if not copies or offloads(job):
        return None
    copying_us = sum(copy.us_per_step for copy in copies)
    blocked_us = sum(row.delayed_us for row in blocking_copies(job))
    waiting_us = min(copying_us, job.typical_us("exposed_copy")) + blocked_us
    if waiting_us < SHARE * job.step_time_us:
        return None
    loader = job.loader
    pinned = loader is not None and loader.pin_memory
    return job.finding(
        RULE,
        f"Copies from pageable memory block {job.share(waiting_us):.0%} of the step",
        waiting_us,
        evidence=(
            Evidence("copies from pageable memory, per step", copying_us, "us", job.ranks),
            Evidence("exposed copies per step (median)", job.typical_us("exposed_copy"), "us", job.ranks),
            Evidence("device idle because such a copy blocks the host", blocked_us, "us", job.ranks),
        ),
        action=Action(
            setting="pin_memory() of the batches" if pinned else _SETTINGS.get(job.framework, _DATALOADER),
            old=None if loader is None or pinned else "False",
            new=None if pinned else "True",
            how=_OWN_TYPE if pinned else _HOWS.get(job.framework, _HOW),
            costs="Pinned host memory, for at most workers x prefetch_factor batches.",
        ),
        confidence=Confidence.LOW if job.info.few_steps else Confidence.HIGH if loader else Confidence.MEDIUM,
    )


def blocking_copies(job: RuleContext) -> tuple[SyncRow, ...]:
    """Host synchronizations by such copies; none where everything comes from pinned memory."""
    if not _pageable(job):
        return ()
    return tuple(row for row in job.syncs if row.operator in _COPYING)


def _pageable(job: RuleContext) -> tuple[KernelRow, ...]:
    return tuple(row for row in job.summary.kernels if row.category == "copy" and "HtoD (Pageable" in row.name)


_DATALOADER: Final = "DataLoader(pin_memory=…)"
_SETTINGS: Final = {"transformers": "TrainingArguments(dataloader_pin_memory=…)"}
_PINNED: Final = data_loader(pin_memory=True)
_HOW: Final = "\n".join(
    (
        _PINNED,
        "And in the loop:",
        code("python", "batch = batch.to(device, non_blocking=True)"),
        "For other tensors: tensor.pin_memory() before the copy.",
    )
)
_HOWS: Final = {
    "transformers": training_arguments(dataloader_pin_memory=True),
    "lightning": f"{_PINNED}\nLightning copies with non_blocking=True by itself.",
    "accelerate": f"{_PINNED}\nAnd:\n"
    + call(
        "accelerator = Accelerator",
        "",
        "from accelerate.utils import DataLoaderConfiguration",
        dataloader_config="DataLoaderConfiguration(non_blocking=True)",
    ),
}
_OWN_TYPE: Final = (
    "The DataLoader already pins memory, but only of types that it knows: add a method pin_memory() to your own batch "
    "type that pins its tensors and returns it. For tensors made after loading: tensor.pin_memory() before "
    ".to(device, non_blocking=True)."
)
