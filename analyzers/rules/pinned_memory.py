"""Pinned memory: fires when batches are copied to devices from pageable memory and the step waits for that.

A copy from pageable memory goes through a buffer of the driver, blocks the host until it is done, and moves at a
fraction of the link's speed. From pinned memory, with ``non_blocking=True``, it runs beside computation.
Source: PyTorch performance tuning guide, "Enable asynchronous data loading and augmentation"; Nsight Systems' recipe
``cuda_memcpy_async`` looks for the same.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules.frameworks import framework
from perfscope.analyzers.rules.offload import offloads
from perfscope.analyzers.work.sync_table import SyncRow
from perfscope.findings import Action, Confidence, Evidence, Finding, Obtained, Severity, ceiling
from perfscope.summary_tables import KernelRow

RULE: Final = "pinned-memory"
SHARE: Final = 0.05
"""Share of the step that the copies hold up from which the rule fires."""

_COPYING: Final = ("aten::copy_", "aten::_to_copy")


def evaluate(facts: JobFacts) -> Finding | None:
    """The finding, or None: no copies from pageable memory, hidden ones, or those of an offloaded optimizer."""
    copies = _pageable(facts)
    if not copies or offloads(facts):
        return None
    copying_us = sum(copy.us_per_step for copy in copies)
    blocked_us = sum(row.idle_us for row in blocking_copies(facts))
    held_up = min(copying_us, facts.typical_us("exposed_copy")) + blocked_us
    if held_up < SHARE * facts.step_time_us:
        return None
    loader = facts.run.dataloaders[0] if facts.run and facts.run.dataloaders else None
    pinned = loader is not None and loader.pin_memory
    share = held_up / facts.step_time_us
    return Finding(
        rule=RULE,
        title=f"Copies from pageable memory to the devices hold up {share:.0%} of the step",
        severity=Severity.of_share(share),
        evidence=(
            Evidence(what="copies from pageable memory", value=copying_us, unit="us", ranks=facts.ranks),
            Evidence(
                what="copies that no computation hides (median)",
                value=facts.typical_us("exposed_copy"),
                unit="us",
                ranks=facts.ranks,
            ),
            Evidence(what="devices idle behind such a copy", value=blocked_us, unit="us", ranks=facts.ranks),
        ),
        action=Action(
            setting="pin_memory() of the batches" if pinned else _SETTINGS.get(framework(facts), _DATALOADER),
            old=None if loader is None or pinned else "False",
            new=None if pinned else "True",
            how=_OWN_TYPE if pinned else _HOWS.get(framework(facts), _HOW),
            costs="Pinned host memory: batch size x workers x prefetch_factor batches of it at most.",
        ),
        confidence=Confidence.LOW if facts.few_steps else Confidence.HIGH if loader else Confidence.MEDIUM,
        obtained=Obtained.BOUNDED,
        ceiling=ceiling(facts.step_time_us, held_up),
    )


def blocking_copies(facts: JobFacts) -> tuple[SyncRow, ...]:
    """Syncs that such copies make; none where everything comes from pinned memory."""
    if not _pageable(facts):
        return ()
    return tuple(row for row in facts.syncs if row.operator in _COPYING)


def _pageable(facts: JobFacts) -> tuple[KernelRow, ...]:
    return tuple(row for row in facts.kernels if row.category == "copy" and "HtoD (Pageable" in row.name)


_DATALOADER: Final = "DataLoader(pin_memory=…)"
_SETTINGS: Final = {"transformers": "TrainingArguments(dataloader_pin_memory=…)"}
_HOW: Final = (
    "DataLoader(dataset, …, pin_memory=True)\nbatch = batch.to(device, non_blocking=True)\nTensors made otherwise: "
    "tensor.pin_memory() before the copy."
)
_HOWS: Final = {
    "transformers": "--dataloader_pin_memory True",
    "lightning": "DataLoader(dataset, …, pin_memory=True): Lightning copies with non_blocking=True by itself.",
    "accelerate": "DataLoader(dataset, …, pin_memory=True) and\n"
    "Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=True))",
}
_OWN_TYPE: Final = (
    "The DataLoader pins memory already, but not what it does not know: give a batch type of your own a method "
    "pin_memory() that pins its tensors and returns it. Tensors made after loading: tensor.pin_memory() before "
    ".to(device, non_blocking=True)."
)
