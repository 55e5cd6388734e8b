"""Changes of DistributedDataParallel: bucket size, ``no_sync`` while gradients accumulate, half the bytes on the wire.

Gradients become ready while the backward goes on. Between the moments at which the recorded buckets were full they are
taken to do so evenly: parameter by parameter where their sizes are recorded or show in the buckets. New buckets are
filled from that as torch fills them (``bucketing``) and take what the fitted cost model says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.analyzers.intervals import Intervals
from perfscope.analyzers.replay.engine import Op
from perfscope.analyzers.timeline import Row
from perfscope.analyzers.whatif.bucketing import MIB, bucket_ends, limits, parameter_bytes, ready_at
from perfscope.analyzers.whatif.change import (
    BadSetting,
    CannotReplay,
    Context,
    Setting,
    Uncertainty,
    flag,
)  # fmt: skip
from perfscope.analyzers.whatif.host_pace import keep_host_pace
from perfscope.analyzers.whatif.network import transfer_of
from perfscope.analyzers.whatif.relay import Stretch
from perfscope.analyzers.whatif.script import NEVER, Line, Meeting, Part, Script
from perfscope.trace import Float64

_SMALLEST: Final = 4096
"""All-reduces of fewer bytes are not gradients: losses, norms, counters."""
_BACKWARD_SHARE: Final = 2 / 3
"""Of forward and backward, of which the last micro-batch's is the last: two products for each of the forward."""
_TRANSFER_ERROR: Final = 0.10
"""Share of a bucket's transfer that the cost model may miss: sizes between and beyond the recorded ones."""
_HALVED: Final = {"float32": "bfloat16", "float64": "float32"}


@dataclass(frozen=True, eq=False)
class Round:
    """One reduction of all gradients on one rank: its buckets in order of hand-over, and what lies around them."""

    rank: int
    step: int
    parts: tuple[Part, ...]


def gradient_rounds(script: Script) -> list[Round]:
    """Every step's gradient reductions of every rank. Raises CannotReplay where there are none."""
    found = []
    group = _gradient_group(script)
    for rank, lines in script.lines.items():
        by_step: dict[int, list[Part]] = {}
        for line in lines:
            part = line.part
            if line.op is Op.ISSUE and part is not None and line.step is not None and _is_gradient(part.meeting, group):
                by_step.setdefault(line.step, []).append(part)
        found += [Round(rank, step, tuple(parts)) for step, parts in by_step.items()]
    return found


def _is_gradient(meeting: Meeting, group: int) -> bool:
    return meeting.kind == "all_reduce" and meeting.group == group and (meeting.bytes or 0) >= _SMALLEST


def _gradient_group(script: Script) -> int:
    """The group whose all-reduces move most bytes."""
    total: dict[int, int] = {}
    for meeting in script.meetings():
        if meeting.kind == "all_reduce" and meeting.bytes is not None and meeting.bytes >= _SMALLEST:
            total[meeting.group] = total.get(meeting.group, 0) + meeting.bytes
    if not total:
        raise CannotReplay("no all-reduce of gradients is recorded with its size: record with shapes, under DDP")
    return max(total, key=lambda group: total[group])


def _bucket_cap(script: Script, context: Context, name: str, value: str) -> Uncertainty:
    try:
        cap = float(value.removesuffix("MB").removesuffix("MiB"))
    except ValueError:
        cap = 0.0
    if cap <= 0:
        raise BadSetting(f"{name}={value}: write MiB above 0, such as 50")
    rounds = gradient_rounds(script)
    if any(part.meeting.floor_ns != NEVER for one in rounds for part in one.parts):
        raise CannotReplay(f"{name}: when other ranks would come to new buckets is not recorded; record all ranks")
    sizes = {tuple(part.meeting.bytes or 0 for part in one.parts) for one in rounds}
    if len({sum(buckets) for buckets in sizes}) > 1:
        raise CannotReplay(f"{name}: gradients are reduced unevenly often in the recorded steps; try ddp.no_sync first")
    buckets = min(sizes)
    parameters = parameter_bytes(context, buckets)
    ends = bucket_ends(
        float(sum(buckets)), *limits(context.runs, cap * MIB), None if parameters is None else parameters[0]
    )
    meetings: dict[tuple[int, int], Meeting] = {}
    first = rounds[0]
    alone = alone_share(context, first.parts[0].meeting.group)
    for one in rounds:
        _rebucket(script, context, one, ends, meetings, alone)
    # A wait may have ended in the next step only.
    script.without({part for one in rounds for part in one.parts})
    new = (meeting.bytes or 0 for (step, _), meeting in meetings.items() if step == first.step)
    transfers = _TRANSFER_ERROR * alone * sum(transfer_of(context, first.parts[0], size) for size in new)
    if len(first.parts) == 1:
        return Uncertainty(less=0.50, more=0.25, either_ns=transfers)  # when its gradients became ready did not show
    share = 0.15 if parameters is not None and parameters[1] else 0.25
    return Uncertainty(less=share, more=share, either_ns=transfers)


def alone_share(context: Context, group: int) -> float:
    """Share of its transfer that a gradient bucket would have taken, had it had the link for itself.

    Gloo's two threads reduce two buckets at once, over one link. New buckets are played one after the other, so each
    takes its share only. Example: two buckets both sent from 0 to 100 ms: alone each takes 50, the share is 0.5.
    Where one stream carries one after the other (NCCL) it is 1.
    """
    matched = context.result.matched_before
    known = matched.instances
    kind = known.kinds.index("all_reduce")
    gradients = (known.kind == kind) & (known.group == group) & (known.bytes >= _SMALLEST)
    taken = shared = 0
    for rank, partial in context.result.partials.items():
        lines = np.flatnonzero((matched.rank == rank) & gradients[matched.instance])
        ends = partial.collectives.end_ns[matched.index[lines]] + context.result.clocks.offset_of(rank)
        begins = np.minimum(matched.last_arrival_ns[lines], ends)
        taken += int((ends - begins).sum())
        shared += Intervals.of(begins, ends).measure()
    return shared / taken if taken else 1.0


def _rebucket(
    script: Script, context: Context, one: Round, ends: list[float], meetings: dict[tuple[int, int], Meeting],
    alone: float,
) -> None:  # fmt: skip
    """Replace the buckets of one round by new ones, given the bytes reduced once each of them is."""
    stretch = Stretch(script, one.rank, one.step)
    old = set(one.parts)
    issues = [place for place, line in enumerate(stretch.lines) if line.op is Op.ISSUE and line.part in old]
    blocks = [place for place, line in enumerate(stretch.lines) if line.op is Op.BLOCK and line.part in old]
    ready = stretch.progress_ns[issues]
    total = np.cumsum([part.meeting.bytes or 0 for part in one.parts]).astype(np.float64)
    model = one.parts[0]
    backward = _BACKWARD_SHARE / max(_microbatches(context, one), 1)
    added: list[tuple[float, Line]] = []
    begun = 0.0
    parts = []
    moments = ready_at(np.array(ends), total, ready, backward).tolist()
    for number, (end, at) in enumerate(zip(ends, moments, strict=True)):
        meeting = meetings.setdefault((one.step, number), _like(model.meeting, round(end - begun)))
        transfer = alone * transfer_of(context, model, meeting.bytes or 0)
        part = Part(one.rank, meeting, model.lane, model.gap_ns, transfer)
        added.append((at, Line(Op.ISSUE, np.zeros(len(Row)), part=part, step=one.step)))
        parts.append(part)
        begun = end
    waits_at = float(stretch.progress_ns[blocks[-1]]) if blocks else _unseen_wait(stretch, one, ready)
    waits_at = max(waits_at, added[-1][0])
    added += [(waits_at, Line(Op.BLOCK, np.zeros(len(Row)), part=part, step=one.step)) for part in parts]
    stretch.replace(frozenset(old), added)


def _unseen_wait(stretch: Stretch, one: Round, ready: Float64) -> float:
    """Own progress at which the optimizer waits for the buckets where no wait was seen: it came to that after they had
    ended, or what it waited counts as the rank's own time. Either way they had ended by then.
    """
    ended = max(float(at) + part.gap_ns + part.transfer_ns for at, part in zip(ready, one.parts, strict=True))
    return min(ended, float(stretch.progress_ns[-1]))


def _like(meeting: Meeting, size: int) -> Meeting:
    return Meeting(meeting.kind, meeting.group, size, meeting.size, meeting.step, meeting.dtype, meeting.floor_ns)


def _no_sync(script: Script, context: Context, name: str, value: str) -> Uncertainty:
    """Reduce gradients once a step, after the last micro-batch's backward."""
    if not flag(name, value):
        raise CannotReplay(f"{name}=false: how long the reductions would take that were not made is not recorded")
    dropped: set[Part] = set()
    for one in gradient_rounds(script):
        microbatches = _microbatches(context, one)
        sizes = [part.meeting.bytes for part in one.parts]
        if not microbatches:
            raise CannotReplay(f"{name}: no forward pass of DistributedDataParallel is recorded")
        once = len(sizes) // microbatches
        if microbatches > 1 and sizes == sizes[:once] * microbatches:
            dropped.update(one.parts[:-once])
    if not dropped:
        raise CannotReplay(f"{name}: gradients are reduced once a step already")
    script.without(dropped)
    return Uncertainty(less=0.15, more=0.05)


def _microbatches(context: Context, one: Round) -> int:
    """Forward passes of the DDP module in the step of a round: as often as its gradients become ready."""
    partial = context.result.partials[one.rank]
    return int(partial.forwards[partial.steps.indices_of(np.array([one.step]))[0]])


def _comm_dtype(script: Script, context: Context, name: str, value: str) -> Uncertainty:
    """bf16 or fp16 on the wire (``bf16_compress_hook``): half the bytes of fp32 gradients."""
    if value not in ("bf16", "fp16"):
        raise BadSetting(f"{name}={value}: write bf16 or fp16")
    halved = False
    for one in gradient_rounds(script):
        for part in one.parts:
            meeting = part.meeting
            if meeting.dtype in _HALVED and meeting.bytes is not None:
                halved = True
                part.transfer_ns = transfer_of(context, part, meeting.bytes // 2)
    if not halved:
        raise CannotReplay(f"{name}: gradients travel in 16 bits or fewer already, or their type is not recorded")
    keep_host_pace(script, context)
    # On CPUs the cores that train cast and add up, and halves are slow there: gloo adds them one by one.
    on_devices = any(partial.has_device_work for partial in context.result.partials.values())
    return Uncertainty(less=0.20 if on_devices else 0.60, more=0.10)


SETTINGS = (
    Setting("ddp.no_sync", "true", "reduce gradients after the last micro-batch only", _no_sync, 1),
    Setting("ddp.bucket_cap_mb", "MIB", "DistributedDataParallel(bucket_cap_mb=…)", _bucket_cap, 1),
    Setting("ddp.comm_dtype", "bf16|fp16", "gradients in 16 bits on the wire", _comm_dtype, 1),
)
