"""Changes of what sharded training does meanwhile: gathers handed over earlier, reductions nobody waits for at once."""

from __future__ import annotations

import numpy as np

from perfscope.analyzers.replay.engine import Op
from perfscope.analyzers.whatif.change import BadSetting, CannotReplay, Context, Setting, Uncertainty, flag
from perfscope.analyzers.whatif.host_pace import keep_host_pace
from perfscope.analyzers.whatif.relay import Stretch
from perfscope.analyzers.whatif.script import Line, Script
from perfscope.analyzers.whatif.sharding_traffic import SMALLEST

_MOST_AHEAD = 4


def _prefetch(script: Script, context: Context, name: str, value: str) -> Uncertainty:
    """Every gather is handed over where the one ``value`` before it was: while an earlier layer computes.

    The backward's first is not: FSDP does not know while the forward computes that the backward comes next.
    """
    ahead = int(value) if value.isdecimal() else 0
    if not 1 <= ahead <= _MOST_AHEAD:
        raise BadSetting(f"{name}={value}: write how many gathers earlier, 1 to {_MOST_AHEAD}")
    moved = False
    for stretch in _stretches(script):
        places = [place for place, line in enumerate(stretch.lines) if _hands_over(line, "all_gather")]
        # Each pass gathers every unit; where the backward gathers one less, the forward's last was kept for it.
        passes = (places[: len(places) // 2], places[len(places) // 2 :]) if len(places) % 2 == 0 else (places,)
        behind = {
            place: each[max(number - ahead, 0)]
            for each in passes for number, place in enumerate(each) if number
        }  # fmt: skip
        for place, target in behind.items():
            # Handed over with that one: as long after the rank came there as it.
            stretch.lines[place].lag_ns = stretch.lines[target].lag_ns
        stretch.move(behind)
        moved |= bool(behind)
    keep_host_pace(script, context)
    if not moved:
        raise CannotReplay(f"{name}: no gathers of parameters follow one another in a recorded step")
    return Uncertainty(less=0.30, more=0.10)


def _overlap_reductions(script: Script, context: Context, name: str, value: str) -> Uncertainty:
    """Reductions run beside the backward; only what follows the last of them waits for all."""
    if not flag(name, value):
        raise CannotReplay(f"{name}=false: what would wait for each reduction is not recorded")
    moved = False
    for stretch in _stretches(script):
        handed = [
            place for place, line in enumerate(stretch.lines) if _hands_over(line, "reduce_scatter", "all_reduce")
        ]
        if not handed:
            continue
        parts = {stretch.lines[place].part for place in handed}
        waits = [
            place for place, line in enumerate(stretch.lines)
            if line.op is Op.BLOCK and line.part in parts and place < handed[-1]
        ]  # fmt: skip
        stretch.move(dict.fromkeys(waits, handed[-1]))
        moved |= bool(waits)
    keep_host_pace(script, context)
    if not moved:
        raise CannotReplay(f"{name}: nothing waits for a reduction before the last of them is under way")
    return Uncertainty(less=0.30, more=0.05)


def _stretches(script: Script) -> list[Stretch]:
    """Every step of every rank."""
    return [
        Stretch(script, rank, step)
        for rank, lines in script.lines.items()
        for step in np.unique([line.step for line in lines if line.step is not None]).tolist()
    ]


def _hands_over(line: Line, *kinds: str) -> bool:
    part = line.part
    return (
        line.op is Op.ISSUE and part is not None and part.meeting.kind in kinds
        and (part.meeting.bytes or 0) >= SMALLEST
    )  # fmt: skip


SETTINGS = (
    Setting("fsdp.prefetch", "N", "hand every gather of parameters over N gathers earlier", _prefetch, 1),
    Setting("zero.overlap_comm", "true", "reduce gradients beside the backward", _overlap_reductions, 1),
)
