"""Steps in which all transfers take much longer than in the others: others use the network then, or a link fails."""

from __future__ import annotations

from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.blocks import Blocks
from perfscope.analyzers.job.collectives.matched import EXCHANGE
from perfscope.analyzers.job.collectives.table import instance_transfer_ns
from perfscope.trace.distinct import distinct

_TIMES: Final = 1.5
"""A step's transfers take so many times as long as usual, at least."""
_FEW: Final = 0.5
"""Share of the steps that are slow, at most: else nothing shows which are the usual ones."""


def slow_transfer_steps(result: AlignedJob) -> dict[int, float]:
    """Step number -> how many times as long its transfers take as in most steps, of the used steps that are slow; empty
    for jobs on CPUs, whose transfers also wait for cores. A transfer is compared with those of the same group, kind,
    type and size (median), as far as all ranks are recorded.
    """
    if not all(partial.has_device_work for partial in result.partials.values()):
        return {}
    instances = result.matched.instances
    transfer = instance_transfer_ns(result.matched)
    known = instances.complete & (instances.participants > 1) & (transfer > 0) & ~instances.is_kind((EXCHANGE,))
    alike = Blocks.of(
        *(column[known] for column in (instances.group, instances.kind, instances.dtype, instances.bytes))
    )
    transfer, step = transfer[known], instances.step[known]
    usual = np.zeros(len(transfer))
    for label in range(len(alike)):
        usual[alike.rows(label)] = np.median(transfer[alike.rows(label)])
    times = {
        int(one): float(transfer[step == one].sum() / max(usual[step == one].sum(), 1.0))
        for one in distinct(step).tolist()
    }
    slow = {one: factor for one, factor in times.items() if factor >= _TIMES}
    return slow if len(slow) < _FEW * len(result.steps) else {}
