"""Changes of DistributedDataParallel: bucket size, ``no_sync`` while gradients accumulate, half the bytes on the wire.

Gradients become ready while the backward goes on. Between the moments at which the recorded buckets were full, bytes
are taken to become ready evenly, or parameter by parameter where the run recorded their sizes; new buckets are filled
from that as torch fills them (``compute_bucket_assignment_by_size`` in ``reducer.cpp``: a bucket is full once it holds
its limit; the first one's is 1 MiB at most) and take what the fitted cost model says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.analyzers.intervals import Intervals
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
from perfscope.analyzers.whatif.script import NEVER, Line, Meeting, Part, Script
from perfscope.trace import Float64

MIB: Final = 1 << 20
FIRST_BUCKET_BYTES: Final = 1 * MIB
"""torch.distributed's ``_DEFAULT_FIRST_BUCKET_BYTES``."""
_SMALLEST: Final = 4096
"""All-reduces of fewer bytes are not gradients: losses, norms, counters."""
_BACKWARD_SHARE: Final = 2 / 3
"""Of forward and backward: two matrix products for each one of the forward."""
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
    sizes = {tuple(part.meeting.bytes for part in one.parts) for one in rounds}
    if len({sum(size or 0 for size in bucket) for bucket in sizes}) > 1:
        raise CannotReplay(f"{name}: gradients are reduced unevenly often in the recorded steps; try ddp.no_sync first")
    total = sum(size or 0 for size in next(iter(sizes)))
    parameters = _parameter_bytes(context, total)
    ends = _bucket_ends(float(total), cap * MIB, parameters)
    meetings: dict[tuple[int, int], Meeting] = {}
    first = rounds[0]
    alone = _alone(context, first.parts[0].meeting.group)
    for one in rounds:
        _rebucket(script, context, one, ends, meetings, alone)
    # A wait may have ended in the next step only.
    script.without({part for one in rounds for part in one.parts})
    new = (meeting.bytes or 0 for (step, _), meeting in meetings.items() if step == first.step)
    transfers = _TRANSFER_ERROR * alone * sum(transfer_of(context, first.parts[0], size) for size in new)
    if len(first.parts) == 1:
        return Uncertainty(less=0.50, more=0.25, either_ns=transfers)  # when its gradients became ready did not show
    share = 0.25 if parameters is None else 0.15
    return Uncertainty(less=share, more=share, either_ns=transfers)


def _alone(context: Context, group: int) -> float:
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


def _parameter_bytes(context: Context, total: int) -> list[int] | None:
    """Bytes of each trainable parameter in the order of its gradient; None where the run did not record them, or where
    they are not what is reduced.
    """
    for run in context.runs.values():
        if run.model is not None and run.model.trainable_sizes:
            sizes = list(reversed(run.model.trainable_sizes))
            if abs(sum(sizes) - total) <= 0.01 * total:
                return sizes
    return None


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
    microbatches = _microbatches(context, one)
    added: list[tuple[float, Line]] = []
    begun = 0.0
    parts = []
    ready_at = _ready_at(np.array(ends), total, ready, microbatches).tolist()
    for number, (end, at) in enumerate(zip(ends, ready_at, strict=True)):
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


def _bucket_ends(total: float, cap: float, parameters: list[int] | None) -> list[float]:
    """Bytes reduced once each bucket is; the last is ``total``."""
    ends: list[float] = []
    held = passed = 0.0
    if parameters is None:
        limit = min(cap, FIRST_BUCKET_BYTES)
        while passed < total:
            passed = min(passed + limit, total)
            ends.append(passed)
            limit = cap
        return ends
    scale = total / sum(parameters)
    for size in parameters:
        held += size * scale
        passed += size * scale
        if held >= (cap if ends else min(cap, FIRST_BUCKET_BYTES)):
            ends.append(passed)
            held = 0.0
    if held:
        ends.append(total)
    return ends


def _ready_at(wanted: Float64, total: Float64, ready: Float64, microbatches: int) -> Float64:
    """Own progress at which each of ``wanted`` bytes of gradients are there, given when each recorded bucket was full.

    Before the first bucket was full, bytes came as fast as in the second. One bucket alone was full at the end of the
    last micro-batch's backward, which takes twice as long as its forward.
    """
    if len(total) == 1:
        return np.asarray(ready[0] * (1 - _BACKWARD_SHARE / max(microbatches, 1) * (1 - wanted / total[0])))
    rate = (ready[1] - ready[0]) / max(total[1] - total[0], 1.0)
    begin = max(0.0, float(ready[0] - rate * total[0]))
    return np.interp(wanted, np.concatenate(([0.0], total)), np.concatenate(([begin], ready)))


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
    halved = assumed = False
    for one in gradient_rounds(script):
        for part in one.parts:
            meeting = part.meeting
            if meeting.dtype in _HALVED and meeting.bytes is not None:
                halved = True
                assumed |= context.model_of(meeting.group, meeting.kind) is None
                part.transfer_ns = transfer_of(context, part, meeting.bytes // 2)
    if not halved:
        raise CannotReplay(f"{name}: gradients travel in 16 bits or fewer already, or their type is not recorded")
    # On CPUs the cores that train cast and add up, and halves are slow there: gloo adds them one by one.
    on_devices = any(partial.has_device_work for partial in context.result.partials.values())
    return Uncertainty(less=0.20 if on_devices else 0.60, more=0.30 if assumed else 0.10)


SETTINGS = (
    Setting("ddp.no_sync", "true", "reduce gradients after the last micro-batch only", _no_sync, 1),
    Setting("ddp.bucket_cap_mb", "MIB", "DistributedDataParallel(bucket_cap_mb=…)", _bucket_cap, 1),
    Setting("ddp.comm_dtype", "bf16|fp16", "gradients in 16 bits on the wire", _comm_dtype, 1),
)
