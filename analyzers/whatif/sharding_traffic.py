"""What a recording shows of sharding: gathers of parameters, reductions of gradients, and the ZeRO stage they make."""

from __future__ import annotations

from typing import Final

import numpy as np

from perfscope.analyzers.collectives.communication import DTYPE_BYTES
from perfscope.analyzers.whatif.change import Context
from perfscope.analyzers.whatif.script import Part, Script

SMALLEST: Final = 4096
"""Collectives of fewer bytes move no parameters and no gradients: losses, norms, counters."""
_TWICE: Final = 1.5
"""Parameters gathered over the model's from which they are gathered for the forward and again for the backward."""

Steps = dict[tuple[int, int], list[Part]]
"""(rank, step) -> its collectives of one sort in the order of their hand-over."""


def gathers_by_step(script: Script) -> Steps:
    """Gathers of parameters."""
    return _by_step(script, "all_gather", group=None)


def reductions_by_step(script: Script) -> Steps:
    """Reductions of gradients: reduce-scatters, else all-reduces, in the group that moves most of them; empty where
    none is recorded with its size.
    """
    for kind in ("reduce_scatter", "all_reduce"):
        moved: dict[int, int] = {}
        for meeting in script.meetings():
            if meeting.kind == kind and (meeting.bytes or 0) >= SMALLEST:
                moved[meeting.group] = moved.get(meeting.group, 0) + (meeting.bytes or 0)
        if moved:
            return _by_step(script, kind, max(moved, key=lambda group: moved[group]))
    return {}


def _by_step(script: Script, kind: str, group: int | None) -> Steps:
    found: Steps = {}
    for rank, _, line in script.of_kind(kind):
        part = line.part
        if part is None or line.step is None or (part.meeting.bytes or 0) < SMALLEST:
            continue
        if group is None or part.meeting.group == group:
            found.setdefault((rank, line.step), []).append(part)
    return found


def bytes_per_step(steps: Steps) -> float:
    """Bytes moved in a step of a rank: the median one."""
    return float(np.median([sum(part.meeting.bytes or 0 for part in parts) for parts in steps.values()]))


def parameter_bytes(context: Context) -> float | None:
    """Bytes of the whole model, where the run told them: its shards' on all ranks."""
    told = [run.model.parameter_bytes for run in context.runs.values() if run.model is not None]
    return float(sum(told)) if told and len(told) == len(context.result.partials) else None


def gathered_twice(context: Context, gathers: Steps, reductions: Steps) -> bool:
    """Are parameters gathered for the forward and again for the backward (stage 3), not once a step?"""
    held = parameter_bytes(context)
    if held:
        return bytes_per_step(gathers) >= _TWICE * held
    # Each gradient is as many elements as its parameter.
    return not reductions or _elements_per_step(gathers) >= _TWICE * _elements_per_step(reductions)


def _elements_per_step(steps: Steps) -> float:
    meeting = next(iter(steps.values()))[0].meeting
    return bytes_per_step(steps) / DTYPE_BYTES.get(meeting.dtype or "", 1)


def recorded_stage(context: Context, gathers: Steps, reductions: Steps) -> int:
    """The ZeRO stage that the job runs at (``SHARD_GRAD_OP`` is 2, ``FULL_SHARD`` 3)."""
    told = {name for run in context.runs.values() for name in run.strategies}
    if not gathers:
        return 1 if "zero1" in told else 0
    if gathered_twice(context, gathers, reductions):
        return 3
    kinds = {part.meeting.kind for parts in reductions.values() for part in parts}
    # DeepSpeed's stage 2 may reduce whole buckets, too.
    return 1 if "zero1" in told or (kinds == {"all_reduce"} and "zero2" not in told) else 2
