"""The cost model of each group and kind of collective: t(S) = alpha + S / B."""

from __future__ import annotations

from typing import Final

import numpy as np

from perfscope.analyzers.job.blocks import Blocks
from perfscope.analyzers.job.collectives.matched import Instances, MatchedCollectives
from perfscope.analyzers.job.collectives.table import bus_factor, group_size, instance_transfer_ns
from perfscope.frozen import dataclass
from perfscope.results.rows import CostRow
from perfscope.trace.distinct import distinct
from perfscope.trace.medians import weighted_median
from perfscope.trace.trace import Bool, Float64, Int64

_SPREAD: Final = 2.0
"""Largest over smallest size below which latency and bandwidth cannot be separated."""

_PROMPT: Final = 0.1
"""Share of like collectives for which ranks that are not recorded came before the others, whatever else they did."""
_DELAYED: Final = 0.1
"""How much longer than others show, as a share, even the quickest collectives of a size are that all waited."""

_MOST_SIZES: Final = 256
"""All-to-alls of experts hardly ever have one size twice, and every pair of sizes counts."""


@dataclass(frozen=True)
class CostModel:
    """t(S) = alpha + slope · S for one group and kind: ns, ns per byte. ``residual`` is the median relative error."""

    group: int
    kind: int
    alpha_ns: float
    slope: float
    residual: float


def cost_models(matched: MatchedCollectives) -> tuple[CostModel, ...]:
    """Fit t(S) = alpha + slope · S for every group and kind that moved at least two clearly different sizes."""
    instances = matched.instances
    transfer = transfers_ns(matched)
    usable = np.flatnonzero(is_transfer(instances) & (instances.bytes > 0) & (transfer > 0))
    alike = Blocks.of(instances.group[usable], instances.kind[usable])
    models = []
    for label in range(len(alike)):
        chosen = usable[alike.rows(label)]
        fitted = fit(instances.bytes[chosen].astype(np.float64), transfer[chosen].astype(np.float64))
        if fitted is not None:
            models.append(CostModel(int(instances.group[chosen[0]]), int(instances.kind[chosen[0]]), *fitted))
    return tuple(models)


def is_transfer(instances: Instances) -> Bool:
    """Which instances are between ranks, not of a group of one."""
    return (instances.participants > 1) | ~instances.complete


def transfers_ns(matched: MatchedCollectives) -> Int64:
    """For each instance the transfer alone, as far as the recording shows it.

    Of a collective of which some ranks are not recorded the time since the last recorded arrival bounds it: those ranks
    may have been later. It is taken to be no longer than that of the quickest like ones, for which they were not, nor
    than what those of other sizes show.
    """
    instances = matched.instances
    transfer = instance_transfer_ns(matched)
    bounded = np.flatnonzero(~instances.complete & (instances.bytes > 0))
    alike = Blocks.of(instances.group[bounded], instances.kind[bounded])
    for label in range(len(alike)):
        chosen = bounded[alike.rows(label)]
        size, longest = instances.bytes[chosen], transfer[chosen]
        for one in distinct(size).tolist():
            same = size == one
            longest[same] = np.minimum(longest[same], np.quantile(longest[same], _PROMPT, method="lower"))
        model = fit(size.astype(np.float64), longest.astype(np.float64))
        if model is not None:
            shown = np.round(model[0] + model[1] * size).astype(np.int64)
            longest = np.where(longest > (1 + _DELAYED) * shown, shown, longest)
        transfer[chosen] = longest
    return transfer


def fit(size: Float64, time: Float64) -> tuple[float, float, float] | None:
    """(alpha, slope, residual) of t(S) = alpha + slope · S; None where the sizes do not separate latency from
    bandwidth.

    Theil-Sen on the median time of each size, so that single delayed instances do not count: the slope is the
    median of the slopes of all pairs of sizes, weighted by how far these are apart (Sievers 1978), since between like
    sizes there is only noise, and by how many instances the two medians are of, with which their variances fall.
    Alpha is then the median of what is left, weighted by 1 / time, since the remainder of a long transfer is the error
    of the slope, and by instances. Neither is below 0. The residual is over all instances.
    """
    sizes, medians, count = _medians(size, time)
    if len(sizes) < 2 or sizes[-1] < _SPREAD * sizes[0]:
        return None
    low, high = np.triu_indices(len(sizes), 1)
    apart = sizes[high] - sizes[low]
    of_pair = count[low] * count[high] / (count[low] + count[high])
    slope = max(float(weighted_median((medians[high] - medians[low]) / apart, apart * of_pair)), 0.0)
    alpha = max(float(weighted_median(medians - slope * sizes, count / medians)), 0.0)
    return alpha, slope, float(np.median(np.abs(alpha + slope * size - time) / time))


def _medians(size: Float64, time: Float64) -> tuple[Float64, Float64, Float64]:
    """Ascending sizes with their median times, and of how many these are; neighbouring sizes together where there are
    very many.
    """
    order = np.argsort(size, kind="stable")
    size, time = size[order], time[order]
    label = np.unique(size, return_inverse=True)[1]
    if label.max(initial=0) >= _MOST_SIZES:
        label = np.arange(len(size)) * _MOST_SIZES // len(size)
    pieces = np.flatnonzero(np.diff(label)) + 1
    medians = [np.array([np.median(piece) for piece in np.split(column, pieces)]) for column in (size, time)]
    count = np.diff(np.concatenate(([0], pieces, [len(size)]))).astype(np.float64)
    return medians[0], medians[1], count


def cost_rows(models: tuple[CostModel, ...], instances: Instances) -> tuple[CostRow, ...]:
    """The cost models as the summary shows them: of groups whose ranks are all recorded."""
    rows = []
    whole = set(instances.group[instances.complete].tolist())
    for model in (one for one in models if one.group in whole):
        group, kind = instances.groups[model.group], instances.kinds[model.kind]
        factor = bus_factor(kind, group_size(instances, model.group))
        rows.append(
            CostRow(
                group=group.name,
                kind=kind,
                alpha_us=model.alpha_ns / 1e3,
                busbw_gbps=factor / model.slope if factor is not None and model.slope > 0 else None,
                residual=model.residual,
            )
        )
    return tuple(rows)
