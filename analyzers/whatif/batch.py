"""More batches for each optimizer step: gradients are reduced once every k of them.

Played as k recorded steps of which only the last reduces its gradients. The step time is the mean of the k: it stays
that of one recorded batch, so that it can be set beside the measured one. The optimizer still steps each time, which
leaves a little more to save.
"""

from __future__ import annotations

from perfscope.analyzers.whatif.change import BadSetting, CannotReplay, Context, Setting, Uncertainty
from perfscope.analyzers.whatif.ddp import gradient_rounds
from perfscope.analyzers.whatif.script import Part, Script


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
    dropped: set[Part] = set()
    for one in gradient_rounds(script):
        if one.step not in reducing:
            dropped.update(one.parts)
    script.without(dropped)
    script.settling = len(used) - whole
    return Uncertainty(less=0.15, more=0.15)


SETTINGS = (
    Setting(
        "batch.accumulation", "K", "K batches an optimizer step; the time is still that of one", _accumulate, 1
    ),
)  # fmt: skip
