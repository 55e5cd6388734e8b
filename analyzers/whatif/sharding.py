"""Changes of sharding: the ZeRO stage, which is FSDP's sharding strategy under another name.

What each stage sends per step for P bytes of parameters (Rajbhandari et al., "ZeRO", SC'20, section 7): stage 0
all-reduces the gradients; stages 1 and 2 reduce-scatter them and all-gather the updated parameters once; stage 3
gathers parameters before each layer's forward and again before its backward, and reduce-scatters gradients.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from perfscope.analyzers.replay.engine import Op
from perfscope.analyzers.timeline import Row
from perfscope.analyzers.whatif.change import (
    BadSetting,
    CannotReplay,
    Context,
    Setting,
    Uncertainty,
    flag,
)  # fmt: skip
from perfscope.analyzers.whatif.network import transfer_of
from perfscope.analyzers.whatif.relay import Stretch
from perfscope.analyzers.whatif.script import Line, Meeting, Part, Script
from perfscope.analyzers.whatif.sharding_on import shard
from perfscope.analyzers.whatif.sharding_plan import deepspeed_bucket
from perfscope.analyzers.whatif.sharding_traffic import (
    SMALLEST,
    Steps,
    bytes_per_step,
    gathered_twice,
    gathers_by_step,
    recorded_stage,
    reductions_by_step,
)
from perfscope.analyzers.whatif.sharding_units import compute_more, optimizer_ns, phases

_DDP_BUCKET: Final = 25 << 20
"""Default ``bucket_cap_mb`` of DistributedDataParallel, in bytes."""
_FEW: Final = 3
"""Fewer reductions a step leave open how those of other sizes would lie."""


def _stage(script: Script, context: Context, name: str, value: str) -> Uncertainty:
    """From stage 3 to a lower one: parameters are gathered once, after the optimizer, or never. Up: ``sharding_on``."""
    if value not in ("0", "1", "2", "3"):
        raise BadSetting(f"{name}={value}: write 0, 1, 2 or 3")
    gathers, reductions = gathers_by_step(script), reductions_by_step(script)
    stage, new = recorded_stage(context, gathers, reductions), int(value)
    if new == stage:
        return Uncertainty(0.0, 0.0)
    if new > stage:
        return shard(script, context, name, (stage, new), gathers, reductions)
    if stage < 3:
        raise CannotReplay(
            f"{name}: parameters are gathered once a step only: the job is at stage 1 or 2, and what is reduced "
            "there tells little of lower ones"
        )
    every = [part for parts in gathers.values() for part in parts]
    script.without(set(every))
    missed = 0.0
    if new == 0:
        missed = _grow_optimizer(script, context, reductions) / 2
    else:
        # Forward and backward each gathered every parameter: once is half of it.
        _gather_once(script, context, every, bytes_per_step(gathers) / 2)
    if new < 2:
        _reduce_all(script, context)
        # Stage 1 of DeepSpeed keeps whole gradients and reduces them once the last of them is there.
        _move_reductions(script, together=math.inf if new == 1 and not _is_fsdp(context) else _DDP_BUCKET)
    if new == 0 and max(map(len, reductions.values()), default=0) < _FEW:
        # So few show the end of the backward, but not when smaller buckets would have been full.
        missed += max(part.transfer_ns for parts in reductions.values() for part in parts)
    # On CPUs what is sent beside the backward then takes cores from it.
    on_devices = any(partial.has_device_work for partial in context.result.partials.values())
    return Uncertainty(less=0.30 if on_devices else 0.45, more=0.15, either_ns=missed)


def _gather_once(script: Script, context: Context, gathers: list[Part], size: float) -> None:
    """One gather of all parameters at the end of every step; the next one's first own work waits for it.

    FSDP gathers unit by unit, as recorded; others buckets as large as DeepSpeed's are by default.
    """
    piece = deepspeed_bucket(context, gathers[0].meeting.dtype, "allgather_bucket_size")
    if _is_fsdp(context):
        piece = float(np.median([part.meeting.bytes or 0 for part in gathers]))
    pieces = max(1, round(size / piece))
    meetings: dict[tuple[int, int], Meeting] = {}
    for rank in script.lines:
        mine = next((part for part in gathers if part.rank == rank), None)
        if mine is None:
            continue
        for step in sorted({line.step for line in script.lines[rank] if line.step is not None}):
            stretch = Stretch(script, rank, step, whole=True)
            at = float(stretch.progress_ns[-1]) - 1  # right before the next step begins
            added: list[tuple[float, Line]] = []
            for piece in range(pieces):
                meeting = meetings.setdefault((step, piece), _like(mine.meeting, round(size / pieces), step))
                part = Part(rank, meeting, mine.lane, 0.0, transfer_of(context, mine, round(size / pieces)))
                added.append((at, Line(Op.ISSUE, np.zeros(len(Row)), part=part, step=step)))
            added += [(at, Line(Op.BLOCK, np.zeros(len(Row)), part=line.part, step=step)) for _, line in added]
            stretch.replace(frozenset(), added)


def _is_fsdp(context: Context) -> bool:
    return any("fsdp" in partial.strategies for partial in context.result.partials.values())


def _move_reductions(script: Script, together: float) -> None:
    """Reductions are handed over ``together`` bytes at a time, and nobody waits before all of them are."""
    for rank in script.lines:
        for step in sorted({line.step for line in script.lines[rank] if line.step is not None}):
            stretch = Stretch(script, rank, step)
            mine = {part for line in stretch.lines if line.op is Op.ISSUE and (part := line.part) and _reduces(part)}
            if not mine:
                continue
            at = [float(at) for at in stretch.progress_ns]
            issues = [place for place, line in enumerate(stretch.lines) if line.op is Op.ISSUE and line.part in mine]
            blocks = [place for place, line in enumerate(stretch.lines) if line.op is Op.BLOCK and line.part in mine]
            last = at[issues[-1]]
            moved: list[tuple[float, Line]] = []
            waiting: list[Line] = []
            held = 0
            for place in issues:
                line = stretch.lines[place]
                waiting.append(line)
                held += (line.part.meeting.bytes or 0) if line.part is not None else 0
                if held >= together or place == issues[-1]:
                    moved += [(at[place], each) for each in waiting]
                    waiting, held = [], 0
            moved += [(max(at[place], last), stretch.lines[place]) for place in blocks]
            stretch.replace(frozenset(mine), moved)


def _grow_optimizer(script: Script, context: Context, reductions: Steps) -> float:
    """Each rank updates all parameters, not its share of them; returns by how much that lengthens a step, ns."""
    total = 0.0
    for (rank, step), parts in reductions.items():
        when = phases(context, Stretch(script, rank, step, whole=True), rank, step, parts)
        grown = optimizer_ns(context, rank, step) * (parts[0].meeting.size - 1)
        compute_more(script.lines[rank], step, when, grown)
        total += grown
    return total / max(len(reductions), 1)


def _reduces(part: Part) -> bool:
    return part.meeting.kind == "reduce_scatter" and (part.meeting.bytes or 0) >= SMALLEST


def _like(meeting: Meeting, size: int, step: int) -> Meeting:
    return Meeting(meeting.kind, meeting.group, size, meeting.size, step, meeting.dtype)


def _reduce_all(script: Script, context: Context) -> None:
    """Reduce-scatters become all-reduces, which move twice the bytes. Gloo carries a reduce-scatter out as an
    all-reduce: there it cost that already.
    """
    times = 1 if any(run.backend == "gloo" for run in context.runs.values()) else 2
    for _, _, line in script.of_kind("reduce_scatter"):
        part = line.part
        if part is not None and _reduces(part):
            part.transfer_ns = transfer_of(context, part, times * (part.meeting.bytes or 0))


def _reshard(script: Script, context: Context, name: str, value: str) -> Uncertainty:
    """Parameters gathered for the forward are kept for the backward (``SHARD_GRAD_OP``)."""
    if flag(name, value):
        raise CannotReplay(f"{name}=true: how long the gathers would take that were not made is not recorded")
    dropped: set[Part] = set()
    gathers = gathers_by_step(script)
    for parts in gathers.values():
        # The backward gathers what the forward did, but for the last unit's, which some keep: it comes second.
        dropped.update(parts[-(len(parts) // 2) :])
    if not dropped or not gathered_twice(context, gathers, reductions_by_step(script)):
        raise CannotReplay(f"{name}: parameters are not gathered twice a step")
    script.without(dropped)
    return Uncertainty(less=0.20, more=0.10)


SETTINGS = (
    Setting("zero.stage", "0|1|2", "shard parameters, gradients and optimizer more, or less", _stage, 1),
    Setting("fsdp.reshard_after_forward", "false", "keep gathered parameters for the backward", _reshard, 1),
)
