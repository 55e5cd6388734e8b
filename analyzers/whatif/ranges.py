"""How far the step may be from the one that a replay predicts: low and high of a what-if."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from perfscope.analyzers.replay.variation import most_below, of_odd_step, standard_error
from perfscope.analyzers.whatif import loader
from perfscope.analyzers.whatif.change import Context, Uncertainty
from perfscope.analyzers.whatif.schedules.editable import EditableSchedules
from perfscope.frozen import dataclass
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import Int64

_SUREST: Final = 0.01
"""Share of the step time that a prediction may be off however little is changed: other things vary as much."""

_HOST_PACE: Final = 1.15
"""How much longer than what it does a host may take for a step that it limits."""

_FOR_HOST: Final = [TimeCategory.SYNC, TimeCategory.LAUNCH, TimeCategory.HOST]
"""A device's idle time for its host."""

_OF_DEVICE: Final = [TimeCategory.COMPUTE, TimeCategory.COPY]
"""A device's work."""

_ALONE: Final = 0.10
"""Share by which kernels may take longer beside communication than alone."""


@dataclass(frozen=True)
class ChangedStep:
    """What a step takes with settings changed, ns, how much less it may take as cores are freed, and each one as
    replayed; how sure that is, whether latencies are uncertain, or anything else is that makes a range (``doubtful``),
    and what was assumed.
    """

    step_ns: float
    busy_ns: float
    """What the busiest device computes and copies in a step, at least, or on CPUs what a rank computes whatever is
    changed; 0 where that is not asked for."""
    freed_ns: float
    steps_ns: Int64
    shorter_ns: float
    """By how much fewer waits for loader workers may make it shorter; ``steps_ns`` are without any of them."""
    longest_pace_ns: float
    """What loader workers may make of it, by what batches take them; 0 where that is not known."""
    settling: int
    sure: Uncertainty
    unsure: bool
    doubtful: bool
    of_loading: bool
    """Waits for loader workers leave open whether these set the pace."""
    unheld: bool
    """They are taken not to."""
    assumed: tuple[str, ...]


def unsure_shares(
    context: Context, changed: ChangedStep, steps: Int64, error: float, *, of_ranks: bool
) -> tuple[tuple[float, float], float]:
    """(shares of a prediction by which it may be less and more whatever was changed, ns than which it is no less where
    loader workers may have been waited for too often): the recorded ``steps`` are few, and their replay has an error.
    ``of_ranks``: other ranks' pace is what changes.
    """
    mid, unseen = changed.step_ns * context.correction, loader.unseen_variation(context)
    varies = standard_error(steps, unseen)
    if of_ranks:  # what others did while they waited varies unseen
        varies = max(varies, standard_error(changed.steps_ns, unseen))
    share = _SUREST + error + 2 * varies + of_odd_step(changed.steps_ns)
    fall = min(share, _SUREST + error + most_below(changed.steps_ns, mid, context.correction))
    if not changed.shorter_ns or mid <= 0:
        return (fall, share), -math.inf
    # Without any wait for workers steps take what they do else.
    others = changed.steps_ns[min(changed.settling, len(changed.steps_ns) - 1) :]
    their = _SUREST + error + 2 * standard_error(others, unseen)
    least = float(others.mean()) * context.correction * (1 - their)
    return (max(min(fall + changed.shorter_ns * context.correction / mid, 1 - least / mid), their), share), least


def by_hosts(context: Context, measured: float, mid: float, *, of_host_work: bool) -> tuple[float, float]:
    """(least, most) that the hosts' pace may make of a prediction, ns.

    A host that limits a faster step may take longer for it than the work that is known of it. And while a device waits
    for its host, it could do more in the same time: a change for the worse may cost nothing. Where the host's own work
    is what changes (``of_host_work``), the recorded work says neither.
    """
    if not context.on_devices or of_host_work:
        return mid, mid
    ranks = list(context.result.partials)
    if mid <= measured:
        busy = max(context.host_busy_ns(rank) for rank in ranks)
        return mid, max(mid, min(measured, _HOST_PACE * busy))
    idle = max(float(context.result.totals[rank][:, _FOR_HOST].sum(axis=1).mean()) for rank in ranks)
    return mid - min(mid - measured, idle), mid


def range_around(measured: float, mid: float, shares: tuple[float, float], sure: Uncertainty) -> tuple[float, float]:
    """(low, high) of a prediction, ns: ``shares`` of it, below and above, are uncertain whatever was changed."""
    saving = abs(measured - mid)
    below, above = (sure.either_ns + share * mid for share in shares)
    # What makes a step longer makes it no shorter.
    less = (sure.less if mid <= measured else min(max(sure.less, sure.spared), 1.0)) * saving
    more = sure.more * saving
    toward_slower, toward_faster = (less, more) if mid <= measured else (more, less)
    return max(mid - (toward_faster + below + sure.faster_ns), 0.0), mid + (toward_slower + above + sure.slower_ns)


def least_of_devices_ns(schedules: EditableSchedules, context: Context, sure: Uncertainty) -> float:
    """What the busiest device takes for its computation and its copies in a step with these ``schedules``, as far as
    that is ``sure``. No step is shorter, whatever waits for it.
    """
    used = frozenset(context.result.steps.tolist())
    least = 0.0
    for rank, ops in schedules.ops.items():
        own_ns = np.array([op.own_ns for op in ops if op.step in used])
        left = float(own_ns[:, _OF_DEVICE].sum()) / len(used) if len(own_ns) else 0.0
        recorded = float(context.result.totals[rank][:, _OF_DEVICE].sum(axis=1).mean())
        least = max(least, left - sure.more * max(recorded - left, 0.0))
    return (1 - _ALONE) * max(least, 0.0)
