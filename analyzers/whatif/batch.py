"""More batches for each optimizer step: gradients are reduced once every k of them.

Played as k recorded steps of which only the last reduces its gradients and steps the optimizer. The step time is the
mean of the k: it stays that of one recorded batch, so that it can be set beside the measured one.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.replay.engine import Op
from perfscope.analyzers.timeline import Row
from perfscope.analyzers.whatif.change import BadSetting, CannotReplay, Context, Setting, Uncertainty
from perfscope.analyzers.whatif.ddp import Round, gradient_rounds
from perfscope.analyzers.whatif.script import Part, Script

_OF_OPTIMIZER: Final = [Row.COMPUTE, Row.LAUNCH]


def _accumulate(script: Script, context: Context, name: str, value: str) -> Uncertainty:
    every = int(value) if value.isdecimal() else 0
    if every < 2:
        raise BadSetting(f"{name}={value}: write how many batches an optimizer step is to have, 2 or more")
    used = script.recorded.steps[script.recorded.used].tolist()
    if len(used) < every:
        raise CannotReplay(f"{name}={value}: only {len(used)} steps are recorded; record {value} or more")
    if any(run.settings.get("gradient_accumulation", {}).get("no_sync") is False for run in context.runs.values()):
        raise CannotReplay(f"{name}: gradients are reduced after every micro-batch; try ddp.no_sync first")
    whole = len(used) // every * every
    reducing = set(used[len(used) - whole :][every - 1 :: every])
    # Steps that do not count, such as the first, still bring the ranks together.
    accumulating = set(used) - reducing
    dropped: set[Part] = set()
    for one in gradient_rounds(script):
        if one.step in accumulating:
            _without_optimizer(script, one)
            dropped.update(one.parts)
    script.without(dropped)
    script.settling = len(used) - whole
    return Uncertainty(less=0.15, more=0.15)


def _without_optimizer(script: Script, one: Round) -> None:
    """Take out what is computed and launched between the last gradients' hand-over, which ends the backward, and the
    end of the step.
    """
    after = False
    for line in script.lines[one.rank]:
        if after:
            line.own_ns[_OF_OPTIMIZER] = 0.0
            if line.step != one.step:
                return
        after |= line.op is Op.ISSUE and line.part is one.parts[-1]


SETTINGS = (
    Setting(
        "batch.accumulation", "K", "K batches an optimizer step; the time is still that of one", _accumulate, 1
    ),
)  # fmt: skip
