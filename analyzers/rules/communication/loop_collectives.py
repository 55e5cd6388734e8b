"""Collectives that the training loop calls for itself in every step: fires when the step is shorter without them.

Metrics that are reduced, Python objects that are gathered, barriers and flags are small, so each takes the latency, and
the host waits for it, most often to read what it brings: these reads go with them. Done when metrics are logged, they
cost nothing in the other steps. What the model needs is left out (``job.collectives.of_loop``).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from perfscope.analyzers.job.collectives.of_loop import BETWEEN_STEPS
from perfscope.analyzers.rank.loop_phases import BEFORE_BACKWARD, IN_FORWARD
from perfscope.analyzers.rules.context import RuleContext, known
from perfscope.analyzers.rules.typed import training_arguments
from perfscope.results.findings import Action, Evidence, Finding, code
from perfscope.text import count_per_step

RULE: Final = "loop-collectives"
SHARE: Final = 0.05
"""Least share of the step that is saved."""
_CHANGE: Final = {"loop.collectives": "0"}
_ALL: Final = 0.95
"""From this share on of what is idle after waits of hosts, all of that is after reads of what such collectives bring;
from the rest on of it, some is."""
_EVERY: Final = 50
"""Steps: metrics are rarely logged more often, and what is left is no more than 2% of the cost."""
_METRICS: Final = (
    "Reduce metrics only in steps that log them, all numbers in one tensor:",
    "torch.distributed.all_reduce(metrics)  # one tensor: all numbers, added up since the last time",
)
_FLAGS: Final = (
    f"Agree on flags, such as whether to stop, every {_EVERY} steps:",
    "torch.distributed.broadcast(flag, 0)",
)
_BARRIERS: Final = "Leave out barriers: the next collective waits for all ranks anyway."
_OBJECTS: Final = "all_gather_object and gather_object pickle, and take two collectives; numbers in a tensor take one."
_LIGHTNING: Final = (
    "With sync_dist=True, self.log waits for all ranks in a barrier, and reduces each number by itself. Leave it out "
    'of what training_step logs: self.log("loss", loss).\n'
    "Metrics of torchmetrics reduce themselves, once an epoch. Numbers of all ranks in one tensor take one collective: "
    "self.all_gather(torch.stack(numbers)), in steps that log."
)
_NEEDED: Final = "What the next step depends on (a count of tokens by which the loss is divided, say) has to stay."


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: there are none, little would be saved, or the steps cannot be replayed."""
    calls = job.loop_collectives
    changes = [{**_CHANGE, **_without_reads(job)}, _CHANGE] if calls else []
    found = ((change, replayed) for change in changes if (replayed := job.replayed(change, SHARE)) is not None)
    change, replayed = next(found, (_CHANGE, None))
    if replayed is None:
        return None
    prediction, saved_us = replayed
    reads = ", with the reads of what they bring," if len(change) > 1 else ""
    listed = ", ".join(f"{count_per_step(count)} {kind}" for kind, count in calls.items())
    rows = [row for row in job.summary.time_breakdown if row.rank in job.ranks]
    exposed_us = sum(row.exposed_comm_wait_us + row.exposed_comm_transfer_us for row in rows) / len(rows)
    places = " and ".join(map(_in_words, job.loop_places)) or BETWEEN_STEPS
    return job.finding(
        RULE,
        f"Small collectives of the training loop {places} ({listed} per step){reads} cost "
        f"{job.share(saved_us):.0%} of the step",
        saved_us,
        evidence=(
            *(Evidence(f"{kind} per step {places}", count) for kind, count in calls.items()),
            Evidence("exposed communication per step (mean)", exposed_us, "us", job.ranks),
            *known("device idle after reads of what they bring", reads_us(job) or None, "us", job.ranks),
        ),
        action=_action(job),
        confidence=job.confidence(),
        predicted=prediction,
        whatif=change,
    )  # fmt: skip


def _in_words(place: str) -> str:
    return f"in {place}" if place == IN_FORWARD else place


def reads_us(job: RuleContext) -> float:
    """For how long devices are idle per step because hosts read what such collectives bring."""
    return sum(row.idle_us for row in job.syncs if row.of_loop) if job.loop_collectives else 0.0


def _without_reads(job: RuleContext) -> dict[str, str]:
    """What else is set where reads go with the collectives: the share of the waits of hosts that is left."""
    waits_us = sum(row.idle_us for row in job.syncs)
    share = reads_us(job) / waits_us if waits_us else 0.0
    if share < 1 - _ALL:
        return {}
    return {"host.sync": "0" if share >= _ALL else f"{1 - share:.2f}"}


def _action(job: RuleContext) -> Action:
    """What the user sets: of the Trainer, which gathers counts of tokens in every step, an argument of its own."""
    averaged = "average_tokens_across_devices"
    if set(job.loop_collectives) == {"all_gather"} and job.settings("transformers").get(averaged) is True:
        return Action(
            setting=f"TrainingArguments({averaged}=…)", old="True", new="False",
            how=training_arguments(**{averaged: False}),
            costs="Each rank divides its loss by its own count of tokens, which weighs ranks with few tokens more.",
        )  # fmt: skip
    if _logs_by_lightning(job):
        return Action(
            setting="sync_dist of self.log in training_step", old="True", new="False", how=_LIGHTNING,
            costs="What training_step logs is of one rank alone.",
        )  # fmt: skip
    return Action(
        setting="collectives of the training loop", old="in every step", new=f"every {_EVERY} steps",
        how=_how(job.loop_collectives), costs="Between two of them each rank knows its own numbers only.",
    )  # fmt: skip


def _logs_by_lightning(job: RuleContext) -> bool:
    """Does a LightningModule call some in its training_step, which self.log does then?"""
    lightning = job.settings("lightning")
    in_step = {IN_FORWARD, BEFORE_BACKWARD} & set(job.loop_places)
    return bool(lightning and in_step) and not lightning.get("fabric")


def _how(calls: Collection[str]) -> str:
    """What to do with the kinds that are called, the first sentence with what to type."""
    parts = []
    if set(calls) - {"barrier", "broadcast"}:
        parts.append(_seldom(*_METRICS))
    if "broadcast" in calls:
        parts.append(_seldom(*_FLAGS))
    if "barrier" in calls:
        parts.append(_BARRIERS)
    if {"all_gather", "gather"} & set(calls):
        parts.append(_OBJECTS)
    return "\n".join((*parts, _NEEDED))


def _seldom(sentence: str, call: str) -> str:
    typed = f"if step % {_EVERY} == 0:\n    {call}"
    return f"{sentence}\n{code('python', typed)}"
