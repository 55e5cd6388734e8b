"""The wait-for graph: from ranks, through the operations at which they wait, to ranks that wait for nobody.

Example: rank 0 sent to rank 1, which has not received; rank 1 is at an all-reduce with ranks 2 and 3, and rank 3 did
not come. The graph is 0 -> send -> 1 -> all-reduce -> 3, 2 -> all-reduce; rank 3 is its root, ranks 0 to 2 are victims.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Final, TypeVar

from perfscope.analyzers.hang.blocked import BlockedOp
from perfscope.analyzers.hang.habits import departed, left_own_order
from perfscope.analyzers.hang.progress import OpenOp, Progress
from perfscope.frozen import dataclass

_Node = TypeVar("_Node", bound=Hashable)

_FEW: Final = 3


@dataclass(frozen=True)
class Roots:
    """Whom the others wait for, in the end."""

    known: frozenset[int]
    """They did not join, and wait for nobody: from their own dumps."""
    departed: frozenset[int]
    """They left their own habit. Looked for where no rank is known that waits for nobody and has nothing open."""
    by_elimination: frozenset[int]
    """All others came; of these there is no dump, or none with entries."""
    stopped: frozenset[int]
    """They wait for these, too, and issued less than their peers, who wait at the same."""
    cycles: tuple[frozenset[int], ...]
    """Ranks that wait for each other, and for nobody else."""
    outvoted: frozenset[int]
    """Of such ranks: those for which most of their peers wait at one operation."""

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks to name."""
        return self.departed or (self.known or self.by_elimination) | self.stopped


def find_roots(progress: Progress, blocked: Sequence[BlockedOp]) -> Roots:
    """The roots of the wait-for graph."""
    graph = _graph(progress, blocked)
    awaited = {rank for op in blocked for rank in op.missing | op.unknown}
    awaited |= {
        target for node, targets in graph.items() if node[0] == "op" for kind, target in targets if kind == "rank"
    }
    known: set[int] = set()
    unknown: set[int] = set()
    cycles = []
    for part in _sinks(graph):
        ranks = frozenset(number for kind, number in part if kind == "rank")
        if len(ranks) > 1:
            cycles.append(ranks)
        elif ranks <= awaited:
            (known if _has_entries(progress, *ranks) else unknown).update(ranks)
    # What is open on the others may be due to something that their buffers no longer hold.
    odd = {rank for op in blocked if not op.p2p for rank in op.missing & op.waiting.keys()}
    idle = {rank for rank in known if rank in odd or not progress.open_ops.get(rank)}
    # Many that wait at what all joined are no roots: what they wait for is not recorded.
    known = idle or (known if len(known) <= _FEW else set())
    # A device that stands still may have issued what waits for another rank, too.
    known |= {rank for rank in awaited if progress.behind.get(rank) and any(rank in op.missing for op in blocked)}
    # Ranks that wait themselves are roots only where nothing else explains it.
    left = departed(progress) if blocked and not idle else frozenset()
    if not left and not known and not unknown:
        left = left_own_order(progress, frozenset().union(*cycles))
    stopped = frozenset(_stopped_as_well(progress, blocked)) - known if unknown or known else frozenset()
    return Roots(frozenset(known), left, frozenset(unknown), stopped, tuple(cycles), _outvoted(blocked, cycles))


def _stopped_as_well(progress: Progress, blocked: Sequence[BlockedOp]) -> set[int]:
    """Ranks that did not issue what most of their peers, who wait at the same, did: their hosts stand still, too."""
    at = {rank: _place(progress, ops[0]) for rank, ops in progress.open_ops.items() if ops}
    found = set()
    for op in blocked:
        for rank in set() if op.p2p else op.missing - op.waiting.keys():
            alike = [peer in op.waiting for peer in op.group.ranks if peer != rank and at.get(peer) == at.get(rank)]
            if rank in at and sum(alike) > len(alike) // 2:
                found.add(rank)
    return found


def _place(progress: Progress, op: OpenOp) -> tuple[str, int, bool, int]:
    """Where a rank waits, by what is the same on ranks that run one program."""
    group = progress.groups[op.group]
    return group.description, len(group.ranks), op.p2p, op.sequence


def _has_entries(progress: Progress, rank: int) -> bool:
    dump = progress.dumps.get(rank)
    return dump is not None and (len(dump.group) > 0 or bool(dump.status) or progress.only_active)


def _graph(progress: Progress, blocked: Sequence[BlockedOp]) -> dict[tuple[str, int], list[tuple[str, int]]]:
    """("rank", rank) and ("op", index in ``blocked``) -> those that it waits for."""
    graph: dict[tuple[str, int], list[tuple[str, int]]] = {("rank", rank): [] for rank in progress.world}
    first_rows = _first_rows(blocked)
    # A rank that issued something else waits as well, at what nobody will come to: it is a cause, no victim.
    odd = {rank for op in blocked if not op.p2p for rank in op.missing & op.waiting.keys()}
    for index, op in enumerate(blocked):
        if op.undecided:
            targets, sources = sorted(op.waiting), sorted(op.waiting)
        elif op.missing or op.unknown:
            targets = sorted(op.missing or op.unknown)
            sources = [rank for rank in op.waiting if rank not in odd]
        else:
            targets = _not_reached(op, first_rows)
            sources = [rank for rank in op.waiting if rank not in targets and rank not in odd]
        if targets:
            graph["op", index] = [("rank", rank) for rank in targets]
            for rank in sources:
                graph["rank", rank].append(("op", index))
    return graph


def _outvoted(blocked: Sequence[BlockedOp], cycles: Sequence[frozenset[int]]) -> frozenset[int]:
    """Of ranks that wait for each other those to which most others' devices point: the fewer are in the wrong.

    Who did not issue an operation comes before whose device is still before one that all issued.
    """
    first_rows = _first_rows(blocked)
    found: set[int] = set()
    for cycle in cycles:
        for awaited_of in (lambda op: op.missing, lambda op: _not_reached(op, first_rows)):
            votes: Counter[int] = Counter()
            for op in blocked:
                awaited = awaited_of(op)
                at = [rank for rank, part in op.waiting.items() if part.row == first_rows[rank] and rank not in awaited]
                if len(at) > len(awaited):
                    votes.update(dict.fromkeys(cycle.intersection(awaited), len(at) - len(awaited)))
            if votes:
                found |= {rank for rank, count in votes.items() if count == max(votes.values())}
                break
    return frozenset(found)


def _first_rows(blocked: Sequence[BlockedOp]) -> dict[int, int]:
    """Rank -> row of the first operation that it waits for: a device does one after the other."""
    first: dict[int, int] = {}
    for op in blocked:
        for rank, part in op.waiting.items():
            first[rank] = min(first.get(rank, part.row), part.row)
    return first


def _not_reached(op: BlockedOp, first_rows: Mapping[int, int]) -> list[int]:
    """Of a collective that all ranks issued: those whose device is still before it."""
    before = [rank for rank, part in op.waiting.items() if part.row > first_rows[rank] and not part.started]
    started = [rank for rank, part in op.waiting.items() if part.started]
    if not before and started:
        before = [rank for rank, part in op.waiting.items() if not part.started]
    return sorted(before) if len(before) < len(op.waiting) else []


def _sinks(graph: Mapping[_Node, Sequence[_Node]]) -> list[list[_Node]]:
    """Strongly connected components that lead nowhere else (Tarjan 1972, without recursion)."""
    order: dict[_Node, int] = {}
    low: dict[_Node, int] = {}
    stack: list[_Node] = []
    on_stack: set[_Node] = set()
    component: dict[_Node, int] = {}
    found: list[list[_Node]] = []
    for start in graph:
        if start in order:
            continue
        work = [(start, iter(graph.get(start, ())))]
        order[start] = low[start] = len(order)
        stack.append(start)
        on_stack.add(start)
        while work:
            node, targets = work[-1]
            target = next(targets, None)
            if target is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == order[node]:
                    cut = stack.index(node)
                    found.append(stack[cut:])
                    component.update(dict.fromkeys(stack[cut:], len(found) - 1))
                    on_stack.difference_update(stack[cut:])
                    del stack[cut:]
            elif target not in order:
                order[target] = low[target] = len(order)
                stack.append(target)
                on_stack.add(target)
                work.append((target, iter(graph.get(target, ()))))
            elif target in on_stack:
                low[node] = min(low[node], order[target])
    leaving = {
        component[node] for node, targets in graph.items() for target in targets if component[target] != component[node]
    }
    return [part for number, part in enumerate(found) if number not in leaving]
