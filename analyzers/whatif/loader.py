"""Changes of the data loader: how many workers load.

One batch takes a worker as long as it was recorded to; W workers together deliver W batches in that time, so a step
takes at least batches x load time / W, and without workers it takes the load time in addition.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from perfscope.analyzers.loading import dataloader_rows
from perfscope.analyzers.replay.engine import Op
from perfscope.analyzers.timeline import Row
from perfscope.analyzers.whatif.change import BadSetting, CannotReplay, Context, Setting, Uncertainty
from perfscope.analyzers.whatif.script import NEVER, Script

_TAKING_NS: Final = 100_000.0
"""Time to take a batch that is there, handed over by a worker process: unpickling, and the queue."""


def _workers(script: Script, context: Context, name: str, value: str) -> Uncertainty:
    workers = int(value) if value.isdecimal() else -1
    if workers < 0:
        raise BadSetting(f"{name}={value}: write a number of workers, 0 or more")
    rows = {row.rank: row for row in dataloader_rows(context.result, context.runs)}
    if not rows:
        raise CannotReplay(f"{name}: the recorded steps draw no batch from a DataLoader")
    crowded = False
    for rank in script.lines:
        if rank not in rows:
            continue
        row = rows[rank]
        batches = _batches_per_step(context, rank)
        if row.batch_us is None or row.num_workers is None:
            if row.num_workers is not None and workers >= row.num_workers:
                continue  # they keep up already, and more of them change nothing
            raise CannotReplay(
                f"{name}: rank {rank}'s workers keep up, or their number is not recorded, so what a batch costs one of "
                "them is not known; record a run with num_workers=0, or under perfscope run"
            )
        load = row.batch_us * 1e3
        _set_loading(script, rank, load * batches if workers == 0 else _TAKING_NS * batches)
        if workers:
            script.floor_step_ns[rank] = max(script.floor_step_ns.get(rank, 0.0), load * batches / workers)
        crowded |= _crowded(context, rank, workers)
    # Whether loading computes or waits does not show: where it computes and all cores are busy, nothing is saved, and
    # passing batches between processes comes on top.
    return Uncertainty(less=1.25 if crowded else 0.20, more=0.0)


def _batches_per_step(context: Context, rank: int) -> float:
    partial = context.result.partials[rank]
    return float(partial.loading.batches[partial.steps.indices_of(context.result.steps)].mean())


def _set_loading(script: Script, rank: int, per_step_ns: float) -> None:
    """Give every step of one rank this much time in the loader, where it had most; one without gets none."""
    by_step: dict[int | None, list[int]] = {}
    for place, line in enumerate(script.lines[rank]):
        by_step.setdefault(line.step, []).append(place)
        if line.op is Op.HOLD:
            line.hold_ns, line.lag_ns = NEVER, 0.0
    for step, places in by_step.items():
        if step is None:
            continue
        lines = [script.lines[rank][place] for place in places]
        most = int(np.argmax([line.own_ns[Row.DATALOADER] for line in lines]))
        for line in lines:
            line.own_ns[Row.DATALOADER] = 0.0
        lines[most].own_ns[Row.DATALOADER] = per_step_ns


def _crowded(context: Context, rank: int, workers: int) -> bool:
    """Would the ranks of the host and their workers want more cores than it has? Not known: perhaps."""
    run = context.runs.get(rank)
    if run is None or run.cpu_count is None:
        return True
    return (workers + 1) * run.local_world_size > run.cpu_count


SETTINGS = (Setting("dataloader.num_workers", "N", "DataLoader(num_workers=N)", _workers, 0),)
