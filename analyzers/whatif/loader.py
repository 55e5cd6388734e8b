"""Changes of the data loader: how many workers load.

One batch takes a worker as long as it was recorded to; W workers together deliver W batches in that time, so a step
takes at least batches x load time / W, and without workers it takes the load time in addition.

Workers that compute need cores as the training does. Where the recording tells what both take of them, a step takes at
least all CPU time over all cores; and a worker that computes while every core is at work takes that time from the
training. Example: a rank with one core trains for 60 ms, is at work in 45 of them and waits for the network in the
others; loading takes 20 ms of CPU time. A worker of its own meets the training at work in 3 of 4 cases and then takes
its core: 60 + 3/4 x 20 = 75 ms. At best it always finds the core idle (65, all CPU time), at worst never (80), and
passing batches between processes comes on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.analyzers.cores import Demand, demands, needed_ns
from perfscope.analyzers.loading import dataloader_rows
from perfscope.analyzers.replay.engine import Op
from perfscope.analyzers.timeline import Row
from perfscope.analyzers.whatif.change import BadSetting, CannotReplay, Context, Setting, Uncertainty
from perfscope.analyzers.whatif.script import NEVER, Script
from perfscope.summary import DataLoaderRow

_TAKING_NS: Final = 100_000.0
"""Time to take a batch that is there, handed over by a worker process: unpickling, and the queue."""
_SURE: Final = Uncertainty(less=0.15, more=0.05)
"""Of a prediction that knows what loading takes of the cores."""
_CROWDED_BY_OTHERS: Final = 0.5
"""How much less of the saving is sure for each time that the training's work takes as long as its CPU time again: the
scheduler gives a training that slept more than one that never does."""
_ANYTHING: Final = 1.25
"""Share of the saving that may be lost where nothing is sure: passing batches between processes comes on top."""


def _workers(script: Script, context: Context, name: str, value: str) -> Uncertainty:
    workers = int(value) if value.isdecimal() else -1
    if workers < 0:
        raise BadSetting(f"{name}={value}: write a number of workers, 0 or more")
    rows = {row.rank: row for row in dataloader_rows(context.result, context.runs)}
    if not rows:
        raise CannotReplay(f"{name}: the recorded steps draw no batch from a DataLoader")
    batches = {rank: _batches_per_step(context, rank) for rank in rows}
    needs = demands(context.runs, batches)
    sure: list[Uncertainty] = []
    for rank in script.lines:
        if rank not in rows:
            continue
        row = rows[rank]
        if row.batch_us is None or row.num_workers is None:
            if row.num_workers is not None and workers >= row.num_workers:
                continue  # they keep up already, and more of them change nothing
            raise CannotReplay(
                f"{name}: rank {rank}'s workers keep up, or their number is not recorded, so what a batch costs one of "
                "them is not known; record a run with num_workers=0, or under perfscope run"
            )
        load = row.batch_us * 1e3 * batches[rank]
        script.floor_step_ns[rank] = max(script.floor_step_ns.get(rank, 0.0), load / workers if workers else 0.0)
        taking = _TAKING_NS * batches[rank] if workers else load
        need = needs.get(rank)
        if need is None:
            _set_loading(script, rank, taking)
            sure.append(_unknown(context, rank, workers))
            continue
        contended = _contended(context, row, need, workers, batches[rank])
        _set_loading(script, rank, max(taking + contended.mid - contended.before, 0.0))
        # What fits into a step now fits then.
        least, floor = (
            min(needed_ns(needs, rank, batches) * longer, context.result.mean_step_ns(rank))
            for longer in (1.0, need.stretch)
        )
        script.floor_step_ns[rank] = max(script.floor_step_ns[rank], floor)
        sure.append(
            Uncertainty(
                less=min(_SURE.less + _CROWDED_BY_OTHERS * (need.stretch - 1), _ANYTHING),
                more=_SURE.more,
                slower_ns=contended.most - contended.mid,
                faster_ns=max(contended.step_ns + contended.mid, floor) - max(contended.step_ns, least),
            )
        )
    return Uncertainty(
        less=max((one.less for one in sure), default=0.0),
        more=max((one.more for one in sure), default=0.0),
        slower_ns=max((one.slower_ns for one in sure), default=0.0),
        faster_ns=max((one.faster_ns for one in sure), default=0.0),
    )


@dataclass(frozen=True)
class _Contended:
    """By how much a step is longer because workers take cores from its training, ns."""

    before: float
    """With the workers that it has."""
    mid: float
    """With those asked for; at least 0."""
    most: float
    step_ns: float
    """The recorded step without its loading."""


def _contended(context: Context, row: DataLoaderRow, need: Demand, workers: int, batches: float) -> _Contended:
    step_ns = context.result.mean_step_ns(row.rank) - row.blocking_us * 1e3
    at_work = min(need.training_ns * need.stretch / (step_ns * need.threads), 1.0) if step_ns > 0 else 1.0
    loading_ns = need.batch_ns * need.stretch * batches
    if not row.num_workers:  # they take from the training at most what loading itself holds it up now
        loading_ns = min(loading_ns, row.blocking_us * 1e3)
    crowding = _crowding(need, workers)
    # A worker has one thread: where several loaded a batch, it takes longer.
    alone = (need.batch_most_ns - need.batch_ns) * batches / workers if workers else 0.0
    return _Contended(
        before=_crowding(need, row.num_workers or 0) * at_work * loading_ns / need.cores,
        mid=crowding * at_work * loading_ns / need.cores,
        most=crowding * loading_ns * _ANYTHING + alone,
        step_ns=step_ns,
    )


def _crowding(need: Demand, workers: int) -> float:
    """Share of the workers that find no core which the training leaves free all the time."""
    return min(max(workers - (need.cores - need.threads), 0.0) / workers, 1.0) if workers else 0.0


def _unknown(context: Context, rank: int, workers: int) -> Uncertainty:
    """Whether loading computes or waits does not show: where it computes and all cores are busy, nothing is saved, and
    passing batches between processes comes on top.
    """
    run = context.runs.get(rank)
    fits = run is not None and run.cpu_count is not None and (workers + 1) * run.local_world_size <= run.cpu_count
    return Uncertainty(less=0.20 if fits else _ANYTHING, more=0.0)


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


SETTINGS = (Setting("dataloader.num_workers", "N", "DataLoader(num_workers=N)", _workers, 0),)
