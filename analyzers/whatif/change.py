"""What every setting builds on: the question's context, what a transfer takes, how sure a change is, how it is refused.

A setting is registered under the name that the user types (``network.bandwidth``). It gets the value as typed and edits
the schedules in place, or raises ``CannotReplay`` with the reason. Settings are applied in their ``order``, however
they were asked for: first which ranks change pace, then the work itself, then what is sent, then how fast.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, field, replace
from typing import Final

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.asleep import asleep_shares, waits_for_network
from perfscope.analyzers.job.collectives.cost_model import CostModel
from perfscope.analyzers.job.cores import SharedCores
from perfscope.analyzers.job.unprofiled import LongStepShare
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.replay.engine import OpKind, ReplayResult
from perfscope.analyzers.replay.engine import replay as replay_schedules
from perfscope.analyzers.replay.latency import Latencies, Latency
from perfscope.analyzers.replay.pace import Pace, pace_of
from perfscope.analyzers.replay.peers import Peers, find_peers
from perfscope.analyzers.replay.schedules import RecordedSchedules
from perfscope.analyzers.replay.step_time import is_trusted
from perfscope.analyzers.whatif.schedules.editable import EditableSchedules
from perfscope.analyzers.whatif.schedules.ops import Collective, RankOp
from perfscope.analyzers.whatif.schedules.recorded import editable_schedules, waits_for_absent
from perfscope.analyzers.whatif.unprofiled import ProfilerCost, profiler_costs
from perfscope.errors import UnusableInput
from perfscope.frozen import dataclass
from perfscope.recording.metadata import RunMetadata
from perfscope.trace.trace import WHOLE_GRAPH, Int64

_AS_LONG: Final = 0.01
"""Share of a step that decides nothing: ranks without whose waits it is no more than that shorter set no pace."""

MEMORY_GBPS: Final = 1500.0
"""What kernels that read and write gradients are taken to move: an A100's memory."""
_SIZE_ERROR: Final = 0.10
"""Least share of a transfer that a cost model may miss at sizes between and beyond the recorded ones."""
_SLOWNESS: Final = 0.5
"""Transfers of a round take at least so many times what the cost model says."""
_BEYOND_ERROR: Final = 0.03
"""What is added to that for each doubling beyond the largest recorded size: a link that lets short bursts through
faster, as shaped ones do, is slower for one transfer forty times as large (a fifth, in a real run)."""

REDUCED_ONCE: Final = "gradients are already reduced once per step"
"""Why reducing them once is refused."""


class CannotReplay(UnusableInput):
    """The change cannot be replayed from this recording; the message says why and what would help."""


class BadSetting(UnusableInput):
    """The setting or its value is not understood; the message names it and says what is."""


@dataclass(frozen=True, eq=False)
class Context:
    """What settings may look at. ``runs`` is empty for traces of other tools; ``paced`` are the ranks that take their
    peers' pace in this prediction. ``leaning`` is 0, or -1 or 1 where uncertain latencies take the least or the most
    that they may be; ``unsure`` collects those that were needed.
    """

    result: AlignedJob
    recorded: RecordedSchedules
    models: tuple[CostModel, ...]
    runs: Mapping[int, RunMetadata]
    paced: tuple[int, ...] = ()
    even: bool = False
    """Their pace is the mean of all that do the same work, not the median of the others."""
    leaning: int = 0
    unsure: dict[tuple[int, str], Latency] = field(default_factory=dict)
    unprofiled_ns: float | None = None
    """The job's step without the profiler, where that is what is predicted; None: the recorded step is."""
    ready_ns: float | None = None
    """The same with batches that are ready, where loader workers set its pace and not that of the recorded steps."""
    long_step_share: LongStepShare | None = None
    """Of the unprofiled steps, where the recorded ones hold another share of them: ``unprofiled_ns`` is then that of as
    many."""
    shared_cores: tuple[SharedCores, ...] = ()
    """Of each host that was sampled, who had its cores."""
    with_hosts: bool = False
    """Hosts are replayed beside their devices."""
    own_ns_of: Mapping[int, Int64] | None = None
    """Rank -> own time before each of its ops, without what the profiler adds; None where that is as recorded."""

    def refuse_cleared(self, name: str) -> None:
        """Raise CannotReplay where backward passes do not sum up their gradients, or may be of several steps."""
        for partial in self.result.partials.values():
            if not partial.steps.marked:
                raise CannotReplay(
                    f"{name}: no steps were found, and what seem to be micro-batches may be steps; record with "
                    "perfscope run, or call prof.step() at the end of each"
                )
            if not partial.keeps_gradients[partial.steps.indices_of(self.result.steps)].all():
                raise CannotReplay(
                    f"{name}: gradients are cleared or used between the backward passes of a step, so none accumulate"
                )

    @functools.cached_property
    def beside_hosts(self) -> Context:
        """The same with hosts beside their devices, where that replays what was recorded."""
        if self.recorded.with_hosts is None:
            return self
        other = replace(self, with_hosts=True)
        other.__dict__["latencies"] = self.latencies
        return other if is_trusted(self.recorded, other.unchanged, self.result.step_ns) else self

    @functools.cached_property
    def unchanged(self) -> ReplayResult:
        """The recorded steps, replayed as they are."""
        with_hosts = self.recorded.with_hosts if self.with_hosts else None
        return replay_schedules(self.recorded.schedules if with_hosts is None else with_hosts)

    @functools.cached_property
    def profiler(self) -> ProfilerCost | None:
        """What the profiler adds, to be taken out of what is replayed; None where the recorded step is predicted."""
        return self._profiler_costs[0] if self._profiler_costs else None

    @property
    def events_cost_all(self) -> bool:
        """Is all that the profiler made longer taken out of the hosts' events?"""
        return self.profiler is not None and self.profiler.whole and self.profiler.event_ns > 0

    @functools.cached_property
    def with_other_costs(self) -> list[Context]:
        """The same with what else the profiler may have cost; empty on devices."""
        others = [replace(self, unsure={}) for _ in self._profiler_costs[1:]]
        for other, cost in zip(others, self._profiler_costs[1:], strict=True):
            other.__dict__.update(_profiler_costs=(cost,), unchanged=self.unchanged, latencies=self.latencies)
        return others

    @functools.cached_property
    def _profiler_costs(self) -> tuple[ProfilerCost, ...]:
        if self.unprofiled_ns is None:
            return ()
        asleep = asleep_shares(self.result, self.runs)
        of_network = waits_for_network(self.runs, self.recorded.transfers_ns())
        ready, step_ns = self.ready_ns is not None, self.ready_ns or self.unprofiled_ns
        return profiler_costs(
            self.result, self.recorded, step_ns, asleep, of_network=of_network, with_hosts=self.with_hosts, ready=ready
        )  # fmt: skip

    @functools.cached_property
    def longer_with_absent(self) -> float | None:
        """The recorded step over the one in which ranks that are not in the recording never come after the others,
        where both are as long: whatever they came late for, recorded ranks waited for as well. None where they set the
        pace, and where all ranks are recorded.
        """
        if not waits_for_absent(self.result, self.recorded):
            return None
        schedules = editable_schedules(self.result, self.recorded, with_hosts=self.with_hosts)
        schedules.free_of_absent(never_late=True)
        replayed = replay_schedules(schedules.compiled())
        if not replayed.complete:
            return None
        longer = self.recorded.step_time_ns(self.unchanged) / max(schedules.step_ns(replayed, self.unchanged), 1.0)
        return longer if longer <= 1 + _AS_LONG else None

    @property
    def replayed_unchanged(self) -> ReplayResult:
        """What a changed replay is compared with."""
        return self.unchanged if self.profiler is None else self.profiler.replayed

    @functools.cached_property
    def correction(self) -> float:
        """The measured step over the unchanged replay, which predictions are multiplied by: the replay misses both in
        the same direction. Where steps without the profiler took longer than the recorded ones, it is that difference.
        """
        measured = self.result.step_ns if self.profiler is None else self.profiler.step_ns
        return measured / self.recorded.step_time_ns(self.replayed_unchanged)

    @functools.cached_property
    def opaque_share(self) -> float:
        """Share of the devices' time in CUDA graphs that are recorded as one kernel each."""
        graphs_ns = all_ns = 0
        for partial in self.result.partials.values():
            kernels = partial.tables.kernels
            opaque = [name.startswith(WHOLE_GRAPH) for name in kernels.names]
            graphs_ns += int(kernels.total_ns[opaque].sum())
            all_ns += int(kernels.total_ns.sum())
        return graphs_ns / all_ns if all_ns else 0.0

    @functools.cached_property
    def peers(self) -> Mapping[int, Peers]:
        """Rank -> the ranks that do the same work, itself among them; only ranks that have peers."""
        return {rank: group for group in find_peers(self.result, self.recorded) for rank in group.ranks}

    def for_question(
        self,
        schedules: EditableSchedules,
        paced: tuple[int, ...],
        leaning: int = 0,
        *,
        slower: Mapping[int, float] | None = None,
    ) -> Context:
        """The same for another question, about ``schedules``; peers and latencies are found once. ``slower``: of work
        that is spread evenly, how many times as long each slow device takes for the same; None where it is not.
        """
        peers: Mapping[int, Peers] = self.peers if paced else {}
        own_ns_of = None
        if paced and self.profiler is not None and not schedules.hosts:
            own_ns_of = schedules.own_ns_of()
            groups = {group: group.with_own_time(own_ns_of) for group in set(peers.values())}
            peers = {rank: groups[group] for rank, group in peers.items()}
        if slower:
            known = {group: replace(group, slower=slower) for group in set(peers.values())}
            peers = {rank: known[group] for rank, group in peers.items()}
        other = replace(self, paced=paced, even=slower is not None, leaning=leaning, unsure={}, own_ns_of=own_ns_of)
        other.__dict__["peers"] = peers
        other.__dict__["unchanged"] = self.unchanged
        other.__dict__["profiler"] = self.profiler
        other.__dict__["latencies"] = self.latencies
        return other

    def pace_of(self, rank: int) -> Pace:
        """One of the ``paced`` ranks at its peers' pace. It must have peers."""
        paced = [rank for rank in self.paced if rank in self.peers]
        return pace_of(
            self.recorded, self.peers[rank], rank, paced, even=self.even, with_hosts=self.with_hosts,
            own_ns_of=self.own_ns_of,
        )  # fmt: skip

    @functools.cached_property
    def on_devices(self) -> bool:
        """Does any rank compute on a device, not on the CPU?"""
        return any(partial.has_device_work for partial in self.result.partials.values())

    def host_busy_ns(self, rank: int) -> float:
        """Mean time per step in which a rank's host is neither in the loader nor in a blocking call; 0 on CPUs, whose
        own work is what is replayed.
        """
        partial = self.result.partials[rank]
        busy = partial.progress.host_busy_ns[partial.steps.indices_of(self.result.steps)]
        profiling = self.profiler.of_step(self.result, rank) if self.profiler is not None else 0.0
        return max(float(busy.mean()) - profiling, 0.0) if partial.has_device_work else 0.0

    def model_of(self, group: int, kind: str) -> CostModel | None:
        """The fitted cost of a kind of collective in a group (index in ``Instances``); None where none was fitted."""
        kinds = self.result.matched_before.instances.kinds
        for model in self.models:
            if model.group == group and kinds[model.kind] == kind:
                return model
        return None

    def transfer_error(self, rank_ops: Sequence[RankOp], sizes: Sequence[int]) -> float:
        """Share of transfers of these sizes that the cost model of ``rank_ops``'s kind may miss: what it misses at the
        recorded ones, no less than ``_SIZE_ERROR``, and more beyond the largest of ``rank_ops``.
        """
        collective = rank_ops[0].collective
        model = self.model_of(collective.group, collective.kind)
        recorded, asked = max(each.bytes for each in rank_ops), max(sizes, default=0)
        beyond = math.log2(asked / recorded) if asked > recorded > 0 else 0.0
        return max(_SIZE_ERROR, model.residual if model is not None else 0.0) + _BEYOND_ERROR * beyond

    @functools.cached_property
    def latencies(self) -> Latencies:
        """Of groups and kinds for which no cost was fitted."""
        return Latencies(self.result)

    def latency_ns(self, collective: Collective, transfer_ns: float) -> float:
        """The latency in a transfer for which no cost was fitted: known otherwise, or assumed."""
        latency = self.latencies.of(collective.group, collective.kind)
        if latency.factor > 1:
            self.unsure[collective.group, collective.kind] = latency
        return latency.of(transfer_ns, self.leaning)

    def transfer_ns(self, rank_op: RankOp, size: int) -> float:
        """Transfer of ``rank_op``'s collective (ns) were it ``size`` bytes: by the fitted model, of fewer bytes also
        by its own time, so that a network which was slow for a while still is; else by its own time and its latency,
        known or assumed. Raises CannotReplay where its bytes are not known.
        """
        collective = rank_op.collective
        if not collective.bytes:
            raise CannotReplay("the collectives' sizes are not recorded; record with shapes")
        model = self.model_of(collective.group, collective.kind)
        if model is not None and size <= collective.bytes and rank_op.transfer_ns > model.alpha_ns:
            return model.alpha_ns + (rank_op.transfer_ns - model.alpha_ns) * size / collective.bytes
        if model is not None:
            return model.alpha_ns + model.slope * size
        usual, recorded = (self._usual_transfer_ns(rank_op, bytes_) for bytes_ in (size, collective.bytes))
        delay = rank_op.transfer_ns - recorded
        # What delayed this one does not grow with its bytes; where it was quicker than others, the link was.
        return usual + delay if delay > 0 else usual * rank_op.transfer_ns / recorded

    def transfers_among_ns(self, rank_ops: Sequence[RankOp], sizes: Sequence[int]) -> list[float]:
        """Transfers (ns) of so many bytes each in place of these of one group and kind, as quick as they are on
        average: a delay of one of them does not come with each of the new ones. Errors are those of ``transfer_ns``.

        What slows a network slows what is sent; what slows the threads that send on CPUs, also what each transfer takes
        to begin.
        """
        first = rank_ops[0]
        collective = first.collective
        if not collective.bytes:
            return [self.transfer_ns(first, size) for size in sizes]
        model = self.model_of(collective.group, collective.kind)
        if model is not None and not self.on_devices:
            recorded = sum(model.alpha_ns + model.slope * each.bytes for each in rank_ops)
            slowness = sum(each.transfer_ns for each in rank_ops) / recorded if recorded else 1.0
            return [(model.alpha_ns + model.slope * size) * max(slowness, _SLOWNESS) for size in sizes]
        if model is not None:
            usual = model.slope * sum(each.bytes for each in rank_ops)
            slowness = sum(max(each.transfer_ns - model.alpha_ns, 0.0) for each in rank_ops) / usual if usual else 1.0
            return [model.alpha_ns + model.slope * size * max(slowness, _SLOWNESS) for size in sizes]
        recorded = sum(self._usual_transfer_ns(each, each.bytes) for each in rank_ops)
        slowness = sum(each.transfer_ns for each in rank_ops) / recorded
        return [self._usual_transfer_ns(first, size) * slowness for size in sizes]

    def _usual_transfer_ns(self, rank_op: RankOp, size: int) -> float:
        """Transfer (ns) of ``size`` bytes as such collectives usually take, for which no cost was fitted; where nothing
        is known of others, as ``rank_op``'s own takes.
        """
        collective = rank_op.collective
        usual = self.latencies.usual(collective.group, collective.kind)
        usual_bytes, usual_ns = usual or (collective.bytes or 1, rank_op.transfer_ns)
        latency = self.latency_ns(collective, usual_ns)
        return latency + (usual_ns - latency) * size / usual_bytes

    def part_of_transfer_ns(self, rank_op: RankOp, share: float) -> float:
        """Transfer of ``rank_op``'s collective (ns) were it that share of its bytes, which need not be known."""
        if rank_op.collective.bytes:
            return self.transfer_ns(rank_op, round(rank_op.collective.bytes * share))
        latency = self.latency_ns(rank_op.collective, rank_op.transfer_ns)
        return latency + (rank_op.transfer_ns - latency) * share

    def assumptions(self) -> tuple[str, ...]:
        """In words, what was assumed so far."""
        by_latency: dict[tuple[int, str], set[str]] = {}
        for (_, kind), latency in self.unsure.items():
            if not latency.known:
                by_latency.setdefault((round(latency.ns / 1e3), latency.allowed), set()).add(kind)
        return tuple(
            f"one size of {' and '.join(sorted(kinds))} is recorded, so latency and bandwidth cannot be separated: "
            f"{latency} µs of latency are assumed; low and high allow for {allowed}"
            for (latency, allowed), kinds in sorted(by_latency.items())
        )


def keep_host_pace(schedules: EditableSchedules, context: Context) -> None:
    """The step gets no shorter than what its host does in it, except on ranks at their peers' pace. Hosts
    beside their devices keep their pace themselves.
    """
    for rank in () if schedules.hosts else schedules.ops:
        if rank not in context.paced:
            schedules.at_least(rank, context.host_busy_ns(rank))


def launch_sooner(schedules: EditableSchedules, context: Context, rank: int, lost: Intervals, share: float) -> None:
    """Where hosts are beside their devices, that of a rank comes sooner to the first launch, for which its device
    waits, and to the first collective, which may wait for nothing else: by ``share`` of what of these waits is in
    ``lost`` (own clock).
    """
    if rank not in schedules.hosts:
        return
    side, steps = schedules.hosts[rank], context.result.partials[rank].steps
    begin = steps.start_ns[steps.indices_of(context.recorded.steps[:1])]

    def sooner_ns(wait_ns: float) -> int:
        return round(share * int(lost.within(begin, begin + round(max(wait_ns, 0)))[0]))

    schedules.hosts[rank] = replace(side, lead_ns=side.lead_ns + sooner_ns(-side.lead_ns))
    first = next((op for op in schedules.ops[rank] if op.kind is OpKind.ISSUE), None)
    if first is not None:
        first.lag_ns -= sooner_ns(first.lag_ns)


@dataclass(frozen=True)
class Uncertainty:
    """By which share the saving of a change may be smaller or larger than predicted, because its model is not complete.

    ``either_ns`` is the error of the step, ns, however little is saved: where a change makes one thing shorter and
    another longer, the difference does not show it. The step may take ``slower_ns`` longer and ``faster_ns`` less,
    whatever is saved.
    """

    less: float
    more: float
    either_ns: float = 0.0
    slower_ns: float = 0.0
    faster_ns: float = 0.0

    @classmethod
    def worst(cls, several: Iterable[Uncertainty]) -> Uncertainty:
        """The largest of each; nothing where there are none."""
        every = [astuple(one) for one in several] or [astuple(FULL)]
        return cls(*(max(column) for column in zip(*every, strict=True)))


FULL: Final = Uncertainty(0.0, 0.0)
"""The replay leaves nothing out that is known."""

Apply = Callable[[EditableSchedules, Context, str, str], Uncertainty]
"""(schedules, context, name as typed, value as typed) -> how sure. Edits the schedules; raises CannotReplay, or
BadSetting where the value makes no sense."""


@dataclass(frozen=True)
class Setting:
    """A setting that can be changed. ``name`` may end in ``.*`` or hold one ``*`` (``rank.*``)."""

    name: str
    value: str
    """How a value is written, for help: ``MB``, ``FACTORx``, ``true|false``."""
    help: str
    apply: Apply
    order: int
    """Lower is applied earlier: -1 ranks' pace, 0 the work itself, 1 what is sent, 2 how fast."""
    with_hosts: bool = False
    """It edits hosts beside their devices; else a host's time is its rank's."""
    of_host_work: bool = False
    """What the hosts do is what it changes, so their recorded work bounds nothing."""


def number(name: str, text: str, what: str, *units: str, zero: bool = False) -> float:
    """A number above 0 (``zero``: or 0) with one of ``units`` or none. Raises BadSetting, which asks for ``what``."""
    unit = next((unit for unit in units if text.endswith(unit)), "")
    try:
        value = float(text.removesuffix(unit))
    except ValueError:
        value = -1.0
    if not (value > 0 or (zero and value == 0)):
        raise BadSetting(f"{name}={text}: write {what}")
    return value


def factor(name: str, text: str) -> float:
    """The number in ``2x`` or ``0.5x``. Raises BadSetting."""
    return number(name, text, "a factor above 0, such as 2x or 0.5x", "x")


def whole_number(name: str, text: str, what: str, least: int = 1) -> int:
    """A whole number, at least ``least``. Raises BadSetting, which asks for ``what``."""
    if not text.isdecimal() or int(text) < least:
        raise BadSetting(f"{name}={text}: write {what}, {least} or more")
    return int(text)


def flag(name: str, text: str) -> bool:
    """``true`` or ``false``. Raises BadSetting."""
    if text.lower() not in ("true", "false"):
        raise BadSetting(f"{name}={text}: write true or false")
    return text.lower() == "true"
