"""All-to-alls whose ranks move different amounts, as tokens of experts: they take as long as the busiest rank's.

Where ranks move no more than the mean of all, the busiest is the mean, or the busiest of the others, and the bytes take
that much less time; the latency stays.

Example: of 4 ranks one receives 7 MB, the others 3 MB, and each sends 4 MB. Where none receives more than others, all
move 4 MB: what the bytes of 7 MB took, 4/7 of that.
"""

from __future__ import annotations

import functools
from collections.abc import Collection

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.collectives.cost_model import cost_models
from perfscope.analyzers.replay.latency import Latencies
from perfscope.trace.trace import Float64, Int64


class UnevenSizes:
    """Those of one job."""

    def __init__(self, result: AlignedJob) -> None:
        self._result = result

    def shares_left(self, ranks: Collection[int]) -> Float64:
        """For each instance of ``matched_before``, the share of its busiest rank's bytes that the busiest still moves
        where ``ranks`` move no more than the mean of all; 1 of other kinds, and where that of some rank is not known.
        """
        instances = self._result.matched_before.instances
        left = np.ones(len(instances))
        lines, moved, mean = self._sizes
        if len(lines) == 0:
            return left
        matched = self._result.matched_before
        instance = matched.instance[lines]
        asked = np.isin(matched.rank[lines], list(ranks))
        most = np.bincount(instance, weights=mean, minlength=len(instances)) / np.maximum(instances.participants, 1)
        np.maximum.at(most, instance[~asked], moved[~asked])
        changed = np.unique(instance[asked])
        left[changed] = np.minimum(most[changed] / instances.bytes[changed], 1.0)
        return left

    def transfers_ns(self, instance: Int64, transfer_ns: Int64, ranks: Collection[int]) -> Int64:
        """Transfers of rank ops of these instances (beyond the matched ones: of a single rank) where ``ranks`` move no
        more than the mean of all.
        """
        shares = self.shares_left(ranks)
        share = np.append(shares, 1.0)[np.minimum(instance, len(shares))]
        rows = np.flatnonzero(share < 1)
        if len(rows) == 0:
            return transfer_ns
        changed: Int64 = transfer_ns.copy()
        latency = self._latencies_ns(instance[rows], transfer_ns[rows])
        changed[rows] = np.rint(latency + (transfer_ns[rows] - latency) * share[rows])
        return changed

    def _latencies_ns(self, instance: Int64, transfer_ns: Int64) -> Float64:
        instances = self._result.matched_before.instances
        found = np.empty(len(instance), dtype=np.float64)
        for group, kind in np.unique((instances.group[instance], instances.kind[instance]), axis=1).T.tolist():
            rows = np.flatnonzero((instances.group[instance] == group) & (instances.kind[instance] == kind))
            name, alpha = instances.kinds[kind], self._alphas_ns.get((group, kind))
            if alpha is not None and self._latencies.is_shown(group, name, alpha):
                found[rows] = np.minimum(transfer_ns[rows], alpha)
            else:
                latency = self._latencies.of(group, name)
                found[rows] = [latency.of(ns) for ns in transfer_ns[rows].tolist()]
        return found

    @functools.cached_property
    def _latencies(self) -> Latencies:
        return Latencies(self._result)

    @functools.cached_property
    def _alphas_ns(self) -> dict[tuple[int, int], float]:
        """(group, kind) -> fitted latency."""
        return {(model.group, model.kind): model.alpha_ns for model in cost_models(self._result.matched)}

    @functools.cached_property
    def _sizes(self) -> tuple[Int64, Int64, Int64]:
        """(lines of ``matched_before``, bytes, mean bytes) of all-to-alls of which all ranks' are known."""
        matched = self._result.matched_before
        instances = matched.instances
        known = instances.complete & instances.is_kind(("all_to_all",)) & (instances.bytes > 0)
        lines = np.flatnonzero(known[matched.instance])
        moved, mean = np.zeros(len(lines), dtype=np.int64), np.zeros(len(lines), dtype=np.int64)
        for rank in np.unique(matched.rank[lines]).tolist():
            mine = np.flatnonzero(matched.rank[lines] == rank)
            own, rows = self._result.partials[rank].collectives, matched.index[lines[mine]]
            moved[mine], mean[mine] = own.bytes[rows], own.mean_bytes[rows]
        unknown = np.bincount(matched.instance[lines], weights=moved <= 0, minlength=len(instances)) > 0
        kept = ~unknown[matched.instance[lines]]
        return lines[kept], moved[kept], mean[kept]
