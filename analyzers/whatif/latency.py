"""What a collective costs however few its bytes, where its own group and kind moved one size only.

A cost model needs two sizes. Where a group moved one, other collectives that crossed the same kind of link (inside a
host, or between hosts) tell: t = alpha + f(n) · S / B is fitted to all of them together, and taken where it gives the
group's own times back; or a collective of a few bytes, which is all latency. Where nothing tells, latency is assumed,
and a prediction says how much hangs on that: it is played with a fifth and with five times of what is assumed as well,
with half and twice of what other groups tell.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.analyzers.blocks import Blocks
from perfscope.analyzers.collectives.cost_model import fit
from perfscope.analyzers.collectives.table import bus_factor, group_size, instance_transfer_ns
from perfscope.analyzers.comparison import Comparison

TINY: Final = 4096
"""Collectives of at most so many bytes are all latency: losses, norms, counters."""
_TOLD: Final = 2.0
"""What other groups tell may be wrong by this factor, either way: latency grows with the ranks of a group."""
_ASSUMED: Final = 5.0
"""The same of what is assumed."""
_AGREES: Final = 0.15
"""Relative error up to which a fit to several groups gives one group's own times back."""
_MOST_OF_IT: Final = 0.8
"""Share of a transfer that an assumed latency can be: more, and its bytes would have travelled for nothing."""
_NVLINK_GBPS: Final = 100.0
"""Bus bandwidth that only links between devices of one host reach."""
_ASSUMED_NS: Final = {"nvlink": 20_000.0, "nccl": 50_000.0, "other": 100_000.0}
"""Small all-reduces: of NCCL over NVLink, over PCIe or a network (nccl-tests), and of backends on CPUs over sockets."""


@dataclass(frozen=True)
class Latency:
    """Of one group and kind, ns, which may be wrong by ``factor`` either way. ``known``: the recording tells; else it
    is assumed, and at most a share of what a transfer takes.
    """

    ns: float
    known: bool
    factor: float = 1.0

    def of(self, transfer_ns: float, leaning: int = 0) -> float:
        """The latency in a transfer; ``leaning`` -1 and 1 are the least and the most that it may be."""
        return min(self.ns * self.factor**leaning, transfer_ns * (1.0 if self.known else _MOST_OF_IT))


@dataclass(frozen=True)
class _Moved:
    """A size that a group moved: over the busiest link ``wire`` bytes, in ``time_ns`` (median). ``far``: between
    hosts.
    """

    group: int
    kind: str
    bytes: int
    wire: float
    time_ns: float
    far: bool


class Latencies:
    """Latencies of all groups and kinds of a recording."""

    def __init__(self, result: Comparison) -> None:
        self._result = result
        self._found: dict[tuple[int, str], Latency] = {}

    @functools.cached_property
    def _moved(self) -> tuple[_Moved, ...]:
        return tuple(_moved(self._result))

    @functools.cached_property
    def _together(self) -> dict[bool, tuple[float, float] | None]:
        """What is fitted to all groups inside hosts, and to all between hosts."""
        return {far: _fitted([one for one in self._moved if one.far is far]) for far in (False, True)}

    def of(self, group: int, kind: str) -> Latency:
        """Of a kind of collective in a group (index in ``Instances``) whose own sizes do not tell."""
        key = group, kind
        if key not in self._found:
            self._found[key] = self._of([one for one in self._moved if (one.group, one.kind) == key], group)
        return self._found[key]

    def _of(self, own: list[_Moved], group: int) -> Latency:
        largest = max(own, key=lambda one: one.wire, default=None)
        if largest is None:
            return Latency(_ASSUMED_NS["nccl" if self._on_devices() else "other"], False, _ASSUMED)
        if largest.bytes <= TINY:
            return Latency(largest.time_ns, True)
        together = self._together[largest.far]
        if together is not None:
            alpha, slope = together
            if abs(alpha + slope * largest.wire - largest.time_ns) <= _AGREES * largest.time_ns:
                return Latency(alpha, True, _TOLD)
        alike = [one for one in self._moved if one.bytes <= TINY and one.far is largest.far]
        if alike:
            # Those of the same group came the same way; of others, the typical one.
            times = [one.time_ns for one in alike if one.group == group] or [one.time_ns for one in alike]
            return Latency(float(np.median(times)), True, _TOLD)
        quick = not largest.far and largest.wire / largest.time_ns >= _NVLINK_GBPS
        return Latency(_ASSUMED_NS["nvlink" if quick else "nccl" if self._on_devices() else "other"], False, _ASSUMED)

    def _on_devices(self) -> bool:
        return any(partial.has_device_work for partial in self._result.partials.values())


def _moved(result: Comparison) -> Iterable[_Moved]:
    """Every group's and kind's sizes; of collectives whose participants are all in the recording."""
    instances = result.matched.instances
    transfer = instance_transfer_ns(result.matched)
    usable = np.flatnonzero(instances.complete & (instances.participants > 1) & (instances.bytes > 0) & (transfer > 0))
    alike = Blocks.of(instances.group[usable], instances.kind[usable], instances.bytes[usable])
    for begin, count in zip(alike.first.tolist(), alike.size.tolist(), strict=True):
        chosen = usable[alike.order[begin : begin + count]]
        group, size = int(instances.group[chosen[0]]), int(instances.bytes[chosen[0]])
        kind = instances.kinds[instances.kind[chosen[0]]]
        factor = bus_factor(kind, group_size(instances, group))
        if factor is not None:
            hosts = {result.hosts.names.get(rank, "") for rank in instances.groups[group].ranks}
            yield _Moved(group, kind, size, factor * size, float(np.median(transfer[chosen])), len(hosts) > 1)


def _fitted(moved: list[_Moved]) -> tuple[float, float] | None:
    """(alpha, slope) of all of them together, over the bytes on the wire; None where these are too much alike."""
    found = fit(np.array([one.wire for one in moved]), np.array([one.time_ns for one in moved])) if moved else None
    return None if found is None else found[:2]
