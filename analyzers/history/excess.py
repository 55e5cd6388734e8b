"""How much longer each rank's own work takes than its peers', step by step, and what of that the job waits for.

In every step the job advances at the pace of the rank that is furthest behind: the frontier. A rank's excess costs what
the frontier lies above where it would be without that excess. Where several ranks are slow in one step, the part of the
frontier that all of them exceed is divided among them, so the costs of all add up to what the job lost (the rule by
which costs are shared where each larger need includes the smaller ones: Littlechild and Owen, 1973).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perfscope.analyzers.history.own_times import COLUMNS, JobOwnTimes
from perfscope.frozen import dataclass
from perfscope.results.history import OTHER
from perfscope.trace.above_peers import above_peers, noise_of
from perfscope.trace.trace import Bool, Float32, Float64


@dataclass(frozen=True, eq=False)
class Excess:
    """Own time above the peers', µs; below them it is negative."""

    total: Float32
    """Steps x ranks."""
    by_stage: Float32
    """Steps x ranks x ``COLUMNS``."""
    level: Float64
    """Median over the run, of each rank."""
    noise_us: float
    """Standard deviation of a rank's excess from step to step that no cause explains."""
    stage_noise_us: Float64
    """The same of its excess in each of ``COLUMNS``, which is less: a stage is a part of the step."""
    alone: Bool
    """Ranks without peers of the same work: the only ones of their pipeline stage."""


def measure_excess(job: JobOwnTimes, peers: Sequence[Sequence[int]]) -> Excess:
    """Compare each rank with the median of its peers.

    ``peers``: groups of ranks that do the same work. A rank that is alone in its group is compared with all ranks, and
    not in ``other``, where stages of a pipeline do unlike things.
    """
    place = {rank: index for index, rank in enumerate(job.ranks)}
    groups = [[place[rank] for rank in group if rank in place] for group in peers]
    lone = [members[0] for members in groups if len(members) == 1]
    everyone = list(range(len(job.ranks)))
    working_alike = [column for column, name in enumerate(COLUMNS) if name != OTHER]
    compared = [(members, members, job.own_us) for members in groups if len(members) > 1]
    if lone:
        compared.append((lone, everyone, _only(job.own_us, working_alike)))
    by_stage = np.empty_like(job.own_us)
    total = np.empty_like(job.wait_us)
    noises: list[list[float]] = []
    for members, among, own_us in compared:
        at = {member: line for line, member in enumerate(among)}
        mine = [at[member] for member in members]
        stages = own_us[:, among].transpose(2, 0, 1)
        views = [(own, above_peers(own)) for own in (*stages, stages.sum(axis=0))]
        by_stage[:, members] = np.stack([excess[:, mine] for _, excess in views[:-1]], axis=2)
        total[:, members] = views[-1][1][:, mine]
        noises.append([noise_of(own, excess) for own, excess in views])
    *stage_noise, noise = np.median(np.array(noises), axis=0).tolist()
    return Excess(
        total=total,
        by_stage=by_stage,
        level=np.median(total, axis=0).astype(np.float64),
        noise_us=noise,
        stage_noise_us=np.array(stage_noise),
        alone=np.isin(everyone, lone),
    )


def cost_of(excess: Excess, ranks: Sequence[int], slow: Bool) -> Float64:
    """What the excess of these ranks costs the job, µs: a row for each step, a column for each of ``ranks``.

    ``ranks``: columns of ``excess``. ``slow``: of each step and each of ``ranks``, whether its excess has that cause.
    """
    others = np.ones(excess.total.shape[1], dtype=bool)
    others[list(ranks)] = False
    mine = excess.total[:, list(ranks)].astype(np.float64)
    floor = np.maximum(excess.total[:, others].max(axis=1, initial=0.0), 0.0).astype(np.float64)
    # In steps that have no such cause a rank is one of the others.
    floor = np.maximum(floor, np.where(slow, -np.inf, mine).max(axis=1, initial=0.0))
    above = np.where(slow, np.maximum(mine - floor[:, None], 0.0), 0.0)
    order = np.argsort(-above, axis=1, kind="stable")
    heights = np.take_along_axis(above, order, axis=1)
    lower = np.concatenate([heights[:, 1:], np.zeros((len(heights), 1))], axis=1)
    layers = (heights - lower) / np.arange(1, heights.shape[1] + 1)
    shares = np.cumsum(layers[:, ::-1], axis=1)[:, ::-1]
    costs = np.zeros_like(above)
    np.put_along_axis(costs, order, shares, axis=1)
    return costs


def _only(values: Float32, columns: list[int]) -> Float32:
    kept = np.zeros_like(values)
    kept[:, :, columns] = values[:, :, columns]
    return kept
