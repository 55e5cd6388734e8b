"""The nodes of one rank: its own time piece after piece, its communication beside it, and what waits for what.

A rank's own time is a chain: kernels (on the device), and between them what kept the device idle (on the host). It goes
on after a wait only when the communication that it waited for has ended. Communication begins where the chain has come
to its recorded start, after what is before it on its stream::

    chain   kernel -> kernel -> idle -> (waits) -> kernel
                 \\-> all-reduce -----------^
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from perfscope._version import __version__
from perfscope.analyzers.cached import read_trace
from perfscope.analyzers.export.et_def import Node, NodeType, Value, header
from perfscope.analyzers.export.kernels import Computation, computation
from perfscope.analyzers.export.plan import Part, RankPlan
from perfscope.frozen import dataclass
from perfscope.recording.whole import replacing
from perfscope.results.categories import TimeCategory
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NONE, Int64

_US: Final = 1_000
_ON_DEVICE: Final = (TimeCategory.COMPUTE, TimeCategory.COPY)
_LONGEST_NAME: Final = 240
"""Characters; names of templated kernels take several kB each time."""
_BLOCKED: Final = int(TimeCategory.COMM_TRANSFER)


@dataclass(frozen=True)
class ChakraRank:
    """What one rank's file holds."""

    rank: int
    nodes: int
    communication: int
    """Nodes that stand for collectives, sends and recvs."""
    flops: bool
    """Has any node a number of operations?"""


def write_rank(plan: RankPlan) -> ChakraRank:
    """Read a rank's trace and write its file. Raises TraceError where the trace can no longer be read, and OSError."""
    computing = computation(read_trace(plan.source.path, plan.source.part, plan.source.execution), plan.steps)
    nodes = list(_Chain(plan, computing).nodes())
    about: dict[str, Value] = {
        "schema": "symbolic execution trace",
        "created_by": f"perfscope {__version__}",
        "rank": plan.rank,
        "first_step": plan.chosen[0],
        "last_step": plan.chosen[-1],
    }
    with replacing(plan.path) as file:
        file.write(header(about))
        for node in nodes:
            file.write(node.encode())
    return ChakraRank(
        plan.rank,
        len(nodes),
        sum(node.type is not NodeType.COMP for node in nodes),
        any("num_ops" in node.attributes for node in nodes),
    )


@dataclass(frozen=True, eq=False)
class _Pieces:
    """A rank's own time between consecutive edges: parallel arrays. ``kernel`` indexes the computation, or is NONE.

    ``us`` are whole µs, rounded so that any number of pieces together is off by less than one.
    """

    start_ns: Int64
    end_ns: Int64
    category: Int64
    kernel: Int64
    us: Int64
    step: Int64


class _Chain:
    """Makes the nodes in the order in which they were recorded to begin."""

    def __init__(self, plan: RankPlan, computing: Computation) -> None:
        self._plan = plan
        self._computing = computing
        self._last: list[int] = []
        """What the next own piece starts after: the one before it, and communication that was waited for."""
        self._of_part: dict[int, tuple[int, ...]] = {}
        self._count = 0

    def nodes(self) -> Iterator[Node]:
        """All nodes; ids are consecutive, and each node comes after those that it depends on."""
        plan, pieces = self._plan, _pieces(self._plan, self._computing)
        if plan.lead_ns >= _US:
            yield self._own("before the first step", plan.first_ns - plan.lead_ns, plan.lead_ns // _US, on_device=False)
        inside = (plan.blocked.end_ns > plan.first_ns) & (plan.blocked.end_ns <= plan.last_ns)
        waits = list(zip(plan.blocked.end_ns[inside].tolist(), np.flatnonzero(inside).tolist(), strict=True))
        # At one moment waits end, then communication begins, then the rank goes on.
        events = [
            *((end, 0, index) for end, index in waits),
            *((part.start_ns, 1, index) for index, part in enumerate(plan.parts)),
            *((start, 2, index) for index, start in enumerate(pieces.start_ns.tolist())),
        ]
        for _, what, index in sorted(events):
            if what == 0:
                yield from self._wait(index)
            elif what == 1:
                yield from self._communicate(index)
            elif pieces.us[index] > 0 or pieces.kernel[index] != NONE:
                yield self._piece(pieces, index)

    def _piece(self, pieces: _Pieces, index: int) -> Node:
        kernel, category = int(pieces.kernel[index]), TimeCategory(int(pieces.category[index]))
        attributes: dict[str, Value] = {"category": category.id, "step": int(pieces.step[index])}
        name = category.id
        if kernel != NONE:
            computing = self._computing
            name = computing.names[computing.name[kernel]]
            length = int(computing.end_ns[kernel] - computing.start_ns[kernel])
            share = (int(pieces.end_ns[index]) - int(pieces.start_ns[index])) / length
            numbers = {"num_ops": computing.flops[kernel], "tensor_size": computing.bytes[kernel]}
            attributes |= {key: round(number * share) for key, number in numbers.items() if number * share >= 1}
            if computing.stream[kernel] != NONE:
                attributes["stream"] = int(computing.stream[kernel])
        return self._own(
            name, int(pieces.start_ns[index]), int(pieces.us[index]), on_device=category in _ON_DEVICE, more=attributes
        )

    def _own(self, name: str, start_ns: int, us: int, *, on_device: bool, more: dict[str, Value] | None = None) -> Node:
        """The next piece of the chain."""
        node = self._node(name, NodeType.COMP, start_ns, us, self._last, {"is_cpu_op": not on_device, **(more or {})})
        self._last = [node.id]
        return node

    def _wait(self, index: int) -> Iterator[Node]:
        """The rank waited for communication to end, or for something that is not in the file."""
        plan = self._plan
        begin = max(int(plan.blocked.start_ns[index]), plan.first_ns)
        end, part = int(plan.blocked.end_ns[index]), int(plan.blocker[index])
        if part == NONE or part not in self._of_part:
            yield self._own("exposed communication", begin, _us(end - begin), on_device=False)
            return
        self._last = sorted({*self._last, *self._of_part[part]})
        late = end - max(plan.parts[part].end_ns, begin)
        if late >= _US:  # a thread goes on when it is scheduled again
            yield self._own("wakes up", end - late, late // _US, on_device=False)

    def _communicate(self, index: int) -> Iterator[Node]:
        part = self._plan.parts[index]
        if not part.nodes:
            return
        before = [self._of_part[each] for each in part.follows if each in self._of_part]
        deps = sorted({*self._last, *(node for nodes in before for node in nodes)})
        late = part.start_ns - self._able_ns(part)
        if late >= _US:
            delay = self._node(
                f"before {part.name}", NodeType.COMP, part.start_ns - late, late // _US, deps, {"is_cpu_op": True}
            )
            deps = [delay.id]
            yield delay
        made = []
        for kind, attributes in part.nodes:
            us = _us(part.duration_ns)
            more: dict[str, Value] = {"stream": part.stream, "step": self._step_at(part.start_ns)}
            node = self._node(part.name, kind, part.start_ns, us, deps, {**attributes, **more})
            made.append(node.id)
            yield node
        self._of_part[index] = tuple(made)

    def _able_ns(self, part: Part) -> int:
        """When communication would begin by what it depends on alone: where its rank is blocked the chain stands."""
        plan = self._plan
        if part.start_ns < plan.first_ns:
            return part.start_ns
        at = int(np.searchsorted(plan.blocked.start_ns, part.start_ns, side="right")) - 1
        reached = part.start_ns
        if at >= 0 and int(plan.blocked.end_ns[at]) > part.start_ns:
            reached = max(int(plan.blocked.start_ns[at]), plan.first_ns)
        return max([reached, *(plan.parts[each].end_ns for each in part.follows if each in self._of_part)])

    def _step_at(self, time_ns: int) -> int:
        steps = self._plan.steps
        place = int(np.searchsorted(steps.start_ns, max(time_ns, self._plan.first_ns), side="right")) - 1
        return int(steps.number[max(place, 0)])

    def _node(
        self, name: str, kind: NodeType, start_ns: int, us: int, deps: list[int], attributes: dict[str, Value]
    ) -> Node:
        self._count += 1
        since = max(start_ns - self._plan.zero_ns, 0) // _US
        return Node(self._count, name[:_LONGEST_NAME], kind, since, us, tuple(deps), attributes)


def _pieces(plan: RankPlan, computing: Computation) -> _Pieces:
    """The rank's own time, cut where its category or kernel changes, a step begins, or communication begins."""
    own, first, last = plan.own, plan.first_ns, plan.last_ns
    starts = np.array([part.start_ns for part in plan.parts], dtype=np.int64)
    edges = distinct(
        np.concatenate(
            (own.start_ns, computing.start_ns, computing.end_ns, starts, plan.steps.start_ns, np.array([first]))
        )
    )
    edges = edges[(edges >= first) & (edges < last)]
    ends = np.append(edges[1:], last)
    category = own.category[np.searchsorted(own.start_ns, edges, side="right") - 1].astype(np.int64)
    kept = category != _BLOCKED
    edges, ends, category = edges[kept], ends[kept], category[kept]
    kernel = np.searchsorted(computing.start_ns, edges, side="right") - 1
    known = (category == TimeCategory.COMPUTE) & (kernel >= 0)
    known[known] = edges[known] < computing.end_ns[kernel[known]]
    until = np.rint(np.cumsum(ends - edges) / _US).astype(np.int64)
    return _Pieces(
        start_ns=edges,
        end_ns=ends,
        category=category,
        kernel=np.where(known, kernel, NONE),
        us=np.diff(until, prepend=0),
        step=plan.steps.number[np.searchsorted(plan.steps.start_ns, edges, side="right") - 1],
    )


def _us(time_ns: int) -> int:
    return (time_ns + _US // 2) // _US
