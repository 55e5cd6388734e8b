"""The ranks that the others wait for, in the last steps: those whose own time is above their peers'.

Where waiting is measured, they are found as those of whole runs are. Where it is not, only stages are compared in which
ranks do not wait for one another: where they do, all take equally long.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.history.job_history import NOTICEABLE, waiting_stages
from perfscope.analyzers.history.own_times import COLUMNS as OWN
from perfscope.analyzers.history.own_times import OwnTimes
from perfscope.analyzers.history.stragglers import find_stragglers
from perfscope.analyzers.live.ring import COLUMNS, WAITING
from perfscope.analyzers.live.state import LiveStraggler
from perfscope.frozen import dataclass
from perfscope.recording.history import CORE, OCCASIONAL, STAGES
from perfscope.results.history import OTHER, HistoryStraggler
from perfscope.trace.medians import median_of_others
from perfscope.trace.trace import Float32, Float64, Int64

MOST: Final = 50

_FEW_RANKS: Final = 16
"""Up to so many ranks are each compared with the median of the others; of more, the median of all is the same."""


@dataclass(frozen=True, eq=False)
class OwnTime:
    """What each rank takes longer than its peers, in stages without waiting."""

    excess_us: Float64
    """Of each rank, mean per step: 0 or more. nan where not known."""
    stragglers: tuple[LiveStraggler, ...]
    not_compared: str = ""


def measured_time(
    number: Int64, steps: Float32, ranks: list[int], hosts: Mapping[int, str], peers: Sequence[Sequence[int]]
) -> OwnTime | None:
    """Compare the ranks of ``steps``, (ranks, steps, ``COLUMNS``) in µs; None where waiting was not measured.

    ``number``: of the steps. ``peers``: groups of ranks that do the same work.
    """
    known = np.isfinite(steps[..., COLUMNS.index(WAITING)])
    if len(ranks) < 2 or not known.any(axis=1).all():
        return None
    own_us = np.nan_to_num(steps[..., 1 : 1 + len(OWN)])
    own_us[..., OWN.index(CORE)] = 0.0
    found = find_stragglers(
        {
            rank: OwnTimes(
                number=number[used],
                step_us=each[used, 0],
                own_us=own[used],
                wait_us=each[used, COLUMNS.index(WAITING)],
                core_us=each[used, COLUMNS.index(CORE)],
            )
            for rank, each, own, used in zip(ranks, steps, own_us, known, strict=True)
        },
        hosts,
        peers,
    )
    total = np.where(known, own_us.sum(axis=2), np.nan).astype(np.float64)
    both = known.all(axis=0)
    excess = np.full(len(ranks), np.nan)
    place = {rank: index for index, rank in enumerate(ranks)}
    for group in peers if both.any() else ():
        members = [place[rank] for rank in group if rank in place]
        if len(members) > 1:
            excess[members] = np.maximum(
                (total[members] - median_of_others(total[members], few=_FEW_RANKS))[:, both].mean(axis=1), 0.0
            )
    rows = found.rows if found is not None else ()
    return OwnTime(excess, tuple(_live(row) for row in rows[:MOST]))


def _live(row: HistoryStraggler) -> LiveStraggler:
    return LiveStraggler(
        ranks=row.ranks,
        stage=row.stage,
        delay_us=row.cost_us,
        share_of_step=row.cost_share,
        share_of_steps=row.share_of_steps,
    )


def own_time(steps: Float32, ranks: list[int], strategies: set[str]) -> OwnTime:
    """Compare the ranks of ``steps``, (ranks, steps, ``COLUMNS``) in µs, of which waiting was not measured."""
    unknown = np.full(len(ranks), np.nan)
    if len(ranks) < 2 or not steps.shape[1]:
        return OwnTime(unknown, (), "")
    if "pipeline" in strategies:
        return OwnTime(unknown, (), "ranks of a pipeline do different work")
    stages = _compared(steps, strategies or {"unknown"})
    if not stages:
        return OwnTime(unknown, (), "ranks wait for each other in every stage that is timed (--steps-only times more)")
    own = steps[:, :, [COLUMNS.index(stage) for stage in stages]].astype(np.float64)
    excess = own - median_of_others(own, few=_FEW_RANKS)
    total = excess.sum(axis=2)  # (ranks, steps)
    known = np.isfinite(total).all(axis=0)
    if not known.any():
        return OwnTime(unknown, (), "")
    step_us = float(np.nanmedian(steps[:, known, 0]))
    return OwnTime(
        np.maximum(total[:, known].mean(axis=1), 0.0),
        _stragglers(excess[:, known], total[:, known], ranks, stages, step_us),
    )


def _compared(steps: Float32, strategies: set[str]) -> list[str]:
    """Stages that are measured and in which ranks do not wait."""
    waiting = waiting_stages(strategies)
    usual = [stage for stage in STAGES if stage not in OCCASIONAL]
    measured = [stage for stage in usual if np.isfinite(steps[:, :, COLUMNS.index(stage)]).any()]
    # The rest of a step holds the waiting unless that is timed; with two ranks one may wait there for the other.
    whole = waiting <= set(measured) and len(steps) > 2
    return [stage for stage in (*measured, *([OTHER] if whole else [])) if stage not in waiting]


def _stragglers(
    excess: Float64, total: Float64, ranks: list[int], stages: list[str], step_us: float
) -> tuple[LiveStraggler, ...]:
    """In each step the latest rank, where it is so by more than noise; summed by rank."""
    latest = total.argmax(axis=0)
    delay = total[latest, np.arange(total.shape[1])]
    steps: dict[int, list[int]] = defaultdict(list)
    for place in np.flatnonzero(delay >= NOTICEABLE * step_us).tolist():
        steps[int(latest[place])].append(place)
    rows = []
    for row, places in steps.items():
        delay_us = float(delay[places].sum()) / total.shape[1]
        if delay_us < NOTICEABLE * step_us:
            continue
        rows.append(
            LiveStraggler(
                ranks=(ranks[row],),
                stage=stages[int(excess[row, places].sum(axis=0).argmax())],
                delay_us=delay_us,
                share_of_step=delay_us / step_us if step_us > 0 else 0.0,
                share_of_steps=len(places) / total.shape[1],
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.delay_us, row.ranks))[:MOST])
