"""How short a step can be for the hosts: a device cannot be quicker than its host launches."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.replay.programs import Recorded
from perfscope.analyzers.timeline import Row
from perfscope.trace import Bool, Int64

_WAITED_FOR: Final = 0.05
"""Share of a rank's step that its device must wait for launches for its host to be what limits it: a host whose queue
is full is busy all the time too, inside its launches."""


@dataclass(frozen=True, eq=False)
class HostBound:
    """Ns for which each rank's host (lines) was busy in each used step (columns), blocking calls and the loader apart;
    ``limits`` tells whose devices wait for that.

    What a device idles until its launch does not show how slow its host is: where all hosts take as long, the rank
    whose peers happen to have launched earlier waits more than they do, and hosts of other stages launch while their
    devices wait for messages.
    """

    ranks: tuple[int, ...]
    busy_ns: Int64
    limits: Bool

    @classmethod
    def of(cls, result: Comparison, recorded: Recorded) -> HostBound:
        """That of all ranks. On CPUs hosts are the devices, and nothing is bounded."""
        busy, limits = [], []
        for rank in recorded.programs.ranks:
            partial, (start, end) = result.partials[rank], result.windows[rank]
            busy.append(partial.progress.host_busy_ns[partial.steps.indices_of(result.steps)])
            waited = partial.progress.own.totals(start, end)[:, [Row.LAUNCH, Row.HOST]].sum()
            limits.append(partial.has_device_work and waited >= _WAITED_FOR * (end - start).sum())
        return cls(recorded.programs.ranks, np.stack(busy), np.array(limits, dtype=np.bool_))

    def floor_ns(self, cured: Collection[int]) -> Int64:
        """Each used step takes no less, were the hosts of ``cured`` no slower than the median of the others."""
        mine = np.isin(self.ranks, list(cured))
        busy = np.where(self.limits[:, None], self.busy_ns, 0)
        if mine.any() and not mine.all():
            usual = np.median(self.busy_ns[~mine], axis=0).astype(np.int64)
            busy[mine] = np.minimum(busy[mine], usual)
        return np.asarray(busy.max(axis=0), dtype=np.int64)
