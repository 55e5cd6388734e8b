"""Who holds the memory at the peak, and how it was filled over time, by place in the code."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from perfscope.analyzers.readers.snapshot import OOM, DeviceSnapshot, Snapshot
from perfscope.analyzers.snapshots.lifetimes import BEFORE, Lifetimes, lifetimes, reserved_after
from perfscope.analyzers.snapshots.sites import BEFORE as BEFORE_RECORDING
from perfscope.analyzers.snapshots.sites import PHASES, Site
from perfscope.frozen import dataclass
from perfscope.results.memory.snapshots import AllocationTimeline, HolderRow
from perfscope.trace.trace import Int64

HOLDERS: Final = 40
"""Rows of a device; the others are small."""
POINTS: Final = 300
"""Of a timeline."""

Place = tuple[Site, str]
"""Site and label."""


@dataclass(frozen=True, eq=False)
class Allocations:
    """One device's allocations with their places."""

    device: DeviceSnapshot
    lives: Lifetimes
    places: tuple[Place, ...]
    place: Int64
    """Index in ``places`` of each allocation."""
    reserved: Int64
    """Bytes held after each action."""
    of_stack: tuple[Site, ...]

    @property
    def last(self) -> int:
        """The last action; ``BEFORE`` without any."""
        return len(self.device.action) - 1

    def bytes_at(self, action: int) -> dict[int, int]:
        """Place -> bytes allocated after an action."""
        live = self.lives.live_after(action)
        totals = np.bincount(self.place[live], self.lives.size[live], len(self.places))
        return {int(place): int(totals[place]) for place in np.flatnonzero(totals)}


def allocations(snapshot: Snapshot, device: DeviceSnapshot, of_stack: tuple[Site, ...]) -> Allocations:
    """Follow a device's allocations and name their places; ``of_stack`` are the sites of the snapshot's stacks."""
    lives = lifetimes(device)
    before = (lives.begin == BEFORE) & (lives.stack == 0)
    stack = np.where(before, len(of_stack), lives.stack)
    every = (*of_stack, Site(BEFORE_RECORDING, "", None))
    kinds: dict[Place, int] = {}
    pairs, inverse = np.unique(np.stack([stack, lives.label]), axis=1, return_inverse=True)
    of_pair = [
        kinds.setdefault((every[int(at)], snapshot.labels[int(label)]), len(kinds)) for at, label in pairs.T.tolist()
    ]
    place = np.array(of_pair, dtype=np.int64)[inverse.reshape(-1)] if of_pair else np.zeros(0, dtype=np.int64)
    return Allocations(device, lives, tuple(kinds), place, reserved_after(device), of_stack)


def described(place: Place) -> dict[str, Any]:
    """A place as the fields of a row."""
    site, label = place
    return {**of_site(site), "label": label}


def of_site(site: Site) -> dict[str, Any]:
    """A site as the fields of a row."""
    call = site.call
    return {
        "phase": site.phase,
        "module": site.module,
        "function": call.function if call else None,
        "file": call.file if call else None,
        "line": call.line if call else None,
    }


def holders(found: Allocations, rank: int | None) -> Iterator[HolderRow]:
    """The places that hold most at the peak."""
    peak = found.lives.peak
    held, kept = found.bytes_at(peak), found.lives.live_after(found.last)
    whole = sum(held.values())
    live = found.lives.live_after(peak)
    for place in sorted(held, key=lambda each: -held[each])[:HOLDERS]:
        here = live & (found.place == place)
        yield HolderRow(
            rank=rank,
            device=found.device.device,
            **described(found.places[place]),
            bytes=held[place],
            share=held[place] / whole,
            allocations=int(here.sum()),
            largest_bytes=int(found.lives.size[here].max()),
            kept_bytes=int(found.lives.size[here & kept].sum()),
        )


def timeline(found: Allocations, rank: int | None) -> AllocationTimeline | None:
    """Allocated memory by phase over the actions; None without a history."""
    count = len(found.device.action)
    if count < 2:
        return None
    shown = _highest_of_each(found.lives.allocated)
    phases = np.array([PHASES.index(site.phase) for site, _ in found.places], dtype=np.int64)[found.place]
    times = found.device.time_us
    is_timed = bool(times.min() > 0)
    return AllocationTimeline(
        rank=rank,
        device=found.device.device,
        time_us=tuple((times[shown] - times[0] if is_timed else shown).astype(float).tolist()),
        is_timed=is_timed,
        allocated_bytes=_curves(found.lives, phases, shown),
        reserved_bytes=tuple(found.reserved[shown].tolist()),
    )


def _curves(lives: Lifetimes, phases: Int64, shown: Int64) -> dict[str, tuple[int, ...]]:
    """Bytes of each phase after the shown actions."""
    made = {}
    for number in np.unique(phases).tolist():
        mine = phases == number
        begun = _running(lives.begin[mine], lives.size[mine], shown)
        ended = _running(lives.end[mine], lives.size[mine], shown)
        made[PHASES[number]] = tuple((begun - ended).tolist())
    return made


def _running(at: Int64, size: Int64, shown: Int64) -> Int64:
    """The sum of sizes at or before each shown action."""
    order = np.argsort(at, kind="stable")
    sums = np.concatenate([[0], np.cumsum(size[order])])
    running: Int64 = sums[np.searchsorted(at[order], shown, side="right")]
    return running


def _highest_of_each(allocated: Int64) -> Int64:
    """The highest action of each of ``POINTS`` stretches, and the last."""
    bounds = np.unique(np.linspace(0, len(allocated), min(POINTS, len(allocated)) + 1).astype(np.int64))
    highest = [int(first + allocated[first:last].argmax()) for first, last in itertools.pairwise(bounds)]
    return np.unique(np.array([*highest, len(allocated) - 1], dtype=np.int64))


def failed(found: Allocations) -> Sequence[int]:
    """The actions that ran out of memory."""
    return np.flatnonzero(found.device.action == OOM).tolist()  # type: ignore[no-any-return]
