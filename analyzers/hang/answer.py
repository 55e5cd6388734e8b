"""From dumps and stacks to the answer: which ranks did not join which collective, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import numpy as np

from perfscope.analyzers.hang.blocked import BlockedOp, blocked_ops
from perfscope.analyzers.hang.call_sites import Stacks, call_sites, waits_in_communication
from perfscope.analyzers.hang.first_missed import first_missed
from perfscope.analyzers.hang.progress import Progress, progress
from perfscope.analyzers.hang.slowness import all_wait, certainly_stands, is_habitually_late, silent_when_written
from perfscope.analyzers.hang.waits import Roots, find_roots
from perfscope.analyzers.readers.flight import FlightDump
from perfscope.frozen import dataclass
from perfscope.grouping import grouped
from perfscope.results.hang import Hang, HangLastSeen, HangMismatch, HangVariant, HangVictim
from perfscope.text import ranks_in_words

_MISMATCHES_SHOWN: Final = 20

Evidence = Literal["did not join", "device stands still", "no dump", "no entries", "issued another operation", "stack"]


@dataclass(frozen=True)
class _Named:
    """The ranks to name, and how sure that is."""

    ranks: frozenset[int]
    confidence: Literal["low", "medium", "high"]
    reason: str
    by_stack: bool = False
    skipped: bool = False
    """They left something out, and went on."""


def find_hang(
    dumps: Mapping[int, FlightDump], stacks: Stacks, world_size: int | None = None, *, stands: bool = False
) -> Hang | None:
    """The answer from dumps and stacks by rank; None where the job did not hang, as far as they show.

    ``stands``: it is known to make no step, since its own recorder took the dumps and stacks for that reason.
    """
    state = progress(dumps, world_size)
    blocked = blocked_ops(state)
    silent = silent_when_written(state)
    sure = stands or (bool(silent) and bool(blocked)) or certainly_stands(state, blocked)
    roots = find_roots(state, blocked)
    named = _named(blocked, roots, stacks)
    incomplete = [op for op in blocked if op.missing or op.unknown or op.undecided]
    if not sure and (silent is False or not incomplete or _goes_on(state, blocked, named.ranks)):
        return None
    missed = first_missed(state, blocked, named.ranks, skipped=named.skipped)
    if missed is None and blocked:
        missed = min(incomplete or blocked, key=lambda op: op.since_ns)
    return _hang(state, blocked, missed, named, stacks, world_size)


def _goes_on(state: Progress, blocked: Sequence[BlockedOp], ranks: frozenset[int]) -> bool:
    return not all_wait(state, ranks) or is_habitually_late(state, blocked, ranks)


def _named(blocked: Sequence[BlockedOp], roots: Roots, stacks: Stacks) -> _Named:
    by_stack = {rank: waits_in_communication(threads) for rank, threads in stacks.items()}
    ranks = roots.ranks
    # Gloo records no send and no recv: a rank that waits in one looks as if it waited for nobody.
    elsewhere = frozenset(rank for rank in ranks if not by_stack.get(rank))
    if elsewhere != ranks and (elsewhere or _outside(by_stack)):
        ranks = elsewhere or _outside(by_stack)
        return _Named(
            ranks, "medium", "the stacks show that all but they wait in communication", by_stack=not elsewhere
        )
    if ranks:
        return _sure(blocked, roots)
    if roots.outvoted:
        reason = "ranks wait for each other, and most of them for these"
        return _Named(roots.outvoted, "medium", reason, skipped=True)
    outside = _outside(by_stack)
    if outside:
        reason = "the stacks of the other ranks are in communication, those of the named ones are not"
        return _Named(outside, "medium", reason, by_stack=True)
    if any(op.undecided for op in blocked):
        reason = "ranks issued different operations under one number, and as many issued the one as the other"
    elif roots.cycles:
        reason = f"{ranks_in_words(roots.cycles[0])} wait for each other, and nothing shows which is wrong"
    elif blocked:
        reason = "every rank came to the collective: the network, a device or a kernel stands still"
    else:
        reason = "no rank waits in a recorded collective"
    return _Named(frozenset(), "low", reason)


def _sure(blocked: Sequence[BlockedOp], roots: Roots) -> _Named:
    """How sure the roots are: what is not known about the collectives that they did not join."""
    ranks = roots.ranks
    if roots.departed:
        reason = "ranks wait for each other, and only they issued operations in another order than before"
        return _Named(ranks, "medium", reason, skipped=True)
    if not roots.known:
        whose = "it" if len(roots.by_elimination) == 1 else "these"
        reason = f"all other ranks came; of {whose} there is no dump, or one without entries"
        if roots.stopped:
            reason = (
                f"of {ranks_in_words(roots.by_elimination)} there is no dump, or one without entries; "
                f"{ranks_in_words(roots.stopped)} issued less than the peers that wait at the same"
            )
        return _Named(ranks, "medium", reason)
    unknown = set().union(*(op.unknown for op in blocked if op.missing & ranks))
    if unknown:
        reason = f"the dump shows that they did not join, but of {ranks_in_words(unknown)} nothing is known"
        return _Named(ranks, "medium", reason)
    if roots.stopped:
        reason = (
            f"every other rank's wait leads to {ranks_in_words(roots.known)}; {ranks_in_words(roots.stopped)} "
            "issued less than the peers that wait at the same"
        )
        return _Named(ranks, "medium", reason)
    reason = "every other rank's wait leads to them, and their own dumps show that they wait for no other rank"
    return _Named(ranks, "high", reason)


def _outside(by_stack: Mapping[int, bool | None]) -> frozenset[int]:
    """The ranks whose main threads are in no communication, where most others' are."""
    inside = {rank for rank, waits in by_stack.items() if waits}
    outside = frozenset(rank for rank, waits in by_stack.items() if waits is False)
    return outside if len(outside) < len(inside) or (len(outside) == len(inside) == 1) else frozenset()


def _hang(
    state: Progress,
    blocked: Sequence[BlockedOp],
    missed: BlockedOp | None,
    named: _Named,
    stacks: Stacks,
    world_size: int | None,
) -> Hang:
    world = {*state.world, *range(world_size or 0), *stacks}
    kind = missed.kind if missed else None
    return Hang(
        missing_ranks=tuple(sorted(named.ranks)),
        group=missed.group.name if missed else None,
        group_description=missed.group.description if missed else None,
        collective=kind.operator if kind else None,
        sequence=missed.sequence if missed else None,
        input_sizes=kind.input_sizes if kind else (),
        output_sizes=kind.output_sizes if kind else (),
        dtype=" / ".join(dict.fromkeys(kind.dtypes)) or None if kind else None,
        waiting_ranks=tuple(sorted(missed.waiting.keys() - named.ranks)) if missed else (),
        since_us=_us(missed.since_ns) if missed else None,
        mismatches=_mismatches(blocked),
        victims=_victims(blocked, missed, named.ranks),
        call_sites=call_sites(state, stacks, named.ranks),
        last_seen=tuple(_last_seen(state, blocked, rank, named) for rank in sorted(named.ranks)),
        ranks_without_dump=tuple(sorted(world - state.dumps.keys())) if state.dumps else (),
        confidence=named.confidence,
        reason=named.reason,
    )


def _mismatches(blocked: Sequence[BlockedOp]) -> tuple[HangMismatch, ...]:
    """The collectives that were not issued alike, the earliest first."""
    return tuple(
        HangMismatch(
            group=op.group.name,
            group_description=op.group.description,
            sequence=op.sequence,
            variants=tuple(
                HangVariant(ranks=tuple(ranks), issued=text)
                for text, ranks in sorted(
                    op.variants.items(), key=lambda item: (set(item[1]) <= op.missing, -len(item[1]))
                )
            ),
            odd_ranks=() if op.undecided else tuple(sorted(op.missing & op.waiting.keys())),
        )
        for op in sorted((op for op in blocked if op.variants), key=lambda op: op.since_ns)[:_MISMATCHES_SHOWN]
    )


def _victims(blocked: Sequence[BlockedOp], missed: BlockedOp | None, missing: frozenset[int]) -> tuple[HangVictim, ...]:
    """What each waiting rank waits for first, but at the collective that is named; the earliest first."""
    first: dict[int, BlockedOp] = {}
    for op in blocked:
        for rank, part in op.waiting.items():
            if rank not in first or part.row < first[rank].waiting[rank].row:
                first[rank] = op
    told = missing | (set(missed.waiting) if missed else set())
    together = grouped((id(op), rank) for rank, op in sorted(first.items()) if rank not in told)
    rows = []
    for ranks in together.values():
        op = first[ranks[0]]
        others = op.missing or op.unknown or {rank for rank in op.waiting if first[rank] is not op}
        rows.append(
            HangVictim(
                ranks=tuple(ranks),
                group=op.group.name,
                group_description=op.group.description,
                collective=op.waiting[ranks[0]].kind.operator,
                sequence=op.sequence,
                since_us=_us(op.since_ns),
                waits_for=tuple(sorted(others)),
            )
        )
    return tuple(sorted(rows, key=lambda row: (round((row.since_us or 0.0) / 1e3), row.ranks)))  # as shown: to the ms


def _last_seen(state: Progress, blocked: Sequence[BlockedOp], rank: int, named: _Named) -> HangLastSeen:
    dump = state.dumps.get(rank)
    if dump is None:
        return HangLastSeen(rank=rank, evidence="stack" if named.by_stack else "no dump")
    evidence = _evidence(state, blocked, rank, named)
    if not len(dump.group):
        return HangLastSeen(rank=rank, evidence=evidence)
    last = int(np.argmax(dump.created_ns)) if dump.created_ns.any() else len(dump.group) - 1
    group, kind = dump.groups[dump.group[last]], dump.kinds[dump.kind[last]]
    return HangLastSeen(
        rank=rank,
        evidence=evidence,
        group=group.name,
        group_description=group.description,
        collective=kind.operator,
        sequence=int(dump.sequence[last]),
        at_us=_us(int(dump.created_ns[last]) + state.offsets_ns.get(rank, 0)),
    )


def _evidence(state: Progress, blocked: Sequence[BlockedOp], rank: int, named: _Named) -> Evidence:
    if named.by_stack:
        return "stack"
    if any(rank in op.waiting and rank in op.missing for op in blocked):
        return "issued another operation"
    if state.behind.get(rank):
        return "device stands still"
    if any(rank in op.missing for op in blocked):
        return "did not join"
    return "no entries" if not len(state.dumps[rank].group) else "device stands still"


def _us(time_ns: int) -> float | None:
    return time_ns / 1e3 if time_ns > 0 else None
