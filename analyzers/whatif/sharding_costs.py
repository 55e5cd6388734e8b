"""What gathers and reductions take that a job does not make yet: fitted where their kind is recorded, else derived.

On a ring an all-reduce is a reduce-scatter and an all-gather (nccl-tests ``doc/PERFORMANCE.md``): either sends half of
its bytes at the same bus bandwidth, and a broadcast n / 2(n - 1) of them. Gloo's all-gather is a ring as well; torch
has it carry a reduce-scatter out as a whole all-reduce (``ProcessGroupGloo``), and broadcasts run two at a time, in
log2(n) rounds. Measured on two ranks of one CPU over a slow link: 0.5, 1.0 and 0.5 of an all-reduce; over a quick one
copies between shards and whole buffers show, which cost the same whatever the link.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.whatif.change import CannotReplay, Context
from perfscope.analyzers.whatif.network import transfer_of
from perfscope.analyzers.whatif.script import Part

_FITTED: Final = 0.10
"""Share of a transfer that a model fitted to its kind may miss."""
_DERIVED: Final = 0.15
"""And one that was derived from another kind."""
_DERIVED_ON_GLOO: Final = 0.30
"""The same on gloo, whose threads share the cores with what computes."""
_COPYING: Final = {"all_gather": 0.25, "reduce_scatter": 0.5}
"""Ns per byte that copies take on a CPU: the whole buffer once, and for a reduce-scatter (its input is kept) twice."""


class Costs:
    """Transfers of the group of ``parts``, which are all that is recorded there. ``alone`` is what share of its
    transfer an all-reduce would have taken, had it had the link for itself.
    """

    def __init__(self, context: Context, parts: Sequence[Part], alone: float) -> None:
        self._context = context
        self._samples: dict[str, Part] = {}
        for kind in sorted({part.meeting.kind for part in parts}):
            mine = [part for part in parts if part.meeting.kind == kind]
            largest = max(part.meeting.bytes or 0 for part in mine)
            alike = sorted((part for part in mine if part.meeting.bytes == largest), key=lambda part: part.transfer_ns)
            self._samples[kind] = alike[len(alike) // 2]
        ranks = parts[0].meeting.size
        self._gloo = any(partial.backend == "gloo" for partial in context.result.partials.values()) or any(
            run.backend == "gloo" for run in context.runs.values()
        )
        broadcast = ranks / max(ranks - 1, 1)
        self._on_wire = {
            "all_reduce": 2.0,
            "all_gather": 1.0,
            "reduce_scatter": 2.0 if self._gloo else 1.0,
            "broadcast": broadcast * math.ceil(math.log2(ranks)) / 2 if self._gloo else broadcast,
        }
        self._alone = alone
        self.gap_ns = float(np.median([part.gap_ns for part in parts]))
        """From being able to begin to beginning: the median collective's."""

    def ns(self, kind: str, size: float) -> float:
        """Transfer of a collective of ``size`` bytes (nccl-tests' size), ns. Raises CannotReplay."""
        source = next((known for known in (kind, "all_reduce", "reduce_scatter") if known in self._samples), None)
        if source is None:
            raise CannotReplay("the sizes of gradient reductions are not recorded; record with shapes")
        sample = self._samples[source]
        alone = self._alone if source == "all_reduce" else 1.0
        latency = transfer_of(self._context, sample, 0)
        sending = alone * transfer_of(self._context, sample, round(size)) - alone * latency
        copying = _COPYING.get(kind, 0.0) * size if self._gloo and source != kind else 0.0
        return alone * latency + sending * self._on_wire[kind] / self._on_wire[source] + copying

    def error(self, kind: str) -> float:
        """Share of such a transfer that may be missed."""
        sample = self._samples.get(kind)
        fitted = sample is not None and self._context.model_of(sample.meeting.group, kind) is not None
        return _FITTED if fitted else _DERIVED_ON_GLOO if self._gloo else _DERIVED
