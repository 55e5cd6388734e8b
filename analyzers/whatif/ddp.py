"""Settings of DistributedDataParallel: bucket size, ``no_sync``, accumulation, 16-bit gradients on the wire.

Gradients become ready while the backward goes on: evenly between the moments at which the recorded buckets were full,
or parameter by parameter where their sizes are recorded or follow from the buckets. New buckets are filled from that as
torch fills them (``bucketing``) and take what the fitted cost model gives.

``batch.accumulation`` is replayed as k recorded steps of which only the last reduces its gradients and steps the
optimizer. The step time is the mean of the k: that of one recorded batch, so it compares with the measured one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import median
from typing import Final

import numpy as np

from perfscope.analyzers.rank.collectives.collectives import SMALLEST
from perfscope.analyzers.rank.collectives.communication import DTYPE_BYTES
from perfscope.analyzers.rank.host_lane import HostTime
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.replay.engine import OpKind
from perfscope.analyzers.whatif.bucketing import (
    MIB,
    bucket_bytes,
    bucket_ends,
    fewer_by_limit,
    limited_share,
    limits,
    parameter_bytes,
    ready_at,
)
from perfscope.analyzers.whatif.change import (
    FULL,
    MEMORY_GBPS,
    REDUCED_ONCE,
    BadSetting,
    CannotReplay,
    Context,
    Setting,
    Uncertainty,
    flag,
    keep_host_pace,
    number,
    whole_number,
)
from perfscope.analyzers.whatif.schedules.editable import EditableSchedules
from perfscope.analyzers.whatif.schedules.extra_work import is_as_recorded, leave_out
from perfscope.analyzers.whatif.schedules.ops import Collective, RankOp, ScheduleOp, left_out
from perfscope.analyzers.whatif.schedules.steps import StepOps, but_last
from perfscope.frozen import dataclass
from perfscope.grouping import grouped
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import NEVER, Float64, Int64

BACKWARD_SHARE: Final = 2 / 3
"""Of forward and backward: two matrix products for each of the forward."""
_LATE: Final = 0.02
"""Share of the step for which ranks that are not recorded may delay reductions, and count as if they did not."""
_HALF: Final = 2
"""Bytes of an element in 16 bits."""
_CASTS_ERROR: Final = 1.0
"""Share by which they may be longer or shorter: devices have half to three times that, compilers fuse them."""
_HOOK: Final = 0.6
"""What the three operators of the hook take a host, over what issuing a reduction does: some 10 µs each, and 50."""
_HALVED: Final = {"float32": "bfloat16", "float64": "float32"}
_OF_OPTIMIZER: Final = [TimeCategory.COMPUTE, TimeCategory.LAUNCH]
_AFTER_OPTIMIZER: Final = [TimeCategory.HOST, TimeCategory.SYNC]
"""What scripts do once per optimizer step, not per batch, as far as is known: log, read the loss, save."""
_OF_HOST_AFTER: Final = [HostTime.COLLECTION, HostTime.OTHER, HostTime.PAUSES]
"""The same on a host beside its device."""


@dataclass(frozen=True, eq=False)
class Round:
    """One reduction of all gradients on one rank: its buckets in the order of issue. ``backward`` numbers those of a
    step where each is told apart.
    """

    rank: int
    step: int
    buckets: tuple[RankOp, ...]
    backward: int = 0


def gradient_rounds(schedules: EditableSchedules) -> list[Round]:
    """Every step's gradient reductions of every rank. Raises CannotReplay where there are none."""
    rounds = schedules.of_gradients("all_reduce")
    if not rounds:
        raise CannotReplay("no all-reduce of gradients is recorded with its size: record with shapes, under DDP")
    return [Round(rank, step, tuple(buckets)) for (rank, step), buckets in rounds.items()]


def _bucket_cap(schedules: EditableSchedules, context: Context, name: str, value: str) -> Uncertainty:
    cap = number(name, value, "MiB above 0, such as 50", "MB", "MiB")
    rounds = _of_each_backward(schedules, context, gradient_rounds(schedules))
    late_ns = [sum(bucket.late_ns for bucket in one.buckets) for one in rounds]
    if float(np.mean(late_ns)) > _LATE * context.result.step_ns:
        raise CannotReplay(
            f"{name}: others waited for ranks that are not recorded, whose arrival at new buckets is not known; "
            "record all ranks"
        )
    sizes = {tuple(bucket.collective.bytes or 0 for bucket in one.buckets) for one in rounds}
    if len({sum(recorded) for recorded in sizes}) > 1:
        raise CannotReplay(f"{name}: the recorded steps reduce gradients unequally often; try ddp.no_sync first")
    recorded = min(sizes)
    counts = _gradients_in_buckets(context, rounds)
    if several_messages(counts):
        raise CannotReplay(
            f"{name}: DDP reduces more than once for each bucket: its communication hook, such as PowerSGD's, sends "
            "what it makes of the gradients, and what it would make of other buckets is not known"
        )
    # Buckets that are reduced together, because the first was ready last, do not show what is in them.
    counts = () if 0 in counts else counts
    parameters = parameter_bytes(context.runs, recorded, _traced_gradients(context, rounds), counts)
    known_sizes = None if parameters is None else parameters[0]
    would = fewer_by_limit(context.runs, recorded, known_sizes)
    if would is not None:
        raise CannotReplay(
            f"{name}: {len(recorded)} buckets are reduced per step, and the present limit would make {would} of as "
            "many bytes: several models, backwards or data types fill their own"
        )
    least = limits(context.runs, cap * MIB, limited_share(context.runs, recorded, known_sizes))
    ends = bucket_ends(float(sum(recorded)), *least, known_sizes)
    filled = bucket_bytes(ends)
    if all(list(each) == filled for each in sizes):
        return FULL  # the recorded buckets show best what they take
    collectives: dict[tuple[int, int, int, int], Collective] = {}
    first = rounds[0]
    alone = alone_share(context, first.buckets[0].collective.group)
    for one in rounds:
        _rebucket(schedules, context, one, ends, filled, collectives, alone)
    # A wait may have ended in the next step only.
    schedules.without({bucket for one in rounds for bucket in one.buckets})
    new = [
        collective.bytes or 0
        for (step, group, _, _), collective in collectives.items()
        if (step, group) == (first.step, first.buckets[0].collective.group)
    ]
    transfers = alone * sum(context.transfers_among_ns(first.buckets, new))
    transfers *= context.transfer_error(first.buckets, new)
    if len(first.buckets) == 1:  # it does not show when its gradients became ready
        return Uncertainty(less=0.50, more=0.25, either_ns=transfers)
    known = parameters is not None and parameters[1]
    share = 0.15 if known else 0.25
    # Where parameters' sizes are not known, each bucket may be one of them, which no limit divides.
    less = 1.0 if parameters is None and len(ends) > len(recorded) else share
    # What was taken for a parameter may be several smaller ones, which fill more buckets.
    most = len(ends) if known else len(bucket_ends(float(sum(recorded)), *least, None))
    slower_ns = max(most - len(ends), 0) * _each_bucket_ns(schedules, context, first)
    return Uncertainty(less=less, more=share, either_ns=transfers, slower_ns=slower_ns)


def _traced_gradients(context: Context, rounds: Sequence[Round]) -> list[Sequence[int]]:
    """Bytes of one backward's gradients, in the order in which they are ready, as the ranks' traces show them."""
    found: list[Sequence[int]] = []
    for one in rounds[:: len(context.result.steps)]:
        partial = context.result.partials[one.rank]
        parts = partial.microbatches(one.step)
        sizes = partial.gradient_bytes
        found.append(sizes[len(sizes) - len(sizes) // parts :] if len(sizes) % parts == 0 else ())
    return found


def _gradients_in_buckets(context: Context, rounds: Sequence[Round]) -> tuple[int, ...]:
    """How many gradients are in each bucket, as the trace of a rank shows it; empty where none does."""
    for one in rounds[:: len(context.result.steps)]:
        partial = context.result.partials[one.rank]
        if counts := partial.reduced_gradients.in_buckets(partial.microbatches(one.step)):
            return counts
    return ()


def several_messages(counts: Sequence[int]) -> bool:
    """Is each bucket's all-reduce followed by as many others before the next gradient, by the numbers of gradients
    before each?
    """
    full = np.flatnonzero(counts)
    if len(full) < 2 or full[0] != 0:
        return False
    lengths = np.diff(np.append(full, len(counts))).tolist()
    return len(set(lengths)) == 1 and lengths[0] > 1


def _of_each_backward(schedules: EditableSchedules, context: Context, rounds: Sequence[Round]) -> list[Round]:
    """These, divided where every micro-batch reduces its gradients: no bucket holds gradients of two backwards."""
    divided = []
    for one, earlier in zip(rounds, _before_last(schedules, context, rounds), strict=True):
        size = len(one.buckets) - len(earlier)
        begins = range(0, len(one.buckets), size)
        divided += [replace(one, buckets=one.buckets[at : at + size], backward=at // size) for at in begins]
    return divided


def _before_last(schedules: EditableSchedules, context: Context, rounds: Sequence[Round]) -> list[Sequence[RankOp]]:
    """Of each round's buckets those of all micro-batches but the last; none where gradients are reduced once per step.
    Work takes unequally long, so one step alone may seem to reduce in its last micro-batch only: most steps decide.
    """
    earlier: list[Sequence[RankOp]] = []
    in_every: list[bool] = []
    for one in rounds:
        parts = context.result.partials[one.rank].microbatches(one.step)
        if parts > 1:
            in_every.append(StepOps(schedules, one.rank, one.step).in_every_part(set(one.buckets), parts))
        earlier.append(but_last(one.buckets, parts) if parts > 1 else ())
    return earlier if 2 * sum(in_every) > len(in_every) else [()] * len(rounds)


def _each_bucket_ns(schedules: EditableSchedules, context: Context, one: Round) -> float:
    """What another bucket takes, however small: the slowest host to issue it, or its latency."""
    issuing = (host.usually_issuing_ns for host in schedules.hosts.values())
    return max([context.transfer_ns(one.buckets[0], 1), *issuing])


def alone_share(context: Context, group: int) -> float:
    """Share of its transfer that a gradient bucket would have taken, had it had the link for itself.

    Gloo's two threads reduce two buckets at once, over one link. New buckets are replayed one after the other, so each
    takes its share only. Example: two buckets both sent from 0 to 100 ms: alone each takes 50, the share is 0.5.
    Where one stream carries one after the other (NCCL) it is 1.
    """
    matched = context.result.matched_before
    known = matched.instances
    kind = known.kinds.index("all_reduce")
    gradients = (known.kind == kind) & (known.group == group) & (known.bytes >= SMALLEST)
    taken = shared = 0
    for rank, partial in context.result.partials.items():
        own = np.flatnonzero((matched.rank == rank) & gradients[matched.instance])
        ends = partial.collectives.end_ns[matched.index[own]] + context.result.clocks.offset_of(rank)
        begins = np.minimum(matched.last_arrival_ns[own], ends)
        taken += int((ends - begins).sum())
        shared += Intervals.of(begins, ends).measure()
    return shared / taken if taken else 1.0


def _rebucket(
    schedules: EditableSchedules, context: Context, one: Round, ends: list[float], sizes: list[int],
    collectives: dict[tuple[int, int, int, int], Collective], alone: float,
) -> None:  # fmt: skip
    """Replace the buckets of one round by new ones of these ``sizes``; ``ends`` are the bytes reduced once each is."""
    step_ops = StepOps(schedules, one.rank, one.step)
    old = set(one.buckets)
    waits = step_ops.places(OpKind.WAIT, old)
    ready = step_ops.progress_ns[step_ops.places(OpKind.ISSUE, old)]
    total = np.cumsum([bucket.collective.bytes or 0 for bucket in one.buckets]).astype(np.float64)
    model = one.buckets[0]
    backward = BACKWARD_SHARE / context.result.partials[one.rank].microbatches(one.step)
    added: list[tuple[float, ScheduleOp]] = []
    moments = ready_at(np.array(ends), total, ready, backward).tolist()
    transfers = context.transfers_among_ns(one.buckets, sizes)
    # What delayed one recorded bucket does not delay each of the new ones.
    gap_ns = median(bucket.gap_ns for bucket in one.buckets)
    buckets = []
    for index, (size, at) in enumerate(zip(sizes, moments, strict=True)):
        key = (one.step, model.collective.group, one.backward, index)
        if key not in collectives:
            collectives[key] = replace(model.collective, bytes=size)
        collective = collectives[key]
        buckets.append(RankOp(one.rank, collective, model.lane, gap_ns, alone * transfers[index]))
        added.append((at, ScheduleOp.of(OpKind.ISSUE, buckets[-1], one.step)))
    waits_at = float(step_ops.progress_ns[waits[-1]]) if waits else _unrecorded_wait(step_ops, one, ready)
    waits_at = max(waits_at, added[-1][0])
    added += [(waits_at, ScheduleOp.of(OpKind.WAIT, bucket, one.step)) for bucket in buckets]
    step_ops.replace(frozenset(old), added)


def _unrecorded_wait(step_ops: StepOps, one: Round, ready: Float64) -> float:
    """Own progress at which the optimizer waits for the buckets where no wait is recorded: it came to that after they
    had ended, or its wait counts as the rank's own time. Either way they had ended by then.
    """
    ended = max(float(at) + own.gap_ns + own.transfer_ns for at, own in zip(ready, one.buckets, strict=True))
    return min(ended, step_ops.ends_ns)


def _no_sync(schedules: EditableSchedules, context: Context, name: str, value: str) -> Uncertainty:
    """Reduce gradients once per step, after the last micro-batch's backward."""
    if not flag(name, value):
        raise CannotReplay(f"{name}=false: the recording does not show how long the additional reductions would take")
    context.refuse_cleared(name)
    dropped: set[RankOp] = set()
    for earlier in _before_last(schedules, context, _rounds_of_any_size(schedules)):
        dropped.update(earlier)
    if not dropped:
        raise CannotReplay(f"{name}: {REDUCED_ONCE}")
    for rank in schedules.ops:
        _without_copies(schedules, context, rank, _copies_before_last(context, rank))
    schedules.without(dropped)
    return Uncertainty(less=0.15, more=0.15)


def _without_copies(
    schedules: EditableSchedules, context: Context, rank: int, spared: tuple[Intervals, Intervals]
) -> None:
    """Gradients that are not reduced are not copied into buckets: ``spared`` are those copies of a rank's host and of
    its device. They stay in the replay where another change has taken ops out before.
    """
    if is_as_recorded(schedules, rank):
        host, device = spared
        copies = replace(context.result.partials[rank].bucket_copies, host=host, device=device)
        leave_out(schedules, context.result, rank, copies)


def _copies_before_last(context: Context, rank: int) -> tuple[Intervals, Intervals]:
    """Those of a rank's copies (of its host, of its device) that are not of a step's last micro-batch."""
    partial = context.result.partials[rank]
    steps, copies = partial.steps, partial.bucket_copies
    every = range(len(steps.number))
    in_turn = [partial.microbatches(number) for number in steps.number.tolist()]
    of_host, of_device = steps.of_host_time(copies.host.start_ns), steps.of_device_time(copies.device.start_ns)
    host = [_but_last(copies.host, np.flatnonzero(of_host == step), in_turn[step]) for step in every]
    device = [_but_last(copies.device, np.flatnonzero(of_device == step), in_turn[step]) for step in every]
    return Intervals.empty().union(*host), Intervals.empty().union(*device)


def _but_last(copies: Intervals, chosen: Int64, in_turn: int) -> Intervals:
    """Of a step's copies, done as often in each of so many micro-batches, all but those of the last one; none where
    they do not divide so.
    """
    if len(chosen) % in_turn:
        return Intervals.empty()
    first = chosen[: len(chosen) // in_turn * (in_turn - 1)]
    return Intervals(copies.start_ns[first], copies.end_ns[first])


def _copies_in(context: Context, rank: int, numbers: set[int]) -> tuple[Intervals, Intervals]:
    """A rank's copies (of its host, of its device) in steps with these numbers."""
    partial = context.result.partials[rank]
    steps, copies = partial.steps, partial.bucket_copies
    chosen = steps.indices_of(np.array(sorted(numbers), dtype=np.int64))
    host = Intervals.of(steps.host_start_ns[chosen], steps.host_end_ns[chosen])
    device = Intervals.of(steps.start_ns[chosen], steps.end_ns[chosen])
    return copies.host.intersect(host), copies.device.intersect(device)


def _comm_dtype(schedules: EditableSchedules, context: Context, name: str, value: str) -> Uncertainty:
    """bf16 or fp16 on the wire (``bf16_compress_hook``): half the bytes of fp32 gradients."""
    if value not in ("bf16", "fp16"):
        raise BadSetting(f"{name}={value}: write bf16 or fp16")
    rounds = _rounds_of_any_size(schedules)
    halved = {bucket for one in rounds for bucket in one.buckets if bucket.collective.dtype in _HALVED}
    sizes = _bytes_of(schedules, context, rounds) if context.on_devices else {}
    for bucket in halved:
        bucket.transfer_ns = context.part_of_transfer_ns(bucket, 0.5)
    if not halved:
        raise CannotReplay(f"{name}: gradients are sent in 16 bits or fewer already, or their type is not recorded")
    casts_ns = _cast(schedules, {bucket: sizes[bucket] for bucket in halved}) if context.on_devices else 0.0
    keep_host_pace(schedules, context)
    # On CPUs the cores that train also cast and add up, and 16-bit sums are slow there: gloo adds them one by one.
    return Uncertainty(less=0.20 if context.on_devices else 0.60, more=0.10, either_ns=_CASTS_ERROR * casts_ns)


def _bytes_of(schedules: EditableSchedules, context: Context, rounds: Sequence[Round]) -> dict[RankOp, float]:
    """Bytes of each bucket; where they are not recorded, its part of those of the model's gradients by how long it
    takes, and 0 where these are not known either.
    """
    sizes: dict[RankOp, float] = {bucket: float(bucket.bytes) for one in rounds for bucket in one.buckets}
    if all(sizes.values()):
        return sizes
    for one, earlier in zip(rounds, _before_last(schedules, context, rounds), strict=True):
        run = context.runs.get(one.rank)
        whole = run.model.trainable_bytes if run is not None and run.model is not None else 0
        times = len(one.buckets) / (len(one.buckets) - len(earlier))
        taken_ns = sum(bucket.transfer_ns for bucket in one.buckets)
        for bucket in one.buckets:
            sizes[bucket] = sizes[bucket] or (times * whole * bucket.transfer_ns / taken_ns if taken_ns else 0.0)
    return sizes


def _cast(schedules: EditableSchedules, halved: Mapping[RankOp, float]) -> float:
    """Add the kernels of the hook to buckets of so many bytes: before one is sent its cast and its average, and after
    it the copy back, for which the optimizer waits. Returns what a step has more of them, ns.
    """
    added = 0.0
    for op in chain.from_iterable(schedules.ops.values()):
        own = op.rank_op
        if own is None or own not in halved:
            continue
        element = DTYPE_BYTES[own.collective.dtype or ""]
        ns = halved[own] / element * _HALF / MEMORY_GBPS
        if op.kind is OpKind.ISSUE:
            op.add(TimeCategory.COMPUTE, (element + 3 * _HALF) / _HALF * ns)
            op.spend(_HOOK * schedules.issuing_ns(op))
            added += (element + 3 * _HALF) / _HALF * ns
        elif op.kind is OpKind.WAIT and op.lag_ns != NEVER:
            op.lag_ns += (element + _HALF) / _HALF * ns
    return added / (len(schedules.ops) * max(len(schedules.recorded.steps), 1))


def _accumulate(schedules: EditableSchedules, context: Context, name: str, value: str) -> Uncertainty:
    every = whole_number(name, value, "the number of batches per optimizer step", least=2)
    used = schedules.recorded.steps[schedules.recorded.used].tolist()
    if len(used) < every:
        raise CannotReplay(f"{name}={value}: only {len(used)} steps are recorded; record {value} or more")
    if any(run.settings.get("gradient_accumulation", {}).get("no_sync") is False for run in context.runs.values()):
        raise CannotReplay(f"{name}: gradients are reduced after every micro-batch; try ddp.no_sync first")
    context.refuse_cleared(name)
    whole = len(used) // every * every
    # Steps that do not count, such as the first, still bring ranks together, and hosts ahead of their devices.
    accumulating = set(used) - set(used[::-1][::every])
    dropped: set[RankOp] = set()
    for rank in schedules.ops:
        _without_copies(schedules, context, rank, _copies_in(context, rank, accumulating))
    rounds, spared_ns = _rounds_of_any_size(schedules), 0.0
    for one in rounds:
        if one.step in accumulating:
            idle_ns = context.result.totals[one.rank][:, _AFTER_OPTIMIZER].sum(axis=1).mean()
            spared_ns += min(_without_optimizer(schedules, one), float(idle_ns))
            dropped.update(one.buckets)
    schedules.without(dropped)
    schedules.settling, schedules.steps_alike = len(used) - whole, False
    # Some scripts read or print the loss of every batch.
    return Uncertainty(less=0.15, more=0.15, slower_ns=spared_ns / len(rounds))


def _rounds_of_any_size(schedules: EditableSchedules) -> list[Round]:
    """Every step's gradient reductions, those of unknown size too. Raises CannotReplay where there are none."""
    sizes = {rank_op.collective.bytes for rank_op in schedules.issued() if rank_op.collective.kind == "all_reduce"}
    if sizes != {None}:
        return gradient_rounds(schedules)
    rounds = grouped(
        (rank_op.collective.step, rank_op) for rank_op in schedules.issued() if rank_op.collective.kind == "all_reduce"
    )
    found = []
    for step, of_step in rounds.items():
        if step is not None and step in schedules.steps:
            by_rank = grouped((rank_op.rank, rank_op) for rank_op in of_step)
            found += [Round(rank, step, tuple(rank_ops)) for rank, rank_ops in by_rank.items()]
    return found


def _without_optimizer(schedules: EditableSchedules, one: Round) -> float:
    """Take out what is computed, launched and done on the host from the issue of the last bucket, which ends the
    backward, to the end of the step, and where the host waits for its device. Returns what of that may belong to the
    batch, ns.
    """
    after, spared_ns, syncs = False, 0.0, set[int]()
    for op in schedules.ops[one.rank]:
        if after:
            spared_ns += float(op.own_ns[_AFTER_OPTIMIZER].sum())
            if op.host is not None:
                spared_ns += op.host.waited_ns + float(op.host.own_ns[_OF_HOST_AFTER].sum())
            for category in (*_OF_OPTIMIZER, *_AFTER_OPTIMIZER):
                op.scale(category, 0.0)
            if op.step != one.step:
                break
            if op.kind is OpKind.SYNC:
                syncs.add(id(op))
        after |= op.kind is OpKind.ISSUE and op.rank_op is one.buckets[-1]
    schedules.ops[one.rank], _ = left_out(schedules.ops[one.rank], lambda op: id(op) in syncs)
    return spared_ns


SETTINGS = (
    Setting("ddp.no_sync", "true", "reduce gradients after the last micro-batch only", _no_sync, 1, with_hosts=True),
    Setting("ddp.bucket_cap_mb", "MIB", "DistributedDataParallel(bucket_cap_mb=…)", _bucket_cap, 1, with_hosts=True),
    Setting("ddp.comm_dtype", "bf16|fp16", "send gradients in 16 bits", _comm_dtype, 1, with_hosts=True),
    Setting("batch.accumulation", "K", "K batches per optimizer step; the step time is that of one batch",
            _accumulate, 1, with_hosts=True),
)  # fmt: skip
