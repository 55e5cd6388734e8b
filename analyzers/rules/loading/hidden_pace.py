"""Loader workers whose pace is hidden: training threads wait for cores while these load, instead of for batches.

Example: a worker sleeps for 120 ms for each batch, and so long a step takes, of which its training thread runs for 60,
waits 55 for a core and 5 for the batch. With a core at once it would wait 60 for the batch. With batches that are ready
the step takes 65 ms at least, and 115 at most: the recording does not tell how much of the wait for a core is left.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rules.context import RuleContext
from perfscope.frozen import dataclass
from perfscope.results.rows import DataLoaderRow

_WAITED: Final = 0.1
"""Share of its time for which a training thread waits for a core, at least, to hide anything."""
_COMPUTED: Final = 0.5
"""Part of a batch's time up to which it is CPU time: workers that compute wait for cores as well, so that their batches
may take long for that alone."""


@dataclass(frozen=True)
class HiddenPace:
    """Loaders whose workers take the step for its batches."""

    rows: tuple[DataLoaderRow, ...]
    waited: float
    """Share of the step that their training threads wait for a core, the most of any rank."""


def find(job: RuleContext, busy: float) -> HiddenPace | None:
    """Those of most ranks; None where fewer are so. ``busy``: part of the step that workers take for its batches from
    which they set its pace.
    """
    if job.on_devices or not job.steps:
        return None
    rows = tuple(
        row
        for row in job.summary.dataloader
        if row.workers_us is not None and row.workers_us >= busy * job.info.step_us and _sleeps(job, row)
    )
    waited = [share for row in rows if (share := _waited(job, row.rank)) >= _WAITED]
    if len(waited) < len(rows) or 2 * len(rows) <= len(job.ranks):
        return None
    return HiddenPace(rows, max(waited))


def _waited(job: RuleContext, rank: int) -> float:
    """Share of its time for which a training thread waited for a core; 0 where that is not recorded."""
    cpu = job.runs[rank].cpu if rank in job.runs else None
    if cpu is None or cpu.waited_ns is None or not cpu.wall_ns:
        return 0.0
    return min(cpu.waited_ns / cpu.wall_ns, 1.0)


def _sleeps(job: RuleContext, row: DataLoaderRow) -> bool:
    """Do workers mostly wait for disks, the network or a timer while they load, as far as that is recorded?"""
    run = job.runs.get(row.rank)
    loader = run.dataloaders[0] if run is not None and run.dataloaders else None
    if loader is None or not loader.timed_batches or row.batch_us is None:
        return False
    return loader.load_cpu_ns / loader.timed_batches / 1e3 <= _COMPUTED * row.batch_us
