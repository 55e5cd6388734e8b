"""The latency of a collective whose group and kind moved one size only.

A cost model needs two sizes. Where a group moved one, other collectives over the same kind of link (inside a host, or
between hosts) show the latency: t = alpha + f(n) · S / B is fitted to all of them together, and used where it gives the
group's own times back; else a collective of a few bytes is all latency. Where there is neither, what a slow network
would not take for the bytes of a small collective is latency, if that is long; else it is assumed. A
prediction shows how much depends on that: it is also replayed with a fifth and with five times of an assumed latency,
and with half and twice of one known from other groups. A small collective that takes longer than both may be nearly
all latency, of a slow network, or nearly all bytes: then it is also replayed as all latency but for what the quickest
link takes for the bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.blocks import Blocks
from perfscope.analyzers.job.collectives.cost_model import fit, is_transfer, transfers_ns
from perfscope.analyzers.job.collectives.table import bus_factor, group_size
from perfscope.frozen import dataclass

TINY: Final = 4096
"""Collectives of at most this many bytes are all latency: losses, norms, counters."""
_FACTOR_OF_OTHERS: Final = 2.0
"""A latency known from other groups may be wrong by this factor, either way: latency grows with the ranks of a
group."""
_FACTOR_ASSUMED: Final = 5.0
"""The same of an assumed latency."""
_AGREES: Final = 0.15
"""A fit to several groups is used where its relative error in a group's own times is at most this."""
_QUICK: Final = 0.1
"""What delays a transfer makes it longer. So this share of the quickest ones of a size shows best what its latency and
its bytes take: of sizes that are not far apart, small differences decide."""
_SURE: Final = 0.25
"""Error of a group's own fitted latency, as a share of it, up to which that is used as it is: two large sizes say
little of what none would take."""
_MOST_OF_IT: Final = 0.8
"""Largest share of a transfer that an assumed latency can be: the bytes take time as well."""
_FEW_BYTES: Final = 4 << 20
"""Bytes up to which a transfer between devices may be nearly all latency: a link of 100 Gbit/s takes some 0.5 ms for
them, which is what starting takes over slow networks. What takes much longer for more is the link."""
SLOW_START_NS: Final = 1e6
"""What it takes a collective between devices to start over a slow network, at most: longer ones show a slow link."""
_QUICKEST_GBPS: Final = {False: 450.0, True: 50.0}
"""Bus bandwidth of the quickest links, inside hosts (NVLink of H100) and between them (400 Gbit/s)."""
_NVLINK_GBPS: Final = 100.0
"""Bus bandwidth that only links between devices of one host reach."""
_SLOW_GBPS: Final = 0.1
"""Bus bandwidth of a slow link, gigabit Ethernet. What a small collective takes beyond that is latency: of busy hosts,
whose threads wait for a core each time."""
_SMALL: Final = 256 << 10
"""Bytes up to which that holds. A larger collective that is slower still shows a slower link, or one that is shared: as
latency, its time would be thousands of times the usual one."""
_ASSUMED_NS: Final = {"nvlink": 20_000.0, "nccl": 50_000.0, "other": 100_000.0}
"""Small all-reduces: of NCCL over NVLink, over PCIe or a network (nccl-tests), and of backends on CPUs over sockets."""


@dataclass(frozen=True)
class Latency:
    """Of one group and kind, ns, which may be wrong by ``factor`` either way. ``known``: from the recording; else it is
    assumed, and at most a share of a transfer.
    """

    ns: float
    known: bool
    factor: float = 1.0
    most_share: float = 0.0
    """Share of a transfer that it may be whatever is assumed; 0: no more than that and ``factor`` allow for."""

    @property
    def allowed(self) -> str:
        """In words, what low and high allow for where it is assumed."""
        if self.most_share:
            return f"a fifth of that and for {self.most_share:.0%} of each transfer"
        return "a fifth and five times that"

    def of(self, transfer_ns: float, leaning: int = 0) -> float:
        """The latency in a transfer; ``leaning`` -1 and 1 are the least and the most that it may be."""
        likely = min(self.ns * self.factor**leaning, transfer_ns * (1.0 if self.known else _MOST_OF_IT))
        return max(likely, transfer_ns * self.most_share) if leaning > 0 else likely


@dataclass(frozen=True)
class _TransferSize:
    """A size that a group moved: over the busiest link ``wire`` bytes, in ``time_ns`` (median), undelayed in
    ``quick_ns``, which may be off by ``error_ns``. ``far``: between hosts.
    """

    group: int
    kind: str
    bytes: int
    wire: float
    time_ns: float
    quick_ns: float
    error_ns: float
    far: bool


def beyond_slow_link_ns(moved_bytes: float, wire_bytes: float, time_ns: float) -> float:
    """What a collective of ``moved_bytes``, ``wire_bytes`` over its busiest link, takes longer than a slow link would
    take for them: its latency, as far as its own time shows one. 0 for one that is not small.
    """
    return max(time_ns - wire_bytes / _SLOW_GBPS, 0.0) if moved_bytes <= _SMALL else 0.0


class Latencies:
    """Latencies of all groups and kinds of a recording."""

    def __init__(self, result: AlignedJob) -> None:
        self._result = result
        self._known: dict[tuple[int, str], Latency] = {}

    @functools.cached_property
    def _sizes(self) -> tuple[_TransferSize, ...]:
        return tuple(_sizes(self._result))

    @functools.cached_property
    def _of_all_groups(self) -> dict[bool, tuple[float, float] | None]:
        """(alpha, slope) fitted to all groups inside hosts (False), and to all between hosts (True)."""
        return {far: _fitted([one for one in self._sizes if one.far is far]) for far in (False, True)}

    def of(self, group: int, kind: str) -> Latency:
        """Of a kind of collective in a group (index in ``Instances``) whose own sizes do not show it."""
        key = group, kind
        if key not in self._known:
            self._known[key] = self._of([one for one in self._sizes if (one.group, one.kind) == key], group)
        return self._known[key]

    def usual(self, group: int, kind: str) -> tuple[int, float] | None:
        """(bytes, median ns) of the largest size that a kind of collective in a group moved; None for none."""
        return self._largest.get((group, kind))

    @functools.cached_property
    def _largest(self) -> dict[tuple[int, str], tuple[int, float]]:
        """(group, kind) -> as ``usual``."""
        largest: dict[tuple[int, str], _TransferSize] = {}
        for one in self._sizes:
            if (key := (one.group, one.kind)) not in largest or one.wire > largest[key].wire:
                largest[key] = one
        return {key: (one.bytes, one.time_ns) for key, one in largest.items()}

    def is_shown(self, group: int, kind: str, alpha_ns: float) -> bool:
        """Do a group's own sizes show the latency ``alpha_ns`` that was fitted to them, or does nothing else?"""
        own = [one for one in self._sizes if (one.group, one.kind) == (group, kind)]
        return len(own) < 2 or _alpha_error_ns(own) <= _SURE * alpha_ns or not self.of(group, kind).known

    def _of(self, own: list[_TransferSize], group: int) -> Latency:
        largest = max(own, key=lambda one: one.wire, default=None)
        if largest is None:
            return Latency(_ASSUMED_NS["nccl" if self._on_devices() else "other"], False, _FACTOR_ASSUMED)
        if largest.bytes <= TINY:
            return Latency(largest.time_ns, True)
        together = self._of_all_groups[largest.far]
        if together is not None:
            alpha, slope = together
            if abs(alpha + slope * largest.wire - largest.quick_ns) <= _AGREES * largest.quick_ns:
                return Latency(self._with_usual(alpha, largest.far), True, _FACTOR_OF_OTHERS)
        alike = [one for one in self._sizes if one.bytes <= TINY and one.far is largest.far]
        if alike:
            # Those of the same group used the same links; of others, the typical one.
            times = [one.time_ns for one in alike if one.group == group] or [one.time_ns for one in alike]
            return Latency(float(np.median(times)), True, _FACTOR_OF_OTHERS)
        waited_ns = beyond_slow_link_ns(largest.bytes, largest.wire, largest.time_ns)
        if waited_ns > _FACTOR_ASSUMED * self._usual_ns(largest):
            return Latency(waited_ns, True, _FACTOR_OF_OTHERS)
        return Latency(self._usual_ns(largest), False, _FACTOR_ASSUMED, self._most_share(largest))

    def _most_share(self, largest: _TransferSize) -> float:
        """Share of its time that the latency of a small transfer may be: all but what the quickest link takes, unless
        that is too long for a start.
        """
        if not self._on_devices() or largest.bytes > _FEW_BYTES:
            return 0.0
        most_ns = min(largest.time_ns - largest.wire / _QUICKEST_GBPS[largest.far], SLOW_START_NS)
        return max(most_ns / largest.time_ns, 0.0)

    def _usual_ns(self, largest: _TransferSize) -> float:
        """What is assumed."""
        quick = not largest.far and largest.wire >= _NVLINK_GBPS * (largest.time_ns - _ASSUMED_NS["nvlink"])
        return _ASSUMED_NS["nvlink" if quick else "nccl" if self._on_devices() else "other"]

    def _with_usual(self, alpha: float, far: bool) -> float:
        """A fitted latency and the usual one, weighted by how sure each is: a few transfers that vary show little."""
        moved = [one for one in self._sizes if one.far is far]
        error = _alpha_error_ns(moved)
        usual = self._usual_ns(max(moved, key=lambda one: one.wire))
        return (alpha * usual**2 + usual * error**2) / (usual**2 + error**2)

    def _on_devices(self) -> bool:
        return any(partial.has_device_work for partial in self._result.partials.values())


def _alpha_error_ns(moved: list[_TransferSize]) -> float:
    """Error of the latency that the smallest and the largest of different sizes show."""
    low, high = min(moved, key=lambda one: one.wire), max(moved, key=lambda one: one.wire)
    if high.wire <= low.wire:
        return math.inf
    return math.hypot(high.wire * low.error_ns, low.wire * high.error_ns) / (high.wire - low.wire)


def _sizes(result: AlignedJob) -> Iterable[_TransferSize]:
    """Every group's and kind's sizes."""
    instances = result.matched.instances
    transfer = transfers_ns(result.matched)
    usable = np.flatnonzero(is_transfer(instances) & (instances.bytes > 0) & (transfer > 0))
    alike = Blocks.of(instances.group[usable], instances.kind[usable], instances.bytes[usable])
    for begin, count in zip(alike.first.tolist(), alike.size.tolist(), strict=True):
        chosen = usable[alike.order[begin : begin + count]]
        group, size = int(instances.group[chosen[0]]), int(instances.bytes[chosen[0]])
        kind = instances.kinds[instances.kind[chosen[0]]]
        factor = bus_factor(kind, group_size(instances, group))
        if factor is not None:
            hosts = {result.hosts.names.get(rank, "") for rank in instances.groups[group].ranks}
            quick, usual = np.quantile(transfer[chosen], _QUICK, method="lower"), np.median(transfer[chosen])
            error = (usual - quick) / math.sqrt(count)
            far = len(hosts) > 1
            yield _TransferSize(group, kind, size, factor * size, float(usual), float(quick), float(error), far)


def _fitted(moved: list[_TransferSize]) -> tuple[float, float] | None:
    """(alpha, slope) of all of them together, over the bytes on the wire; None where these are too similar."""
    model = fit(np.array([one.wire for one in moved]), np.array([one.quick_ns for one in moved])) if moved else None
    return None if model is None else model[:2]
