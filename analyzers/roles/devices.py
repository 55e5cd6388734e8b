"""Devices on which several roles work: who held each of them when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal

from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.analyzers.roles.waits import SideBySide, window
from perfscope.frozen import dataclass
from perfscope.grouping import grouped
from perfscope.recording.metadata import RunMetadata
from perfscope.results.categories import TimeCategory
from perfscope.results.roles.side_by_side import SharedDevice

_KnownBy = Literal["uuid", "process", "number"]

_ON_DEVICE = (TimeCategory.COMPUTE, TimeCategory.COPY, TimeCategory.COMM_WAIT, TimeCategory.COMM_TRANSFER)


@dataclass(frozen=True, eq=False)
class DeviceUse:
    """One process's work on one device."""

    role: str
    label: str
    host: str
    uuid: str
    index: int
    processes: frozenset[int]
    busy: Intervals


def uses(role: str, partials: Mapping[int, RankPartial], runs: Mapping[int, RunMetadata]) -> Iterator[DeviceUse]:
    """What the ranks of a job that work on one device each do there."""
    for rank, partial in partials.items():
        if not partial.has_device_work or len(partial.devices) != 1:
            continue
        device, run = partial.devices[0], runs.get(rank)
        yield DeviceUse(
            role=role,
            label=f"{device.name} {device.index}".strip(),
            host=(run.host if run else "") or partial.host,
            uuid=run.device.uuid if run else "",
            index=device.index,
            processes=partial.processes,
            busy=partial.timeline.where(*_ON_DEVICE),
        )


def shared_devices(used: Sequence[DeviceUse], side: SideBySide) -> tuple[SharedDevice, ...]:
    """Devices that several roles use. A device's number counts where none of its host's is masked: not all are 0."""
    rows = []
    for known_by, mine in _same(used):
        by_role = {
            role: Intervals.empty().union(*(use.busy for use in found))
            for role, found in grouped((use.role, use) for use in mine).items()
        }
        if len(by_role) < 2:
            continue
        any_of, several = Intervals.empty().union(*by_role.values()), _several(list(by_role.values()))
        rows.append(
            SharedDevice(
                device=mine[0].label,
                host=mine[0].host,
                known_by=known_by,
                shares={role: side.share(busy) for role, busy in by_role.items()},
                together_share=side.share(several),
                free_share=1 - side.share(any_of),
                hand_overs=_hand_overs(by_role, side),
            )
        )
    return tuple(rows)


def _same(used: Sequence[DeviceUse]) -> Iterator[tuple[_KnownBy, list[DeviceUse]]]:
    """Uses of one device each, and how that is known."""
    by_uuid = grouped(((use.host, use.uuid), use) for use in used if use.uuid)
    yield from (("uuid", mine) for mine in by_uuid.values())
    rest = [use for use in used if not use.uuid]
    by_process = grouped(((use.host, use.processes, use.index), use) for use in rest if use.processes)
    in_process = [use for mine in by_process.values() if len({each.role for each in mine}) > 1 for use in mine]
    yield from (("process", mine) for mine in by_process.values() if len({each.role for each in mine}) > 1)
    rest = [use for use in rest if use not in in_process]
    for host, here in grouped((use.host, use) for use in rest).items():
        if host and any(use.index for use in here):
            yield from (("number", mine) for mine in grouped((use.index, use) for use in here).values())


def _several(sets: list[Intervals]) -> Intervals:
    """When two or more of the sets are busy."""
    found, seen = Intervals.empty(), Intervals.empty()
    for busy in sets:
        found, seen = found.union(seen.intersect(busy)), seen.union(busy)
    return found


def _hand_overs(by_role: Mapping[str, Intervals], side: SideBySide) -> int:
    """Times that work of one role begins after work of another."""
    inside = {role: busy.intersect(window(side.start_ns, side.end_ns)) for role, busy in by_role.items()}
    begins = sorted((int(at), role) for role, busy in inside.items() for at in busy.start_ns)
    return sum(before != after for (_, before), (_, after) in pairwise(begins))
