"""Matched collectives: the same one on every rank, with arrivals, waits and transfers.

Arrival of a rank is the start of its kernel, aligned. Wait = last arrival - own arrival; transfer = end - last arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from perfscope.analyzers.collectives.communication import Group
from perfscope.clock import Clocks
from perfscope.trace import Bool, Int64


@dataclass(frozen=True, eq=False)
class Matched:
    """Participations in matched collectives, ordered by instance, then rank: parallel arrays of one length.

    ``index`` is the row in that rank's ``Collectives``. Times are aligned ns. ``last_arrival_ns`` is the last arrival
    that the participation had to wait for, never outside its own ``[start_ns, end_ns]``: the instance's, or of an
    exchange of messages that of the ranks at their other ends. ``waited_for`` is the rank that arrived then (itself
    where it came last, NONE where that is not known), ``done_ns`` when nothing of the transfer is left: the end, except
    for a host's range around a send, which ends when somebody asks for it. Instances are described by ``instances``.
    """

    instance: Int64
    rank: Int64
    index: Int64
    start_ns: Int64
    end_ns: Int64
    last_arrival_ns: Int64
    waited_for: Int64
    done_ns: Int64
    instances: Instances
    passed: Passed
    clocks: Clocks

    def __len__(self) -> int:
        return len(self.instance)

    def offset_of(self, rank: int) -> int:
        """What was added to the rank's own clock in the middle of its recording, ns."""
        return self.clocks.offset_of(rank)

    def of_steps(self, steps: Int64) -> Matched:
        """The part that belongs to ``steps``; instances keep their order and are numbered anew."""
        kept = np.isin(self.instances.step, steps)
        lines, messages = kept[self.instance], kept[self.passed.instance]
        number = np.cumsum(kept) - 1
        return Matched(
            number[self.instance[lines]],
            self.rank[lines],
            self.index[lines],
            self.start_ns[lines],
            self.end_ns[lines],
            self.last_arrival_ns[lines],
            self.waited_for[lines],
            self.done_ns[lines],
            self.instances.where(kept),
            Passed(
                number[self.passed.instance[messages]],
                self.passed.source[messages],
                self.passed.destination[messages],
                self.passed.bytes[messages],
            ),
            self.clocks,
        )

    def lines_of(self, rank: int) -> Int64:
        """Lines of one rank, ascending."""
        order, ranks = self._by_rank
        begin, end = np.searchsorted(ranks, [rank, rank + 1])
        return order[begin:end]

    @cached_property
    def _by_rank(self) -> tuple[Int64, Int64]:
        order = np.argsort(self.rank, kind="stable")
        return order, self.rank[order]

    @property
    def wait_ns(self) -> Int64:
        """How long each participant waited for the last one."""
        return self.last_arrival_ns - self.start_ns

    @property
    def transfer_ns(self) -> Int64:
        """From the last arrival until nothing of the transfer is left, for each participant."""
        return self.done_ns - self.last_arrival_ns


@dataclass(frozen=True, eq=False)
class Instances:
    """One line for each matched collective, in order of its last arrival. ``groups`` and ``kinds`` are indexed.

    ``complete``: every participant is in the recording, so that the last arrival is known; otherwise it is bounded by
    the shortest duration present (the last arriver's own duration is the transfer, and it is at most that long).
    ``last_rank`` is the last arriver, NONE where it is not known. A message, or several that one kernel of some rank
    carries together, is an instance of kind ``send_recv`` among the ranks at their ends; ``inferred`` where these were
    found by the kernels' times.
    """

    group: Int64
    kind: Int64
    dtype: Int64
    bytes: Int64
    step: Int64
    """The job's step number; NONE outside all steps."""
    participants: Int64
    complete: Bool
    last_rank: Int64
    last_arrival_ns: Int64
    inferred: Bool
    groups: tuple[Group, ...]
    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.group)

    def where(self, kept: Bool) -> Instances:
        """The instances for which ``kept`` holds."""
        return replace(
            self,
            group=self.group[kept],
            kind=self.kind[kept],
            dtype=self.dtype[kept],
            bytes=self.bytes[kept],
            step=self.step[kept],
            participants=self.participants[kept],
            complete=self.complete[kept],
            last_rank=self.last_rank[kept],
            last_arrival_ns=self.last_arrival_ns[kept],
            inferred=self.inferred[kept],
        )

    def is_kind(self, kinds: Sequence[str]) -> Bool:
        """Which are of these kinds."""
        return np.array([kind in kinds for kind in self.kinds] or [False], dtype=np.bool_)[self.kind]


@dataclass(frozen=True, eq=False)
class Passed:
    """The messages in exchanges: parallel arrays. ``source`` and ``destination`` are global ranks, either of which may
    be missing from the recording; ``bytes`` NONE where not said.
    """

    instance: Int64
    source: Int64
    destination: Int64
    bytes: Int64

    def __len__(self) -> int:
        return len(self.instance)
