"""Work of one rank that a setting would make unnecessary: activations computed again, changes of memory layout, most
kernels of an optimizer that loops over parameters, copies of gradients into buckets, of buffers that are sent and of
parameters that are gathered, searches for unused parameters. And what issuing a collective takes the host, which does
so no more where a change leaves that out.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from perfscope.analyzers.rank.attribution import Attribution
from perfscope.analyzers.rank.collectives.autograd import OF_PARAMETER, in_backward
from perfscope.analyzers.rank.collectives.communication import device_communication
from perfscope.analyzers.rank.host_activity import HostActivity
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.launches import DeviceWork
from perfscope.analyzers.rank.loop_phases import DDP_FORWARD, OPTIMIZER_RANGE
from perfscope.analyzers.rank.partial import ExtraWork
from perfscope.analyzers.rank.steps import Steps
from perfscope.analyzers.rank.time_breakdown import COMMUNICATION_OPERATOR
from perfscope.trace.trace import NEVER, NONE, Category, Int64, Trace

TO_LAST: Final = re.compile(r"[nN]chwTo[nN]hwc|[nN]cdhwTo[nN]dhwc")
TO_FIRST: Final = re.compile(r"[nN]hwcTo[nN]chw|[nN]dhwcTo[nN]cdhw")
"""cuDNN's kernels that write a tensor in another memory format, before and after its convolutions: channels last or
first."""

FEW: Final = 10
"""Kernels with which an optimizer updates many parameters at once, at most: ``foreach`` takes as many as a loop takes
for each of them, some ten, ``fused`` fewer."""

EMPTY_NS: Final = 3_000
"""What a kernel takes, at most, that computes next to nothing: on an H200 the shortest ones take 0.7 µs and one in
twenty 1 to 2, older devices need some 2. The rest of a longer one is arithmetic, which more parameters at once repeat.
"""

_AT_ONCE: Final = re.compile(r"aten::_(foreach|fused)_")
"""Operators that update many parameters (torch ``native_functions.yaml``), in several kernels where these are many."""

_ALIKE: Final = 0.95
"""Share of an optimizer's launches that must come from the operators of its loop in their order."""

_BUCKET_COPIES: Final = re.compile(
    r"torch::distributed::reducer::(mul_out|copy_)|torch\.distributed\.ddp\.reducer::copy_bucket_to_grad"
)
"""Ranges of DDP's reducer (reducer.cpp) around the copy of one gradient."""

_COPYING_BACK: Final = re.compile(
    r"aten::(_foreach_)?copy_$|aten::(unflatten_dense_tensors|slice|narrow|view(_as)?|as_strided|select|alias|detach)$"
)
"""Operators with which ``broadcast_coalesced`` (c10d ``comm.cpp``) hands buffers out again."""

_GATHERING: Final = re.compile(r"FSDP::all_gather\b")
_GATHER_COPIES: Final = re.compile(r"FSDP::all_gather_copy_out\b|fsdp::(all_gather_copy_in|split_with_sizes_copy)$")
"""Ranges (``fsdp/_fully_shard/_fsdp_param_group.py``) and operators (``_fsdp_collectives.py``) in which FSDP2 puts its
shards of a unit's parameters into one tensor, gathers that, and copies the whole parameters out of it."""


def recomputation(trace: Trace, work: DeviceWork, steps: Steps, attribution: Attribution) -> ExtraWork:
    """Forwards that run again in the backward (activation checkpointing)."""
    found = attribution.recomputing
    host = Intervals.of(found.start_ns, found.end_ns)
    step = steps.of_host_time(host.start_ns)
    launched = np.flatnonzero(~attribution.is_communication & (work.launch != NONE))
    at_ns = trace.start_ns[work.launch[launched]]
    inside = host.covers(at_ns)
    launched, at_ns = launched[inside], at_ns[inside]
    stretch = np.searchsorted(host.start_ns, at_ns, side="right") - 1
    first, last = np.full(len(host), -NEVER), np.full(len(host), NEVER)
    np.minimum.at(first, stretch, work.start_ns[launched])
    np.maximum.at(last, stretch, work.end_ns[launched])
    return ExtraWork(host, Intervals.of(first, last), steps.count(step), _grown(trace, steps, host, step))


def conversions(trace: Trace, work: DeviceWork, steps: Steps) -> ExtraWork:
    """Tensors written with their channels last for a convolution, and back with their channels first.

    Nothing where more are written the other way: there the tensors have their channels last already, and the
    convolutions want them first.
    """
    kernels = np.flatnonzero(trace.category[work.row] == Category.KERNEL)
    to_last, to_first = (trace.names_where(each.search, work.row[kernels]) for each in (TO_LAST, TO_FIRST))
    chosen = kernels[to_last | to_first]
    # A convolution's input and weight are written one way, its output the other.
    if to_last.sum() <= to_first.sum():
        chosen = chosen[:0]
    calls = work.launch[chosen]
    host = Intervals.of_rows(trace, calls[calls != NONE])
    step = steps.of_device_time(work.start_ns[chosen])
    return ExtraWork(host, Intervals.of(work.start_ns[chosen], work.end_ns[chosen]), steps.count(step))


def optimizer_loops(trace: Trace, work: DeviceWork, steps: Steps) -> ExtraWork:
    """``kernel_loops`` of each optimizer step."""
    ranges = Intervals.of_rows(trace, trace.rows(Category.ANNOTATION, named=OPTIMIZER_RANGE.match))
    return kernel_loops(trace, work, steps, ranges)


def kernel_loops(
    trace: Trace, work: DeviceWork, steps: Steps, ranges: Intervals, while_in: Intervals | None = None
) -> ExtraWork:
    """Kernels launched in each of these ranges but for a few: what launching them takes, and what each takes however
    little it computes (as long as the shortest one of the range, up to ``EMPTY_NS``) with the time from the one before
    to it. The arithmetic stays: where all take equally long, the shortest is no measure of what an empty one takes.
    With ``while_in`` only those that are launched then.
    """
    kernels = np.flatnonzero((work.launch != NONE) & (trace.category[work.row] == Category.KERNEL))
    calls = work.launch[kernels]
    kernels, calls = kernels[np.argsort(trace.start_ns[calls], kind="stable")], np.sort(calls)
    at_once = Intervals.of_rows(trace, trace.rows(Category.CPU_OP, named=_AT_ONCE.match))
    inside = ranges.covers(trace.start_ns[calls]) & ~at_once.covers(trace.start_ns[calls])
    inside &= while_in is None or while_in.covers(trace.start_ns[calls])
    kernels, calls = kernels[inside], calls[inside]
    of = np.searchsorted(ranges.start_ns, trace.start_ns[calls], side="right") - 1
    first = np.searchsorted(of, np.arange(len(ranges)))
    spared = np.arange(len(of)) - first[of] >= _left(trace, calls, of)
    shortest = np.full(len(ranges), EMPTY_NS)
    np.minimum.at(shortest, of, work.end_ns[kernels] - work.start_ns[kernels])
    places = np.flatnonzero(spared)
    begin, until = work.end_ns[kernels[places - 1]], work.start_ns[kernels[places]] + shortest[of[places]]
    step = steps.of_host_time(trace.start_ns[calls[places]])
    return ExtraWork(
        Intervals.of(trace.ends_ns(calls[places - 1]), trace.ends_ns(calls[places])),
        Intervals.of(np.minimum(begin, until), until),
        steps.count(step),
    )


def _left(trace: Trace, calls: Int64, of: Int64) -> int:
    """Kernels that are left of an optimizer that launches with ``calls``, in steps ``of``, once they update many
    parameters: those that its loop runs for each parameter; ``FEW`` where no loop shows.
    """
    operators = trace.rows(Category.CPU_OP)
    place = np.searchsorted(trace.start_ns[operators], trace.start_ns[calls], side="right") - 1
    if not len(calls) or place.min() < 0:
        return FEW
    names = trace.name[operators[place]]
    if (names == names[0]).all():
        return FEW
    for length in range(2, FEW):
        again = of[length:] == of[:-length]
        if again.any() and (names[length:] == names[:-length])[again].mean() >= _ALIKE:
            return length
    return FEW


def bucket_copies(trace: Trace, work: DeviceWork, steps: Steps) -> ExtraWork:
    """Gradients that DistributedDataParallel copies into its buckets and back, which it does only in a backward whose
    gradients are reduced.
    """
    rows = trace.rows(Category.CPU_OP, named=_BUCKET_COPIES.fullmatch)
    host = Intervals.of_rows(trace, rows)
    launched = np.flatnonzero(work.launch != NONE)
    copies = launched[host.covers(trace.start_ns[work.launch[launched]])]
    step = steps.of_host_time(trace.start_ns[rows])
    return ExtraWork(host, Intervals.of(work.start_ns[copies], work.end_ns[copies]), steps.count(step))


def buffer_copies(trace: Trace, work: DeviceWork, steps: Steps) -> ExtraWork:
    """What DistributedDataParallel does to send buffers: from the begin of a forward in which it broadcasts to the end
    of the last copy back, as far as it is no communication.
    """
    forward = trace.rows(Category.ANNOTATION, named=DDP_FORWARD.__eq__)
    sent = trace.rows(Category.CPU_OP, named="c10d::broadcast_".__eq__)
    other = trace.rows(Category.CPU_OP, named=lambda name: not _COPYING_BACK.match(name))
    begin, until = [], []
    for row in forward.tolist():
        start, end = int(trace.start_ns[row]), int(trace.start_ns[row] + trace.duration_ns[row])
        mine = sent[(trace.start_ns[sent] >= start) & (trace.start_ns[sent] < end)]
        if len(mine):
            last = int(trace.ends_ns(mine).max())
            later = trace.start_ns[other[(trace.thread[other] == trace.thread[row]) & (trace.start_ns[other] >= last)]]
            begin.append(start)
            until.append(min(end, int(later.min(initial=end))))
    host = Intervals.of(np.array(begin, dtype=np.int64), np.array(until, dtype=np.int64))
    launched = np.flatnonzero((work.launch != NONE) & ~device_communication(trace, work))
    copies = launched[host.covers(trace.start_ns[work.launch[launched]])]
    count = steps.count(steps.of_host_time(host.start_ns))
    return ExtraWork(host, Intervals.of(work.start_ns[copies], work.end_ns[copies]), count)


def searches(work: DeviceWork, steps: Steps, host: HostActivity) -> ExtraWork:
    """DistributedDataParallel's searches through the graph for parameters that get no gradient; of the device, what it
    is idle meanwhile.
    """
    idle = host.searching
    if len(idle):
        idle = idle.subtract(Intervals.of(work.start_ns, work.end_ns))
    return ExtraWork(host.searching, idle, steps.count(steps.of_host_time(host.searching.start_ns)))


def gather_copies(trace: Trace, work: DeviceWork, steps: Steps) -> ExtraWork:
    """What FSDP2 does beside the collectives to gather parameters in backwards, which it does only where these were
    freed after the forward.
    """
    named = (_GATHERING.match, _GATHER_COPIES.match)
    rows = np.concatenate([
        trace.rows(category, named=each) for category in (Category.ANNOTATION, Category.CPU_OP) for each in named
    ])  # fmt: skip
    rows = np.sort(rows[in_backward(trace, trace.start_ns[rows], rows)])
    gathering = Intervals.of_rows(trace, rows)
    launched = np.flatnonzero((work.launch != NONE) & ~device_communication(trace, work))
    copies = launched[gathering.covers(trace.start_ns[work.launch[launched]])]
    sent = Intervals.of_rows(trace, trace.rows(Category.CPU_OP, named=COMMUNICATION_OPERATOR.match))
    step = steps.of_host_time(trace.start_ns[rows])
    device = Intervals.of(work.start_ns[copies], work.end_ns[copies])
    return ExtraWork(gathering.subtract(sent), device, steps.count(step))


def _grown(trace: Trace, steps: Steps, host: Intervals, step: Int64) -> Int64 | None:
    """By how much more memory is allocated at the end of stretches than at their begin, per step."""
    counter = trace.memory
    known = counter.allocated != NONE
    if (counter.device[known] != NONE).any():
        known &= counter.device != NONE
    time_ns, allocated = counter.time_ns[known], counter.allocated[known]
    if len(time_ns) == 0 or len(host) == 0:
        return None
    begin, end = (np.searchsorted(time_ns, edge, side="right") - 1 for edge in (host.start_ns, host.end_ns))
    grown = np.where(begin >= 0, allocated[end] - allocated[np.maximum(begin, 0)], 0)
    return steps.count(step, np.maximum(grown, 0))


def cost_of_issuing(trace: Trace, host: HostActivity, issued_ns: Int64, called_ns: Int64) -> Int64:
    """The time in the operators around the call that launches each collective, and what autograd's function of a
    parameter takes longer where it reduces a bucket; without any, the time in that call.
    """
    operators = Intervals.of_rows(
        trace, trace.rows(Category.CPU_OP, named=COMMUNICATION_OPERATOR.match, threads=host.threads)
    )
    place = np.searchsorted(operators.start_ns, issued_ns, side="right") - 1
    around = operators.covers(issued_ns)
    length = operators.end_ns - operators.start_ns
    cost = np.where(around, length[np.maximum(place, 0)] if len(length) else 0, np.maximum(called_ns - issued_ns, 0))
    reducing, longer_ns = _beside_reductions(trace, host, issued_ns, cost)
    cost[reducing] += longer_ns
    return cost


def _beside_reductions(trace: Trace, host: HostActivity, issued_ns: Int64, cost_ns: Int64) -> tuple[Int64, int]:
    """(indices of the collectives issued in autograd's function of a parameter, what that usually takes for each beside
    ``cost_ns`` and more than the one before it). A host that waits in some of them for a full queue does not count.
    """
    functions = Intervals.of_rows(trace, trace.rows(Category.CPU_OP, named=OF_PARAMETER.__eq__, threads=host.threads))
    reducing = np.flatnonzero(functions.covers(issued_ns))
    function = np.searchsorted(functions.start_ns, issued_ns[reducing], side="right") - 1
    length = functions.end_ns - functions.start_ns
    every, count = np.unique(function, return_counts=True)
    # Those of the same backward: without a reduction gradients need not be copied, either.
    before = np.setdiff1d(every - 1, np.append(every, -1))
    if len(before) == 0:
        return reducing, 0
    theirs = np.add.reduceat(cost_ns[reducing][np.argsort(function, kind="stable")], np.cumsum(count) - count)
    longer = (length[every] - np.median(length[before]) - theirs) / count
    return reducing, max(round(float(np.median(longer))), 0)
