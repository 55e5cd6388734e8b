"""The collectives and messages to show: names and arguments of their slices, and the arrows between them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.blocks import Blocks
from perfscope.analyzers.job.collectives.matched import EXCHANGE, MatchedCollectives
from perfscope.analyzers.job.collectives.table import bus_factor, group_size, instance_transfer_ns
from perfscope.analyzers.merge.pftrace import Args
from perfscope.analyzers.merge.rank_view import Communication, Windows
from perfscope.frozen import dataclass
from perfscope.text import byte_size, rank_list
from perfscope.trace.trace import NONE, Bool, Int64


@dataclass(frozen=True, eq=False)
class Arrows:
    """Row of ``MatchedCollectives`` -> numbers of the arrows at the start, or at the end, of its slice."""

    at_begin: dict[int, list[int]]
    at_end: dict[int, list[int]]


def find_arrows(matched: MatchedCollectives, shown: Bool) -> Arrows:
    """Arrows between the ``shown`` rank ops of each collective, and from each send to its recv.

    In a collective, arrows lead from each rank op to the last arrival; where that one is not shown, to the latest one
    shown. A message's arrow leads from the start of the send to the end of the recv, since the recv may start earlier.
    """
    arrows = Arrows({}, {})
    exchange = matched.instances.is_kind((EXCHANGE,))[matched.instance]
    lines = np.flatnonzero(shown & ~exchange)
    blocks = Blocks.of(matched.instance[lines])
    for label in np.flatnonzero(blocks.size > 1).tolist():
        members = lines[blocks.rows(label)]
        last = matched.rank[members] == matched.instances.last_rank[matched.instance[members]]
        late = int(members[np.argmax(last) if last.any() else np.argmax(matched.start_ns[members])])
        for line in members.tolist():
            if line != late:
                arrows.at_begin.setdefault(line, []).append(line + 1)
                arrows.at_begin.setdefault(late, []).append(line + 1)
    _join_messages(matched, np.flatnonzero(shown & exchange), arrows)
    return arrows


def _join_messages(matched: MatchedCollectives, lines: Int64, arrows: Arrows) -> None:
    messages = matched.messages
    line_of = {
        (instance, rank): line
        for line, instance, rank in zip(
            lines.tolist(), matched.instance[lines].tolist(), matched.rank[lines].tolist(), strict=True
        )
    }
    ends = zip(messages.instance.tolist(), messages.source.tolist(), messages.destination.tolist(), strict=True)
    for message, (instance, source, destination) in enumerate(ends):
        sent, received = line_of.get((instance, source)), line_of.get((instance, destination))
        if sent is not None and received is not None:
            number = len(matched) + 1 + message
            arrows.at_begin.setdefault(sent, []).append(number)
            arrows.at_end.setdefault(received, []).append(number)


class Communications:
    """The communication of each rank in the time shown."""

    def __init__(self, result: AlignedJob, ranks: Sequence[int], windows: Windows, zero_ns: int) -> None:
        self._result = result
        self._matched = result.matched_before
        self._windows = windows
        self._zero_ns = zero_ns
        matched = self._matched
        shown = windows.shows(matched.start_ns - zero_ns, matched.end_ns - zero_ns) & np.isin(matched.rank, ranks)
        self._arrows = find_arrows(matched, shown)
        self._transfer_ns = instance_transfer_ns(matched)

    def of(self, rank: int) -> Communication:
        """The collectives and messages of one rank, matched with other ranks or not."""
        own, matched = self._result.partials[rank].collectives, self._matched
        clocks = matched.clocks
        start, end = (clocks.to_common(rank, times) - self._zero_ns for times in (own.start_ns, own.end_ns))
        rows = np.flatnonzero(self._windows.shows(start, end))
        lines = matched.lines_of(rank)
        line = np.full(len(own), NONE, dtype=np.int64)
        line[matched.index[lines]] = lines
        line = line[rows]
        known = line != NONE
        arrival, done, waited_for = start[rows].copy(), end[rows].copy(), np.full(len(rows), NONE, dtype=np.int64)
        arrival[known] = matched.last_arrival_ns[line[known]] - self._zero_ns
        done[known] = matched.done_ns[line[known]] - self._zero_ns
        waited_for[known] = matched.waited_for[line[known]]
        start, end = self._windows.clipped(start[rows], end[rows])
        arrival = np.clip(arrival, start, end)
        return Communication(
            row=rows,
            start_ns=start,
            end_ns=end,
            last_arrival_ns=arrival,
            done_ns=np.clip(done, arrival, end),
            waited_for=waited_for,
            names=[self._name(rank, row) for row in rows.tolist()],
            args=[self._args(rank, row, at) for row, at in zip(rows.tolist(), line.tolist(), strict=True)],
            begin_flows=[self._arrows.at_begin.get(at, ()) for at in line.tolist()],
            end_flows=[self._arrows.at_end.get(at, ()) for at in line.tolist()],
        )

    def _name(self, rank: int, row: int) -> str:
        own = self._result.partials[rank].collectives
        size = int(own.bytes[row])
        kind: str = own.kinds[own.kind[row]]
        return kind + (f" {byte_size(size)}" if size != NONE else "")

    def _args(self, rank: int, row: int, line: int) -> Args:
        own, matched = self._result.partials[rank].collectives, self._matched
        group = own.groups[own.group[row]]
        args: dict[str, str | int | float | bool] = {"group": group.name}
        if group.ranks:
            args["group ranks"] = rank_list(group.ranks)
        if own.bytes[row] != NONE:
            args["bytes"] = int(own.bytes[row])
        if own.dtype[row] != NONE:
            args["dtype"] = own.dtypes[own.dtype[row]]
        if line == NONE:
            return {**args, "matched": False}
        instance = int(matched.instance[line])
        instances = matched.instances
        args["wait_us"] = int(matched.wait_ns[line]) / 1e3
        args["transfer_us"] = int(matched.transfer_ns[line]) / 1e3
        if not instances.complete[instance]:
            args["wait_is_bound"] = True
        if instances.last_rank[instance] != NONE:
            args["last arriver"] = f"rank {int(instances.last_rank[instance])}"
        transfer = int(self._transfer_ns[instance])
        factor = bus_factor(
            instances.kinds[instances.kind[instance]], group_size(instances, int(instances.group[instance]))
        )
        if factor and transfer > 0 and instances.bytes[instance] > 0 and instances.participants[instance] > 1:
            args["busbw_gbps"] = round(int(instances.bytes[instance]) / transfer * factor, 3)
        return args
