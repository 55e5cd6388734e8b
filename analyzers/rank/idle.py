"""Why a device was idle: each idle gap by what the host did until it launched the work that ends the gap.

::

    device  ###|<---------------- gap ----------------->|###
    host            sync | pause | loader | op op |launch|
               ^a                                 ^s     ^b
    category        sync   host  dataloader launch launch

In this order, the first that applies counts:

- **unknown**: the file ends early, and of every step some work is missing; a CUDA graph was running whose nodes are not
  all recorded; or the next work was queued for so long that something must have run which is not recorded: all that it
  can wait for on the device had ended.
- **dependency**: the next work was queued: launched, and on the device, before the gap began. How long launches take to
  get there is what the rank's late ones take (median).
- **dataloader**: before that launch, inside the loader's ``__next__``.
- **host**: before that launch, in a pause (``pauses``): the host was in no operator and no call for longer than it
  needs between two. That is the place to look at, also where a synchronization came before it.
- **sync**: a blocking call delayed the launch by this much (``sync_delays``).
- **launch**: inside operators and runtime calls, and from the launch on.
- **host**: any other time before the launch.

Without host threads in the trace, what is left is *unknown*.
"""

from __future__ import annotations

from typing import Final
from weakref import WeakKeyDictionary, ref

import numpy as np

from perfscope.analyzers.rank.host_activity import HostActivity
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.launches import (
    DeviceWork,
    graph_launches,
    launched_before_recording,
    unlisted_graphs,
)
from perfscope.analyzers.rank.sync_delays import SyncDelays, sync_delays
from perfscope.frozen import dataclass
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import NONE, Bool, Int64, Trace

LATENCY_NS: Final = 50_000
"""A launch is on the device within this time (most take 5 to 20 µs): work that starts sooner found the device idle."""

QUEUED_NS: Final = 20_000
"""Queued work starts within this time of what it waits for. In ten recordings (A100, H100, V100, MI300X) it took at
most 18 µs; in one of which only a sample of the kernels was stored, 25 % of the step is idle for longer."""

_MANY: Final = 20
"""Gaps between queued work from which their usual length is known."""

_NODE_LATENCY_NS: Final = 5_000
"""Between two nodes of a graph a device is idle for 1 to 3 µs; longer, and something unrecorded runs."""


@dataclass(frozen=True, eq=False)
class _Gaps:
    """Idle gaps of the device with the launch of the work that follows each. Parallel arrays.

    ``launched_ns`` is the launch's start, at most the gap's end, which it is where no launch is recorded. ``queued``:
    the launch had reached the device before the gap.
    """

    start_ns: Int64
    end_ns: Int64
    call: Int64
    """Row of the launching call; NONE where it is not recorded."""
    launched_ns: Int64
    queued: Bool

    @classmethod
    def of(cls, trace: Trace, work: DeviceWork, gaps: Intervals) -> _Gaps:
        if len(gaps) == 0:
            return cls(gaps.start_ns, gaps.end_ns, gaps.start_ns, gaps.end_ns, gaps.end_ns > 0)
        following = np.searchsorted(work.start_ns, gaps.end_ns)
        known = following < len(work)
        following = np.minimum(following, len(work) - 1)
        call = np.where(known, work.launch[following], NONE)
        launched = np.where(call != NONE, np.minimum(trace.start_ns[call], gaps.end_ns), gaps.end_ns)
        early = known & launched_before_recording(trace, work)[following]
        late = (call != NONE) & (launched > gaps.start_ns) & (work.start_ns[following] == gaps.end_ns)
        latency = min(int(np.median((gaps.end_ns - launched)[late])), LATENCY_NS) if late.any() else 0
        queued = (call != NONE) & (launched + latency <= gaps.start_ns)
        return cls(gaps.start_ns, gaps.end_ns, call, launched, early | queued)

    @property
    def awaited(self) -> Bool:
        """The host launched too late."""
        return ~self.queued

    def before_launch(self) -> Intervals:
        """The part of the awaited gaps in which the host had not launched yet."""
        return Intervals.of(self.start_ns[self.awaited], self.launched_ns[self.awaited])

    def whole(self, chosen: Bool) -> Intervals:
        """Some gaps from start to end."""
        return Intervals.of(self.start_ns[chosen], self.end_ns[chosen])


@dataclass(frozen=True, eq=False)
class _Answer:
    """The delays of some gaps: their starts, ends and launches, with what the host did."""

    host: ref[HostActivity]
    asked: tuple[Int64, Int64, Int64]
    delays: SyncDelays


_KNOWN: Final[WeakKeyDictionary[DeviceWork, _Answer]] = WeakKeyDictionary()
"""The last answer about each rank's work: the time breakdown and the table of synchronizations ask for the same."""


def idle_layers(
    trace: Trace, work: DeviceWork, host: HostActivity, gaps: Intervals
) -> list[tuple[TimeCategory, Intervals]]:
    """Attribute idle gaps of the device: layers in order of precedence.

    A gap that ends before ``work`` begins ends with something that is neither work nor idle: communication, a graph.
    """
    if len(work) == 0 or len(gaps) == 0:
        return []
    if work.incomplete:
        return [(TimeCategory.UNKNOWN, gaps)]
    opaque = _opaque(trace, work, host, gaps)
    found = _Gaps.of(trace, work, gaps.subtract(opaque))
    before = found.before_launch()
    layers = [
        (TimeCategory.UNKNOWN, opaque.union(found.whole(found.queued & (found.end_ns - found.start_ns > QUEUED_NS)))),
        (TimeCategory.DEPENDENCY, found.whole(found.queued)),
        (TimeCategory.DATALOADER, before.intersect(host.loading)),
        (TimeCategory.HOST, before.intersect(host.pauses)),
        (TimeCategory.SYNC, _delays(trace, work, host, found).intervals()),
        (TimeCategory.LAUNCH, before.intersect(host.operators)),
        (TimeCategory.LAUNCH, found.whole(found.awaited & (found.call != NONE)).subtract(before)),
    ]
    return [*layers, (TimeCategory.HOST, before)] if len(host.threads) else layers


def queued_gap_ns(trace: Trace, work: DeviceWork, gaps: Intervals) -> int:
    """What a device is idle for between two pieces of work of which the second is queued (median): some 1 µs. Work that
    had to wait for its launch would begin no sooner behind the work before it. 0 where too few were queued.
    """
    found = _Gaps.of(trace, work, gaps)
    lengths = (found.end_ns - found.start_ns)[found.queued]
    lengths = lengths[lengths <= QUEUED_NS]
    return int(np.median(lengths)) if len(lengths) >= _MANY else 0


def idle_by_sync(trace: Trace, work: DeviceWork, host: HostActivity, gaps: Intervals) -> SyncDelays:
    """Which blocking call caused which part of the gaps, before the categories that come first take their time."""
    return _delays(trace, work, host, _Gaps.of(trace, work, gaps.subtract(_opaque(trace, work, host, gaps))))


def _delays(trace: Trace, work: DeviceWork, host: HostActivity, gaps: _Gaps) -> SyncDelays:
    late = gaps.awaited
    asked = gaps.start_ns[late], gaps.end_ns[late], gaps.launched_ns[late]
    known = _KNOWN.get(work)
    if known is None or known.host() is not host or not all(map(np.array_equal, known.asked, asked)):
        known = _KNOWN[work] = _Answer(ref(host), asked, sync_delays(trace, work, host, *asked))
    return known.delays


def _opaque(trace: Trace, work: DeviceWork, host: HostActivity, gaps: Intervals) -> Intervals:
    """When a CUDA graph ran whose nodes are not recorded, or not all of them."""
    graphs = graph_launches(trace)
    if len(graphs) == 0 or len(gaps) == 0:
        return Intervals.empty()
    found = _Gaps.of(trace, work, gaps)
    return _between_nodes(work, graphs, found).union(_unlisted(trace, work, host, found))


def _between_nodes(work: DeviceWork, graphs: Int64, gaps: _Gaps) -> Intervals:
    """Gaps between two recorded nodes of one launch, apart from what a device needs between two nodes."""
    calls, first = np.unique(work.launch, return_index=True)
    begun = work.start_ns[first[np.minimum(np.searchsorted(calls, gaps.call), len(calls) - 1)]]
    inside = np.isin(gaps.call, graphs) & (begun < gaps.start_ns)
    return gaps.whole(inside & (gaps.end_ns - gaps.start_ns > _NODE_LATENCY_NS))


def _unlisted(trace: Trace, work: DeviceWork, host: HostActivity, gaps: _Gaps) -> Intervals:
    """In gaps before which a graph without any recorded node was launched, the time that it may have run.

    It runs before the work that was launched after it, and has ended when a blocking call returns.
    """
    launches = trace.start_ns[unlisted_graphs(trace)]
    if len(launches) == 0:
        return Intervals.empty()
    before = np.searchsorted(work.start_ns, gaps.start_ns) - 1
    earlier = np.where(before >= 0, work.launch_start_ns(trace)[np.maximum(before, 0)], np.iinfo(np.int64).min)
    own = np.searchsorted(launches, earlier, side="right")
    running = own < np.searchsorted(launches, gaps.launched_ns)
    begin = np.maximum(launches[np.minimum(own, len(launches) - 1)], gaps.start_ns)
    # What was launched on a device without work is there at once. What came later was queued behind the graph.
    behind = gaps.queued | (gaps.end_ns - gaps.launched_ns > LATENCY_NS)
    until = np.where(behind, gaps.end_ns, gaps.launched_ns)
    if len(host.blocked_end_ns):
        _, ends = host.blocked_by_end()
        returned = ends[np.maximum(np.searchsorted(ends, until, side="right") - 1, 0)]
        until = np.where((returned > begin) & (returned < until), returned, until)
    return Intervals.of(begin[running], until[running])
