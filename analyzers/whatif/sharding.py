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

SMALLEST: Final = 4096
"""Collectives of fewer bytes move no parameters."""
_DDP_BUCKET: Final = 25 << 20
"""Default ``bucket_cap_mb`` of DistributedDataParallel, in bytes."""


def _stage(script: Script, context: Context, name: str, value: str) -> Uncertainty:
    """From stage 3 to a lower one: parameters are gathered once, after the optimizer, or never."""
    if value not in ("0", "1", "2", "3"):
        raise BadSetting(f"{name}={value}: write 0, 1, 2 or 3")
    gathers = [part for _, _, line in script.of_kind("all_gather") if (part := line.part) is not None]
    gathers = [part for part in gathers if (part.meeting.bytes or 0) >= SMALLEST]
    if not gathers:
        raise CannotReplay(f"{name}: no gather of parameters is recorded, so the job does not shard them")
    per_step = _gathered_bytes(gathers)
    held = _parameter_bytes(context)
    if held is not None and per_step < 1.5 * held:
        raise CannotReplay(f"{name}: parameters are gathered once a step only: the job is at stage 1 or 2 already")
    if value == "3":
        return Uncertainty(0.0, 0.0)
    script.without(set(gathers))
    if value == "0":
        _reduce_all(script, context)
    else:
        # Forward and backward each gathered every parameter: once is half of it.
        _gather_once(script, context, gathers, per_step / 2)
    if value == "1":
        _reduce_after_backward(script)
    return Uncertainty(less=0.30, more=0.15)


def _gathered_bytes(gathers: list[Part]) -> float:
    """Bytes gathered per step, by the rank that gathered most."""
    by_rank: dict[tuple[int, int | None], int] = {}
    for part in gathers:
        key = part.rank, part.meeting.step
        by_rank[key] = by_rank.get(key, 0) + (part.meeting.bytes or 0)
    return float(np.median(list(by_rank.values())))


def _parameter_bytes(context: Context) -> float | None:
    """Bytes of the whole model, where the run told them: its shards' on all ranks."""
    told = [run.model.parameter_bytes for run in context.runs.values() if run.model is not None]
    return float(sum(told)) if told and len(told) == len(context.result.partials) else None


def _gather_once(script: Script, context: Context, gathers: list[Part], size: float) -> None:
    """One gather of all parameters at the end of every step, in pieces as long as the recorded ones.

    The next step's first own work waits for it.
    """
    sizes = [part.meeting.bytes or 0 for part in gathers]
    pieces = max(1, round(size / max(float(np.median(sizes)), 1.0)))
    meetings: dict[tuple[int, int], Meeting] = {}
    for rank in script.lines:
        mine = next((part for part in gathers if part.rank == rank), None)
        if mine is None:
            continue
        for step in sorted({line.step for line in script.lines[rank] if line.step is not None}):
            stretch = Stretch(script, rank, step)
            if not stretch.lines:
                continue
            at = float(stretch.progress_ns[-1])
            added: list[tuple[float, Line]] = []
            for piece in range(pieces):
                meeting = meetings.setdefault((step, piece), _like(mine.meeting, round(size / pieces), step))
                part = Part(rank, meeting, mine.lane, 0.0, transfer_of(context, mine, round(size / pieces)))
                added.append((at, Line(Op.ISSUE, np.zeros(len(Row)), part=part, step=step)))
            added += [(at, Line(Op.BLOCK, np.zeros(len(Row)), part=line.part, step=step)) for _, line in added]
            stretch.replace(frozenset(), added)


def _reduce_after_backward(script: Script) -> None:
    """Stage 1 keeps whole gradients and reduces them once the last of them is there."""
    _move_reductions(script, together=math.inf)


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


def _reduces(part: Part) -> bool:
    return part.meeting.kind == "reduce_scatter" and (part.meeting.bytes or 0) >= SMALLEST


def _like(meeting: Meeting, size: int, step: int) -> Meeting:
    return Meeting(meeting.kind, meeting.group, size, meeting.size, step, meeting.dtype)


def _reduce_all(script: Script, context: Context) -> None:
    """Reduce-scatters become all-reduces, which move twice the bytes, in DistributedDataParallel's default buckets.

    Gloo carries a reduce-scatter out as an all-reduce: there it cost that already.
    """
    times = 1 if any(run.backend == "gloo" for run in context.runs.values()) else 2
    for _, _, line in script.of_kind("reduce_scatter"):
        part = line.part
        if part is not None and _reduces(part):
            part.transfer_ns = transfer_of(context, part, times * (part.meeting.bytes or 0))
    _move_reductions(script, together=_DDP_BUCKET)


def _reshard(script: Script, context: Context, name: str, value: str) -> Uncertainty:
    """Parameters gathered for the forward are kept for the backward (``SHARD_GRAD_OP``)."""
    if flag(name, value):
        raise CannotReplay(f"{name}=true: how long the gathers would take that were not made is not recorded")
    dropped: set[Part] = set()
    for parts in gathers_by_step(script).values():
        # The backward gathers what the forward did, but for the last unit's, which some keep: it comes second.
        dropped.update(parts[-(len(parts) // 2) :])
    held = _parameter_bytes(context)
    gathered = [part for parts in gathers_by_step(script).values() for part in parts]
    if not dropped or (held is not None and _gathered_bytes(gathered) < 1.5 * held):
        raise CannotReplay(f"{name}: parameters are not gathered twice a step")
    script.without(dropped)
    return Uncertainty(less=0.20, more=0.10)


def gathers_by_step(script: Script) -> dict[tuple[int, int], list[Part]]:
    """(rank, step) -> its gathers of parameters in the order of their hand-over."""
    found: dict[tuple[int, int], list[Part]] = {}
    for rank, _, line in script.of_kind("all_gather"):
        if line.part is not None and line.step is not None and (line.part.meeting.bytes or 0) >= SMALLEST:
            found.setdefault((rank, line.step), []).append(line.part)
    return found


SETTINGS = (
    Setting("zero.stage", "0|1|2", "shard less: from ZeRO-3 or FULL_SHARD", _stage, 1),
    Setting("fsdp.reshard_after_forward", "false", "keep gathered parameters for the backward", _reshard, 1),
)
