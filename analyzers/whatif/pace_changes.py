"""Changes of pace: a rank as quick as its peers, quicker computation, launches for nothing."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.rank_steps import collecting_ns
from perfscope.analyzers.replay.engine import Op
from perfscope.analyzers.timeline import Row
from perfscope.analyzers.whatif.change import BadSetting, CannotReplay, Context, Setting, Uncertainty, factor
from perfscope.analyzers.whatif.script import NEVER, Script


def _rank_at_peers_pace(script: Script, context: Context, name: str, value: str) -> Uncertainty:
    if value != "peers":
        raise BadSetting(f"{name}={value}: write {name}=peers")
    try:
        rank = int(name.removeprefix("rank."))
    except ValueError:
        raise BadSetting(f"{name}: write rank.3=peers for rank 3") from None
    if rank not in script.lines:
        raise CannotReplay(f"rank {rank} is not in the recording, which has {min(script.lines)} to {max(script.lines)}")
    if rank not in context.peers:
        raise CannotReplay(f"no other recorded rank does the same work as rank {rank}, so there is no pace to take")
    paced = context.paced
    part = paced.slice_of(rank)
    # The lines are still the recorded ones: other changes come later and find what this one left.
    before, after = context.recorded.programs.own_ns[part], paced.own_ns[part]
    for place, line in enumerate(script.lines[rank]):
        own = float(before[place])
        line.own_ns = line.own_ns * (after[place] / own) if own else line.own_ns + _as_compute(float(after[place]))
        if line.op is Op.HOLD:
            line.hold_ns, line.lag_ns = NEVER, 0
    index = paced.ranks.index(rank)
    script.start_ns[rank] = int(paced.start_ns[index])
    return Uncertainty(less=0.15, more=0.05)


def _as_compute(own_ns: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    rows = np.zeros(len(Row))
    rows[Row.COMPUTE] = own_ns
    return rows


def _compute(script: Script, context: Context, name: str, value: str) -> Uncertainty:
    """Computation ``value`` times as fast. The step cannot get shorter than what its host does meanwhile."""
    speed = factor(name, value)
    for lines in script.lines.values():
        for line in lines:
            line.own_ns[Row.COMPUTE] /= speed
    if speed > 1:
        for rank in script.lines:
            script.floor_step_ns[rank] = _host_busy_ns(context.result, rank)
    return Uncertainty(less=0.10, more=0.0)


def _host_busy_ns(result: Comparison, rank: int) -> float:
    """Mean host time of one rank's step in which it was neither in the loader nor in a blocking call."""
    partial = result.partials[rank]
    if not partial.has_device_work:
        return 0.0
    return float(partial.progress.host_busy_ns[partial.steps.indices_of(result.steps)].mean())


def _launches(script: Script, context: Context, name: str, value: str) -> Uncertainty:
    """Launches and framework operators for ``value`` times their cost: 0 is what CUDA graphs come close to."""
    return _left_of(
        Row.LAUNCH, "operators are its computation, there is no launch to save", script, context, name, value
    )


def _syncs(script: Script, context: Context, name: str, value: str) -> Uncertainty:
    """``value`` times the idle time behind calls that wait for the device; 0: nothing waits for it."""
    return _left_of(Row.SYNC, "there is no device that a call could wait for", script, context, name, value)


def _collections(script: Script, context: Context, name: str, value: str) -> Uncertainty:
    """``value`` times the garbage collection that holds hosts up; 0: none, or only between the recorded steps.

    Where in a step it lies is not kept: it is taken from the step's host work, from each stretch its part.
    """
    left = _share(name, value)
    steps = context.result.steps.tolist()
    found = {rank: dict(zip(steps, collecting_ns(context.result, rank).tolist(), strict=True)) for rank in script.lines}
    if not any(any(of_steps.values()) for of_steps in found.values()):
        raise CannotReplay("no garbage collection is recorded; record with perfscope run, which names it")
    for rank, lines in script.lines.items():
        host: defaultdict[int | None, float] = defaultdict(float)
        for line in lines:
            host[line.step] += line.own_ns[Row.HOST]
        for line in lines:
            collecting = found[rank].get(line.step, 0) if line.step is not None else 0
            if collecting and host[line.step]:
                line.own_ns[Row.HOST] *= max(1 - (1 - left) * collecting / host[line.step], 0.0)
    return Uncertainty(less=0.25, more=0.05)


def _left_of(row: Row, why_not: str, script: Script, context: Context, name: str, value: str) -> Uncertainty:
    """``value`` times the idle time of one row. Raises CannotReplay, with ``why_not``, for a job on CPUs."""
    share = _share(name, value)
    if not any(context.result.partials[rank].has_device_work for rank in script.lines):
        raise CannotReplay(f"the job ran on CPUs: {why_not}")
    for lines in script.lines.values():
        for line in lines:
            line.own_ns[row] *= share
    return Uncertainty(less=0.25, more=0.0)


def _share(name: str, value: str) -> float:
    try:
        share = float(value.removesuffix("x"))
    except ValueError:
        share = -1.0
    if not share >= 0:
        raise BadSetting(f"{name}={value}: write the cost that is left, from 0 (none) to 1 (all) or more")
    return share


SETTINGS = (
    Setting("rank.*", "peers", "rank N as quick as the median of its peers", _rank_at_peers_pace, -1),
    Setting("compute", "FACTORx", "computation that many times as fast", _compute, 0),
    Setting("host.launch", "SHARE", "the share of launch and operator overhead that is left; 0: none", _launches, 0),
    Setting("host.sync", "SHARE", "the share of idle time behind synchronising calls that is left; 0: none", _syncs, 0),
    Setting("host.gc", "SHARE", "the share of garbage collection that is left; 0: none", _collections, 0),
)
