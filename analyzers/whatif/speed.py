"""Settings that change how fast something goes: a rank, computation, the host, the network."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.rank_steps import collecting, pausing
from perfscope.analyzers.job.slow_transfers import slow_transfer_steps
from perfscope.analyzers.job.utilisation import blind_ranks
from perfscope.analyzers.rank.host_lane import HostTime
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.replay.engine import OpKind
from perfscope.analyzers.replay.pace import Pace, late_by
from perfscope.analyzers.replay.stragglers.own_time import HostBound
from perfscope.analyzers.replay.stragglers.slow_for_work import slow_for_their_work
from perfscope.analyzers.replay.stragglers.slow_stages import SlowStage, at_other_stages_pace, slow_stages
from perfscope.analyzers.replay.uneven_sizes import UnevenSizes
from perfscope.analyzers.whatif.change import (
    FULL,
    BadSetting,
    CannotReplay,
    Context,
    Setting,
    Uncertainty,
    factor,
    keep_host_pace,
    launch_sooner,
    number,
)
from perfscope.analyzers.whatif.schedules.editable import EditableSchedules
from perfscope.analyzers.whatif.schedules.hosts import HOST_ROWS, OF_DEVICE_ROWS, HostPart
from perfscope.analyzers.whatif.schedules.ops import Collective
from perfscope.results.categories import TimeCategory
from perfscope.text import ranks_in_words
from perfscope.trace.trace import NEVER, NONE

_OF_SHARDING: Final = ("fsdp.", "zero.")
"""What names of settings begin with that change how often parameters are gathered."""

_HOST_SYNC: Final = "host.sync"
_SCATTERS: Final = "reduce_scatter"

_PACED_BY_COPIES: Final = 0.95
"""Share of the step from which on copies beside the computation set its pace: between two there is some time."""

WORK_OF_RANKS: Final = "ranks.work"
"""Setting that spreads work evenly over ranks."""


def _rank_at_peers_pace(schedules: EditableSchedules, context: Context, name: str, value: str) -> Uncertainty:
    if value != "peers":
        raise BadSetting(f"{name}={value}: write {name}=peers")
    try:
        rank = int(name.removeprefix("rank."))
    except ValueError:
        raise BadSetting(f"{name}: write rank.3=peers for rank 3") from None
    ops = schedules.ops
    if rank not in ops:
        raise CannotReplay(f"rank {rank} is not in the recording, which has {ranks_in_words(ops)}")
    stage = _slow_stage_of(context, rank)
    if stage is None and rank not in context.peers:
        raise CannotReplay(f"no other recorded rank does the same work as rank {rank}, so it has no peers")
    if context.even:
        raise BadSetting(f"{name}={value}: {WORK_OF_RANKS}=even has all ranks at one pace; leave one of them out")
    if stage is not None:
        _take_pace_of_stages(schedules, context, rank, stage)
    else:
        _take_pace(schedules, context, rank)
    if rank == context.paced[0]:
        _move_as_much(schedules, context, context.paced)
    schedules.loading_step_ns.pop(rank, None)  # that of the peers stays
    return Uncertainty(less=0.15, more=0.05)


def slow_devices(context: Context) -> dict[int, float]:
    """Ranks whose devices are slow for their work, with how many times as long they take for the same."""
    slower: dict[int, float] = {}
    for group in set(context.peers.values()):
        slower |= slow_for_their_work(context.result, group, context.recorded.used)
    return slower


def _work_spread_evenly(schedules: EditableSchedules, context: Context, name: str, value: str) -> Uncertainty:
    """Samples and tokens spread evenly, none left out: ranks that do the same work all take the mean of its time."""
    if value != "even":
        raise BadSetting(f"{name}={value}: write {name}=even")
    ranks = [rank for rank in schedules.ops if rank in context.peers]
    if not ranks:
        raise CannotReplay("no two recorded ranks do the same work")
    for rank in ranks:
        _take_pace(schedules, context, rank)
    _move_as_much(schedules, context, ranks)
    return Uncertainty(less=0.15, more=0.15)


def _move_as_much(schedules: EditableSchedules, context: Context, ranks: Collection[int]) -> None:
    """All-to-alls take as long as where these ranks send and receive no more than the mean of all."""
    shares = UnevenSizes(context.result).shares_left(ranks)
    for rank_op in schedules.issued():
        collective = rank_op.collective
        if collective.instance != NONE and (share := float(shares[collective.instance])) < 1:
            latency = _latency_ns(context, collective, rank_op.transfer_ns)
            rank_op.transfer_ns = latency + (rank_op.transfer_ns - latency) * share


def _take_pace(schedules: EditableSchedules, context: Context, rank: int) -> None:
    """A rank takes the pace that the question gives it."""
    _set_pace(schedules, rank, context.pace_of(rank))
    # A step that a rank delays now and then counts, the first as well.
    schedules.steps_alike, schedules.settling = False, 0
    if not schedules.hosts:
        bound = HostBound.of(context.result, context.recorded)
        steps_ns = context.recorded.steps_ns(context.replayed_unchanged)
        schedules.at_least(rank, bound.least_ns(() if context.even else context.paced, steps_ns))


_SLOW_STAGES: Final[WeakKeyDictionary[AlignedJob, list[SlowStage]]] = WeakKeyDictionary()
"""Each rank of a stage asks for them."""


def _slow_stage_of(context: Context, rank: int) -> SlowStage | None:
    """The slow stage all of whose ranks, this one among them, are to take their peers' pace. Ranks of one stage are
    each other's peers: all of them are compared with those of other stages.
    """
    if context.result not in _SLOW_STAGES:
        _SLOW_STAGES[context.result] = slow_stages(context.result, ())
    found = (each for each in _SLOW_STAGES[context.result] if rank in each.ranks)
    return next((each for each in found if set(each.ranks).issubset(context.paced)), None)


def _take_pace_of_stages(schedules: EditableSchedules, context: Context, rank: int, slow: SlowStage) -> None:
    """A rank of a slow pipeline stage takes the pace of the stages that do the same work."""
    schedules.steps_alike, schedules.settling = False, 0
    ops = schedules.ops[rank]
    if schedules.hosts:
        paused = float(slow.left[slow.row]) if slow.row is TimeCategory.HOST else slow.host
        launch_sooner(schedules, context, rank, pausing(context.result, rank), 1 - paused)
        for op in ops:
            op.scale_device(slow.compute)
            if op.host is not None:
                op.host.scale_rows((HostTime.OPERATORS, HostTime.OTHER), slow.host)
                op.host.scale_rows((HostTime.COLLECTION, HostTime.PAUSES), paused)
        return
    recorded = context.recorded.schedules
    span = recorded.slice_of(rank)
    left = at_other_stages_pace(context.result, context.recorded, [slow], with_hosts=False).own_ns[span]
    share = np.divide(left, recorded.own_ns[span], out=np.ones(len(ops)), where=recorded.own_ns[span] > 0)
    for op, of_op in zip(ops, share.tolist(), strict=True):
        op.scale_device(of_op)


def _set_pace(schedules: EditableSchedules, rank: int, pace: Pace) -> None:
    """The ops are still the recorded ones: other settings are applied later and find what this one left."""
    ops = schedules.ops[rank]
    for op, own, more_ns in zip(ops, pace.own.tolist(), pace.more_ns.tolist(), strict=True):
        op.own_ns = op.own_ns * own
        op.own_ns[TimeCategory.COMPUTE] += more_ns
    for place, lag_ns, until_ns in zip(pace.holds, pace.hold_lag_ns.tolist(), pace.hold_until_ns.tolist(), strict=True):
        if ops[place].hold_ns != NEVER:
            ops[place].hold(until_ns, lag_ns)
    schedules.start_ns[rank] -= pace.sooner_ns
    if pace.host is None:
        return
    begun = 0
    for place, part in enumerate(op.host or HostPart.none() for op in ops):
        end = begun + len(part.launches)
        part.own_ns = part.own_ns * pace.host.own[place] + pace.host.more_ns[place]
        part.launches[:, :HOST_ROWS] *= pace.host.launches[begun:end]
        part.launches[:, OF_DEVICE_ROWS:] *= pace.own[place]
        begun = end
    for place in pace.host.unusual:
        ops[place] = replace(ops[place], kind=OpKind.NOTE, rank_op=None)
    for place, lag_ns in zip(pace.host.sooner.tolist(), pace.host.sooner_lag_ns.tolist(), strict=True):
        ops[place].lag_ns = lag_ns
    schedules.hosts[rank] = replace(schedules.hosts[rank], lead_ns=pace.host.lead_ns)


def _compute(schedules: EditableSchedules, context: Context, name: str, value: str) -> Uncertainty:
    """Computation ``value`` times as fast. The step cannot get shorter than what its host does meanwhile."""
    speed = factor(name, value)
    schedules.scale(TimeCategory.COMPUTE, 1 / speed)
    if speed > 1 and not schedules.hosts:
        for rank in schedules.ops:
            schedules.at_least(rank, context.host_busy_ns(rank))
    return Uncertainty(less=0.10, more=0.0)


def keep_copies(schedules: EditableSchedules, context: Context, settings: Mapping[str, str]) -> Uncertainty:
    """No step is shorter than the copies that its ranks make beside their computation: a stream makes one after the
    other. A rank at its peers' pace makes them as quickly as these. Where they set the pace, devices wait for them no
    longer than that; so where the ``settings`` let hosts run ahead, which then issue those of batches a step earlier.
    With sharding they may be of offloaded parameters, which each unit needs anew, and which some settings make
    unnecessary. Whether hosts have a batch a step earlier is not sure.
    """
    if any(name.startswith(_OF_SHARDING) for name in settings):
        return FULL
    copying = {rank: float(context.result.copied_beside_ns[rank].mean()) for rank in schedules.ops}
    ahead = settings.get(_HOST_SYNC) == "0" and _SCATTERS not in context.result.matched_before.instances.kinds
    hidden_ns = 0.0
    for rank, ns in copying.items():
        paced = ns >= _PACED_BY_COPIES * context.result.step_ns
        if ahead or paced:
            by_ns = _hide_copies(schedules, context, rank, ns)
            hidden_ns = max(hidden_ns, 0.0 if paced else by_ns)
        others = context.peers[rank].ranks if rank in context.paced and rank in context.peers else (rank,)
        schedules.at_least(rank, min(ns, float(np.median([copying[other] for other in others]))))
    return Uncertainty(0.0, 0.0, slower_ns=hidden_ns)


def _hide_copies(schedules: EditableSchedules, context: Context, rank: int, copying_ns: float) -> float:
    """No device of a rank waits for the copies beside its computation, which take so long per step; returns how long it
    did, ns per step.
    """
    exposed_ns = float(context.result.totals[rank][:, TimeCategory.COPY].mean())
    hidden_ns = min(copying_ns, exposed_ns)
    if hidden_ns > 0:
        for op in schedules.ops[rank]:
            op.scale(TimeCategory.COPY, 1 - hidden_ns / exposed_ns)
    return hidden_ns


def _idle(
    row: TimeCategory, why_not: str, schedules: EditableSchedules, context: Context, name: str, value: str
) -> Uncertainty:
    """``value`` times the idle time of one category. Raises CannotReplay, with ``why_not``, for a job on CPUs."""
    share = _share(name, value)
    if not context.on_devices:
        if blind_ranks(context.result, context.runs):
            raise CannotReplay("the recording has no device events, so what devices wait for is not known")
        raise CannotReplay(f"the job ran on CPUs: {why_not}")
    schedules.scale(row, share)
    if row is TimeCategory.SYNC:
        partials = context.result.partials.items()
        schedules.without_host_waits(share, [rank for rank, partial in partials if partial.collectives.on_host])
    else:
        for rank in schedules.ops:
            launch_sooner(schedules, context, rank, context.result.timelines[rank].where(row), 1 - share)
    # Without hosts, communication that starts late because its host is, and waits for such ranks, are not in that row.
    return Uncertainty(less=0.25, more=0.15 if schedules.hosts else 0.40)


def _collections(schedules: EditableSchedules, context: Context, name: str, value: str) -> Uncertainty:
    """``value`` times the garbage collection that delays hosts; 0: none, or only between the recorded steps."""
    lost = {rank: collecting(context.result, rank) for rank in schedules.ops}
    if not any(each.within(*context.result.windows[rank]).any() for rank, each in lost.items()):
        if context.runs:
            raise CannotReplay("no garbage was collected in the recorded steps, at least not on the training threads")
        raise CannotReplay("no garbage collection is recorded; record with perfscope run, which names it")
    return _shorten_host(schedules, context, _share(name, value), lost, (HostTime.COLLECTION,))


def _pauses(schedules: EditableSchedules, context: Context, name: str, value: str) -> Uncertainty:
    """``value`` times the pauses in which hosts run no operator and make no call."""
    lost = {rank: pausing(context.result, rank) for rank in schedules.ops}
    if not any(map(len, lost.values())):
        raise CannotReplay("nothing waits for a host that pauses")
    return _shorten_host(schedules, context, _share(name, value), lost, (HostTime.COLLECTION, HostTime.PAUSES))


def _shorten_host(
    schedules: EditableSchedules,
    context: Context,
    left: float,
    lost: Mapping[int, Intervals],
    rows: Collection[HostTime],
) -> Uncertainty:
    """``left`` of what hosts do by ``rows``, for which the device of each rank is idle in ``lost``.

    Without hosts beside their devices it is taken from all host time of the step in proportion.
    """
    schedules.steps_alike = False
    lost_ns = {rank: each.within(*context.result.windows[rank]) for rank, each in lost.items()}
    for index, rank in enumerate(context.recorded.schedules.ranks):
        # What made a rank come late to its first window was such a pause, too, as far as one of them is as long.
        longest = int(lost_ns[rank].max(initial=0))
        schedules.start_ns[rank] -= round((1 - left) * min(longest, late_by(context.recorded, index)))
    for rank in schedules.ops:
        launch_sooner(schedules, context, rank, lost[rank], 1 - left)
    if schedules.hosts:
        for op in chain.from_iterable(schedules.ops.values()):
            if op.host is not None:
                op.host.scale_rows(rows, left)
        return Uncertainty(less=0.25, more=0.05)
    for rank, ops in schedules.ops.items():
        of_steps = dict(zip(context.result.steps.tolist(), lost_ns[rank].tolist(), strict=True))
        host: defaultdict[int | None, float] = defaultdict(float)
        for op in ops:
            host[op.step] += op.own_ns[TimeCategory.HOST]
        for op in ops:
            in_step = of_steps.get(op.step, 0) if op.step is not None else 0
            if in_step and host[op.step]:
                op.own_ns[TimeCategory.HOST] *= max(1 - (1 - left) * in_step / host[op.step], 0.0)
    return Uncertainty(less=0.25, more=0.05)


def _share(name: str, value: str) -> float:
    return number(name, value, "the share of the cost that is left, from 0 (none) to 1 (all) or more", "x", zero=True)


def _bandwidth(schedules: EditableSchedules, context: Context, name: str, value: str) -> Uncertainty:
    """Every byte moves ``value`` times as fast; latencies stay."""
    return _scale_transfers(schedules, context, name, of_latency=1.0, of_bytes=1 / factor(name, value))


def _slow_steps(schedules: EditableSchedules, context: Context, name: str, value: str) -> Uncertainty:
    """``value`` times what transfers take longer in the steps in which the network is slow."""
    left, slow = _share(name, value), slow_transfer_steps(context.result)
    if not slow:
        raise CannotReplay(f"{name}: transfers take about as long in all recorded steps")
    schedules.steps_alike, schedules.settling = False, 0
    for rank_op in schedules.issued():
        step = rank_op.collective.step
        times = 1.0 if step is None else slow.get(step, 1.0)
        rank_op.transfer_ns *= (1 + left * (times - 1)) / times
    return Uncertainty(less=0.10, more=0.10)


def _latency(schedules: EditableSchedules, context: Context, name: str, value: str) -> Uncertainty:
    """Latencies are ``value`` times what they were; bytes move as before."""
    return _scale_transfers(schedules, context, name, of_latency=factor(name, value), of_bytes=1.0)


def _scale_transfers(
    schedules: EditableSchedules, context: Context, name: str, of_latency: float, of_bytes: float
) -> Uncertainty:
    """By the cost model t(S) = alpha + S / B of each group and kind."""
    between_ranks = {one: rank_ops for one, rank_ops in schedules.collectives().items() if one.size >= 2}
    if not between_ranks:
        raise CannotReplay(f"{name}: the recording holds no collective between ranks")
    for collective, rank_ops in between_ranks.items():
        for rank_op in rank_ops:
            latency = _latency_ns(context, collective, rank_op.transfer_ns)
            rank_op.transfer_ns = latency * of_latency + (rank_op.transfer_ns - latency) * of_bytes
    keep_host_pace(schedules, context)
    return Uncertainty(less=0.10, more=0.10)


def _latency_ns(context: Context, collective: Collective, transfer_ns: float) -> float:
    """Latency part of a transfer, ns."""
    model = context.model_of(collective.group, collective.kind)
    if model is not None and context.latencies.is_shown(collective.group, collective.kind, model.alpha_ns):
        return min(transfer_ns, model.alpha_ns)
    return transfer_ns if collective.kind == "barrier" else context.latency_ns(collective, transfer_ns)


_launches = partial(_idle, TimeCategory.LAUNCH, "operators are its compute, so there are no launches to save")
"""Launches and framework operators; 0 is what CUDA graphs come close to."""
_syncs = partial(_idle, TimeCategory.SYNC, "the job has no device that a call could wait for")
"""Calls that wait for the device; 0: nothing waits for it."""

SETTINGS = (
    Setting("network.bandwidth", "FACTORx", "every link this many times as fast", _bandwidth, 2, with_hosts=True),
    Setting("network.latency", "FACTORx", "latency of every collective times this", _latency, 2, with_hosts=True),
    Setting("network.slow_steps", "SHARE", "the share of what transfers take longer in few steps that is left; 0: none",
            _slow_steps, 2, with_hosts=True),
    Setting("rank.*", "peers", "rank N at its peers' pace: the median of the ranks that do the same work",
            _rank_at_peers_pace, -1, with_hosts=True),
    Setting(WORK_OF_RANKS, "even", "work spread evenly: the mean of the ranks that do the same work",
            _work_spread_evenly, -1, with_hosts=True),
    Setting("compute", "FACTORx", "compute this many times as fast", _compute, 0, with_hosts=True),
    Setting("host.launch", "SHARE", "the share of launch and operator overhead that is left; 0: none",
            _launches, 0, with_hosts=True, of_host_work=True),
    Setting(_HOST_SYNC, "SHARE", "the share of idle time behind synchronizing calls that is left; 0: none",
            _syncs, 0, with_hosts=True, of_host_work=True),
    Setting("host.gc", "SHARE", "the share of garbage collection that is left; 0: none",
            _collections, 0, with_hosts=True, of_host_work=True),
    Setting("host.pauses", "SHARE", "the share of pauses of hosts between operators that is left; 0: none",
            _pauses, 0, with_hosts=True, of_host_work=True),
)  # fmt: skip
