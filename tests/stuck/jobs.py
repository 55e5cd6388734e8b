"""Draws a random job that stands still, or one that is only slow, and says which ranks and groups it was."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.stuck import layouts
from tests.stuck.dumps import EPOCH_NS, Recorder, dump
from tests.stuck.faults import HOST_STOPS, ODD, Fault, acted, broken, draw
from tests.stuck.machine import Machine
from tests.stuck.program import Collective, Job, Messages

WATCHDOG_NS = 600_000_000_000


@dataclass(frozen=True)
class StuckJob:
    """A job at the moment of its dumps, and the truth about it."""

    seed: int
    layout: str
    machine: Machine
    faults: tuple[Fault, ...]
    """Those that ranks came to; none of a job that is only slow."""
    roots: frozenset[int]
    """Ranks that others wait for, in the end, as far as dumps can show it."""
    groups: frozenset[str]
    """Of what the roots did not join, or issued otherwise: any is right."""
    without_dump: frozenset[int]
    recorder: Recorder
    at_ns: int | None
    """When a job that is only slow was looked at."""
    own_names: bool
    healthy: Job

    @property
    def optional(self) -> frozenset[int]:
        """Other ranks at fault: nobody waits for them yet, or their dumps look like those of ranks that wait."""
        return frozenset(fault.rank for fault in self.faults) - self.roots

    def write(self, folder: Path) -> None:
        """Write the dumps of all ranks that left one."""
        rng = random.Random(self.seed)
        offsets_ns = [rng.randrange(-20_000_000, 20_000_000) for _ in range(self.machine.job.world // 8 + 1)]
        end_ns = max((each.created_ns for rank in self.machine.ranks for each in rank.issued), default=0)
        written_ns = EPOCH_NS + (end_ns + WATCHDOG_NS if self.at_ns is None else self.at_ns)
        for rank in range(self.machine.job.world):
            if rank in self.without_dump:
                continue
            path = folder / (f"rank-{rank:05d}.flight.pickle" if self.own_names else f"nccl_trace_rank_{rank}")
            at_ns = None if self.at_ns is None else self.at_ns + rng.randrange(3_000_000)
            path.write_bytes(dump(self.machine, rank, self.recorder, at_ns=at_ns, offset_ns=offsets_ns[rank // 8]))
            os.utime(path, ns=(written_ns, written_ns))

    def __str__(self) -> str:
        faults = ", ".join(f"{fault.kind} on {fault.rank}" for fault in self.faults) or "only slow"
        absent = f"; no dump of {sorted(self.without_dump)}" if self.without_dump else ""
        return f"{self.seed}: {self.layout}: {faults}{absent}; {self.recorder}"


def stuck_job(seed: int) -> StuckJob:
    """The job of a seed; every third fault is that of another rank's, and one of six jobs is only slow."""
    rng = random.Random(seed)
    while True:
        made = _slow(seed, rng) if rng.random() < 1 / 6 else _stuck(seed, rng)
        if made is not None:
            return made


def healthy(rng: random.Random) -> tuple[str, Job]:
    """A layout in words and its job."""
    steps = rng.randint(2, 6)
    kind = rng.choice(["DDP", "FSDP", "mesh", "mesh", "mesh"])
    if kind != "mesh":
        world = rng.choice([4, 8, 16, 32, 64])
        return f"{kind}, {world} ranks", (layouts.ddp if kind == "DDP" else layouts.fsdp)(rng, world, steps)
    while True:
        tp, pp, dp = rng.choice([1, 2, 4, 8]), rng.choice([1, 2, 4]), rng.choice([1, 2, 4, 8])
        if 4 <= tp * pp * dp <= 64:
            break
    ep = rng.choice([size for size in (1, 2, 4) if dp % size == 0])
    return f"TP {tp} x PP {pp} x DP {dp}, EP {ep}", layouts.mesh(rng, tp, pp, dp, ep, steps)


def _recorder(rng: random.Random) -> Recorder:
    return Recorder(
        entries=rng.choice([2000, 200, 60]),
        timing=rng.random() < 0.3,
        only_active=rng.random() < 0.15,
        frames=rng.random() < 0.5,
    )


def _slow(seed: int, rng: random.Random) -> StuckJob | None:
    layout, job = healthy(rng)
    pace = {rng.randrange(job.world): rng.uniform(1.5, 5)} if rng.random() < 0.6 else {}
    machine = Machine(job, seed, pace).run()
    end_ns = max(each.created_ns for rank in machine.ranks for each in rank.issued)
    none: frozenset[int] = frozenset()
    recorder = Recorder(entries=2000, timing=rng.random() < 0.3)
    at_ns = int(end_ns * rng.uniform(0.4, 0.95))
    words = f"{layout}, pace {pace}"
    return StuckJob(seed, words, machine, (), none, frozenset(), none, recorder, at_ns, False, job)


def _stuck(seed: int, rng: random.Random) -> StuckJob | None:
    layout, job = healthy(rng)
    kinds = [rng.choice((*HOST_STOPS, *ODD))]
    if kinds[0] in HOST_STOPS and rng.random() < 0.3:
        kinds.append(rng.choice(HOST_STOPS))
    ranks = rng.sample(range(job.world), len(kinds))
    faults = [draw(rng, job, kind, rank) for kind, rank in zip(kinds, ranks, strict=True)]
    if any(fault is None for fault in faults):
        return None
    machine = Machine(broken(job, [fault for fault in faults if fault is not None]), seed).run()
    came = acted(machine, [fault for fault in faults if fault is not None])
    waited_for = {fault.rank: _missed(machine, job, fault) for fault in came}
    groups = frozenset(group for missed in waited_for.values() for group in missed)
    if machine.finished or not groups:
        return None
    dead = {fault.rank for fault in came if fault.kind == "die"}
    absent = dead or (
        set(rng.sample(range(job.world), rng.randint(1, 2))) if job.world >= 8 and rng.random() < 0.2 else set()
    )
    absent -= {fault.rank for fault in came} - dead
    roots = frozenset(rank for rank, missed in waited_for.items() if missed)
    shown = frozenset(rank for rank in roots - dead if not _waits(machine, rank))
    return StuckJob(
        seed, layout, machine, tuple(came), shown or roots, groups,
        frozenset(absent), _recorder(rng), None, own_names=rng.random() < 0.4, healthy=job
    )  # fmt: skip


def _waits(machine: Machine, rank: int) -> bool:
    """Has a rank issued anything that has not ended? Then a second one at fault cannot be told from those that wait."""
    return any(each.ended_ns is None for each in machine.ranks[rank].issued)


def _missed(machine: Machine, job: Job, fault: Fault) -> set[str]:
    """Groups in which others wait for what the rank at fault did not issue, or issued otherwise.

    Of a rank that stopped the one of the first action that it did not join and others did; of a dead one any.
    """
    if fault.kind in ODD:
        action = job.programs[fault.rank][fault.place]
        assert isinstance(action, Collective)
        return {action.group.name}
    missed = list(_in_order(machine, fault))
    return set(missed) if fault.kind == "die" else set(missed[:1])


def _in_order(machine: Machine, fault: Fault) -> Iterator[str]:
    """Groups of what a stopped rank did not join and another rank has issued, in the order of its program."""
    rank = machine.ranks[fault.rank]
    counts = dict(rank.counts)
    for action in machine.job.programs[fault.rank][fault.place + 1 :]:
        if isinstance(action, Collective):
            number = counts.get((action.group.name, False), 0) + 1
            counts[action.group.name, False] = number
            if any(
                machine.ranks[peer].counts.get((action.group.name, False), 0) >= number for peer in action.group.ranks
            ):
                yield action.group.name
        elif isinstance(action, Messages) and any(
            _waits_in(machine, part.peer, action.group.name, fault.rank) for part in action.parts
        ):
            yield action.group.name


def _waits_in(machine: Machine, rank: int, group: str, peer: int) -> bool:
    """Has a rank issued a message with ``peer`` that has not ended?"""
    return any(
        isinstance(each.action, Messages)
        and each.ended_ns is None
        and each.group.name == group
        and any(part.peer == peer for part in each.action.parts)
        for each in machine.ranks[rank].issued
    )
