"""The headline and the first action: what limits the job, who, by how much, and what to change first.

The headline is the finding that is worth most. Where a larger one has none it says so, and where to look.
A job is called healthy only where the recording can show that: enough steps, all ranks, busy and balanced devices that
come near what they can compute.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Final

from perfscope.analyzers.job.pipelines.table import inherent_bubble_share
from perfscope.analyzers.losses import (
    WAIT,
    in_words,
    is_bound,
    largest,
    losses,
    named_host,
    profiling_effect,
    waits_for,
    where_to_look,
)
from perfscope.analyzers.rank.steps import UNMARKED
from perfscope.results.findings import STRAGGLING_RANK, Action, Finding, Obtained, Severity, plain
from perfscope.results.history import EVALUATE_LESS
from perfscope.results.notes import Note
from perfscope.results.rows import NO_FIX, Verdict
from perfscope.results.summary import Summary
from perfscope.results.tables import Pipeline
from perfscope.text import byte_size, factor, lower_first, percent, plural, ranks_in_words
from perfscope.trace.trace import WHOLE_GRAPH

LARGE: Final = 0.20
"""From this share of the step in one category a job without findings is limited by it."""

NAMED: Final = 0.10
"""From this share of the step a loss without a known change is named beside a smaller one with one."""

_MORE: Final = 0.02
"""By which share of the step such a loss is larger than what the first finding's change saves: else they are alike."""

_GAIN_UNKNOWN: Final = "What a change saves is not known"
"""Of host time that has a name: where to look is known."""

MOST_OF_TIME: Final = 0.5
"""From this share of the recorded time in steps with an evaluation, which are left out, these come first; in other
steps that take far longer than most, they are named."""

EVALUATED: Final = "Steps with an evaluation, which are left out, take"
"""What is said of these begins with this."""
_OF_MACHINES: Final = ("cores per host", "cores per rank")
"""What nobody sets: the instructions say how to get them."""
OF_OTHERS: Final = "Of the others:"
"""Then follows the verdict without these steps."""

_SERIOUS: Final = (Severity.HIGH, Severity.MEDIUM)
"""Findings that the verdict is about."""

_OFTEN: Final = 2
"""Such steps of a recording from which on it shows that there are many of them."""

BUSY: Final = 0.75
"""Least share of compute, and of a pipeline's inherent bubble, in a job that is called healthy."""

UNEVEN: Final = 1.15
"""From this ratio of the busiest stage's work to the mean of all a job is not called healthy. Its tables name 1.1 where
the work is known to differ; stages that wait for messages seem to differ by some percent."""

_NO_WAITS: Final = 0.02
"""Share of the step up to which waiting is none."""
_MOST_STEPS: Final = 0.8
"""Share of the steps in which a rank must be the slowest to be named."""

EFFICIENT: Final = 0.25
"""Least MFU of a job that is called healthy. Large transformers reach 0.3 to 0.55 (PaLM, arXiv 2204.02311, table 3)."""

FUSIBLE: Final = 0.3
"""Least share of devices' time in kernels that fusing makes fewer, from which that is the first thing to try."""

_FUSED: Final = ("elementwise", "copy", "reduction", "normalisation")
"""Classes of kernels that do little with what they read and write, so that memory limits them."""

_FUSE: Final = (
    "Try torch.compile: it fuses elementwise kernels, copies and reductions, which read and write the same values "
    "again and again. What that brings is not predicted; the kernels' table has their share of the peak."
)

_LOOK_AT_KERNELS: Final = (
    f"{NO_FIX}: look at what takes long in the kernels' table and at its share of the peak; larger batches and "
    "fused kernels raise it."
)

_MARK: Final = (
    "Mark the steps, 5 or more of all ranks, to see the rest: with perfscope run (--with nsys under Nsight Systems), "
    "with prof.step() under a torch.profiler schedule, or with a range around each step that is called step and its "
    'number (torch.cuda.nvtx.range(f"step {step}") under Nsight Systems, torch.profiler.record_function).'
)

_UNKNOWN_PEAK: Final = "; how near the devices come to their peak is not known"

BEYOND_IDEAL: Final = 0.05
"""Share of the step by which a pipeline bubble must exceed the inherent one for both to be named."""

_BUBBLE: Final = "pipeline-bubble"
"""The rule about a pipeline's inherent bubble, which no other category holds."""

_OF_SNAPSHOTS: Final = ("out-of-memory", "memory-growth", "memory-fragmentation")
"""Rules about memory snapshots, the most urgent first."""

_BLIND: Final = {
    "device_events_cut": (
        "the file ends early, before any device event",
        "Copy the file again; where the job was killed while it wrote, record again.",
    ),
    "device_events_lost": (
        "the file ends early, and device events are missing from every step",
        "Copy the file again; where the job was killed while it wrote, record again.",
    ),
    "device_events_unread": (
        "the recording has events of processes that PerfScope does not know, which may be its devices",
        "See the notes for the processes' names; record with torch.profiler (perfscope run does) or Nsight Systems.",
    ),
    "no_device_events": (
        "the recording has no device events",
        "Record device activities too (ProfilerActivity.CUDA; perfscope run does).",
    ),
}
"""Kind of a note on ranks whose devices are not in the recording -> (why, what to do)."""

_OF_CORES: Final = ("cpu-oversubscription", "cpu-contention")
"""Rules about ranks that wait for cores: now one waits for longer, now another, and the others for it."""
_OF_TRANSFERS: Final = ("network.", "ddp.", "fsdp.", "gradients.", "zero.", "batch.")
"""What settings of what is sent, and how fast, begin with."""

_GAINS: Final = 0.01
"""Speedup from which a change treats the loss that it is about."""


def verdict(summary: Summary) -> Verdict:
    """The verdict on a summary that has its findings, the one that is worth most first; and on evaluations, where steps
    are left out for them that take long.
    """
    found = _of_training(summary)
    effect = profiling_effect(summary)
    if effect is not None and effect.values["share"] > recoverable(summary):
        slow = f"{ranks_in_words(effect.ranks)} {'is' if len(effect.ranks) == 1 else 'are'} slow"
        words = (
            f"That {slow} in the recorded steps is an effect of profiling: other steps are too short for it."
            if effect.kind == "profiling_effect"
            else f"{slow[0].upper()}{slow[1:]} in the recorded steps alone: in others it takes no more CPU time."
        )
        found = replace(found, headline=f"{found.headline} {words}", healthy=False)
    long = _long_steps(summary)
    if long is not None and long.text not in found.headline and long.values["share"] > recoverable(summary):
        found = replace(found, headline=f"{found.headline} {long.text}", healthy=False)
    left_out = evaluations(summary)
    share = left_out.get("share", 0.0)
    if share < LARGE:
        return found
    about = f"{EVALUATED} {share:.0%} of the recorded time."
    often, others = len(left_out["steps"]), len(summary.job.steps)
    # Beyond what their training takes, which the other steps show, against what may be saved of the training.
    added = share - often * (1 - share) / others if others else 0.0
    is_most = share >= MOST_OF_TIME or (added >= NAMED and added >= (1 - share) * recoverable(summary))
    if not is_most or often < _OFTEN:
        return replace(found, headline=f"{found.headline} {about}", healthy=False)
    headline = f"{about} {OF_OTHERS} {lower_first(found.headline)}"
    return replace(found, headline=headline, healthy=False, first_action=evaluate_less(left_out.get("alone", [])))


def _long_steps(summary: Summary) -> Note | None:
    """The note on steps that take far longer than the others, where that is most of the recorded time."""
    kinds = ("long_step", "long_steps", "long_step_of_communication", "long_steps_of_communication")
    return next((note for note in summary.notes if note.kind in kinds and note.values["share"] >= MOST_OF_TIME), None)


def evaluations(summary: Summary) -> Mapping[str, Any]:
    """Values of the note on steps that are left out for an evaluation: their numbers, share and who evaluates alone."""
    return next((note.values for note in summary.notes if note.kind == "evaluation_left_out"), {})


def recoverable(summary: Summary) -> float:
    """The largest share of the step that a serious finding's change is expected to save; without any, the largest
    category but compute.
    """
    gains = [each.gain(summary.job.step_us) or 0.0 for each in summary.findings if each.severity in _SERIOUS]
    if not gains:
        return largest(losses(summary)[0], summary)[1]
    return max(1.0 if math.isinf(gain) else gain / (1 + gain) for gain in gains)


def evaluate_less(alone: Sequence[int]) -> str:
    """What to do about evaluations that take most of the time; ``alone`` are the ranks that evaluate, where others do
    not.
    """
    if not alone:
        return EVALUATE_LESS
    only = f"only {ranks_in_words(alone)} {'does' if len(alone) == 1 else 'do'}"
    return f"Divide the evaluation among all ranks: {only}, and the others wait. {EVALUATE_LESS}"


def _of_training(summary: Summary) -> Verdict:
    if summary.snapshots is not None and summary.snapshots.ooms:
        return of_snapshots(summary)
    serious = [finding for finding in summary.findings if finding.severity in _SERIOUS]
    blind = {rank: note.kind for note in summary.notes if note.kind in _BLIND for rank in note.ranks}
    if blind and all(row.rank in blind for row in summary.time_breakdown):
        return _blind(serious, min(blind.values()))
    if serious:
        return _limited(summary, serious)
    shares, compute = losses(summary)
    category, share = largest(shares, summary)
    bubble = _bubble(summary.pipeline)
    small = next((finding for finding in summary.findings if finding.rule == _BUBBLE), None)
    if small is not None and summary.pipeline is not None and inherent_bubble_share(summary.pipeline) >= share:
        return Verdict(headline=f"{small.title}.", healthy=False, first_action=_first_action(small, summary))
    if share >= LARGE:
        besides = f", besides the pipeline bubble of {bubble}" if bubble else ""
        what = in_words(category, share, summary)
        return Verdict(
            headline=f"{share:.0%} of the step is {what}{besides}; compute takes {compute:.0%}.",
            healthy=False,
            first_action=f"{_what_is_known(category, summary)}: {where_to_look(category, summary)}.",
        )
    busy = f"compute takes {percent(compute)} of the step"
    busy += f"; the pipeline bubble takes {bubble}" if bubble else ""
    if share >= 0.005:
        busy += f"; the largest other category is {in_words(category, share, summary)} ({share:.0%})"
    return _without_limit(summary, busy, compute, category)


def _blind(serious: list[Finding], kind: str) -> Verdict:
    """Of a job whose devices are not in the recording: what its hosts wait for need not delay them."""
    why, action = _BLIND[kind]
    headline = f"What the devices do, and what limits them, is not known: {why}."
    if serious:
        headline += f" What it shows of the hosts: {serious[0].title}."
    return Verdict(
        headline=headline,
        healthy=False,
        unsure=True,
        first_action=action,
    )


def of_snapshots(summary: Summary) -> Verdict:
    """The verdict on what memory snapshots show: why memory ran out, what grows, else who holds it."""
    found = {finding.rule: finding for finding in summary.findings}
    first = next((found[rule] for rule in _OF_SNAPSHOTS if rule in found), None)
    if first is not None:
        return Verdict(headline=f"{first.title}.", healthy=False, first_action=_first_action(first, summary))
    rows = summary.snapshots.devices if summary.snapshots is not None else ()
    fullest = max(rows, key=lambda row: row.peak_bytes)
    held: dict[str, float] = {}
    for row in summary.snapshots.holders if summary.snapshots is not None else ():
        if (row.rank, row.device) == (fullest.rank, fullest.device):
            held[row.phase] = held.get(row.phase, 0.0) + row.share
    most = sorted(held, key=lambda phase: -held[phase])[:3]
    who = f"Rank {fullest.rank}" if fullest.rank is not None else f"Device {fullest.device}"
    shares = ", ".join(f"{phase} {percent(held[phase])}" for phase in most)
    return Verdict(
        headline=f"{who} allocates {byte_size(fullest.peak_bytes)} at its peak{f' ({shares})' if shares else ''}; no "
        "memory ran out.",
        healthy=False,
        unsure=True,
        first_action="Record a few steps to see what limits the job: perfscope run -- COMMAND.",
    )


def _limited(summary: Summary, serious: list[Finding]) -> Verdict:
    """The finding that is worth most, and a larger loss that no finding is about."""
    first = serious[0]
    headline = f"{first.title}."
    shares, _ = losses(summary)
    category, share = largest(shares, summary, [finding for finding in serious if _gains(finding, summary)])
    recoverable = _share(first, summary)
    if share >= NAMED and category == WAIT and (first.rule in _OF_CORES or waits_for(summary, serious)):
        headline += f" Ranks wait for late ones for {share:.0%} of the step on average, mostly for the same reason."
    elif share >= NAMED and share >= recoverable + _MORE:
        what = in_words(category, share, summary)
        known = lower_first(_what_is_known(category, summary))
        headline += f" Another {share:.0%} of the step, more than this change saves, is {what}: {known}; "
        headline += f"{where_to_look(category, summary)}."
    late = next((finding for finding in serious[1:] if finding.rule == STRAGGLING_RANK), None)
    if late is not None and _share(late, summary) >= NAMED:
        headline += f" Also: {lower_first(late.title)}."
    action = _first_action(first, summary)
    if _may_be_waiting(summary, first):
        headline += " Part of it, or all, may be waiting for ranks that were not recorded."
        action = f"Record all ranks. If none is late: {lower_first(action)}"
    return Verdict(headline=headline, healthy=False, first_action=action)


def _what_is_known(category: str, summary: Summary) -> str:
    """Of a loss without a finding: where most of the host's time has a name, something can be changed there."""
    return _GAIN_UNKNOWN if category == "idle_host" and named_host(summary) else NO_FIX


def _share(finding: Finding, summary: Summary) -> float:
    """Of the step, what its change may save; all of it where that is not known."""
    gain = finding.gain(summary.job.step_us)
    return 1.0 if gain is None or math.isinf(gain) else gain / (1 + gain)


def _may_be_waiting(summary: Summary, finding: Finding) -> bool:
    """May the time in collectives that a finding is about be spent in waiting for ranks that are not recorded?"""
    step, change = finding.predicted_step_us, finding.whatif
    if step is None or not change or not all(name.startswith(_OF_TRANSFERS) for name in change):
        return False
    return is_bound(summary) and step.mid < summary.job.step_us <= step.high


def _gains(finding: Finding, summary: Summary) -> bool:
    """Does its change save anything, as far as that is known?"""
    gain = finding.gain(summary.job.step_us)
    return gain is None or gain >= _GAINS


def _without_limit(summary: Summary, busy: str, compute: float, category: str) -> Verdict:
    """Healthy, where the recording is enough to say so; else what speaks against it, or is missing."""
    graphs = sum(row.share for row in summary.kernels if row.name.startswith(WHOLE_GRAPH))
    if graphs >= LARGE:
        return Verdict(
            headline=f"No bottleneck found outside CUDA graphs, which take {graphs:.0%} of the device's time: what "
            "happens in them is not recorded.",
            healthy=False,
            unsure=True,
            first_action="Record the graphs' kernels: without CUDA graphs, or with nsys --cuda-graph-trace=node.",
        )
    pipeline = summary.pipeline
    if pipeline is not None and pipeline.imbalance >= UNEVEN:
        stage = max(pipeline.stages, key=lambda row: row.busy_us)
        return Verdict(
            headline=f"Uneven stages: stage {stage.stage} works {pipeline.imbalance:.2f} times as long as the mean of "
            f"all; {busy}.",
            healthy=False,
            first_action="Find out whether its work or its devices differ: compare its kernels and clocks with "
            "those of another stage; record shapes.",
        )
    uneven = _unevenness(summary)
    if pipeline is None and uneven >= UNEVEN:
        if (alone := _slowest_alone(summary)) is not None:
            return Verdict(
                headline=f"{alone}; {busy}.",
                healthy=False,
                first_action="Compare its kernels, clocks and batches with those of another rank.",
            )
        return Verdict(
            headline=f"Uneven ranks: in each step the slowest works {uneven:.2f} times as long as the mean of all; "
            f"{busy}.",
            healthy=False,
            first_action="No rule knows why: compare the ranks' own time per step, their kernels and their batches.",
        )
    bubble = inherent_bubble_share(pipeline) if pipeline is not None else 0.0
    if compute + bubble < BUSY:
        return Verdict(
            headline=f"No single cause: {busy}.",
            healthy=False,
            first_action=f"{NO_FIX} for the largest part: {where_to_look(category, summary)}.",
        )
    mfu = summary.utilisation.mfu
    if mfu is not None and mfu < EFFICIENT and not _is_lower_bound(summary):
        small = _fusible(summary)
        simple = f", {small:.0%} of their time in kernels that memory limits" if small >= FUSIBLE else ""
        return Verdict(
            headline=f"Devices are busy, at {percent(mfu)} of their peak{simple}: {busy}.",
            healthy=False,
            first_action=_FUSE if simple else _LOOK_AT_KERNELS,
        )
    missing = _missing(summary)
    if missing:
        return Verdict(
            headline=f"No bottleneck in what was recorded ({', '.join(missing)}): {busy}.",
            healthy=False,
            unsure=True,
            first_action=_MARK if _is_unmarked(summary) else "Record 5 steps or more of all ranks to see the rest.",
        )
    unknown = "" if mfu is not None or "CPU" in summary.job.devices else _UNKNOWN_PEAK
    headline = f"No bottleneck found: {busy}{unknown}."
    long = next((note for note in summary.notes if note.kind.startswith("long_step")), None)
    if long is None or long.kind.endswith("_of_more_work"):
        text = headline if long is None else f"{headline} {long.text}"
        return Verdict(headline=text, healthy=True, first_action=None)
    look = "See what these steps do in the timeline, and whether they have to do it as often."
    return Verdict(headline=f"{headline} {long.text}", healthy=False, first_action=look)


def _fusible(summary: Summary) -> float:
    """Share of devices' time in kernels that ``torch.compile`` fuses; 0 where it has made some of them already."""
    kernels = [row for row in summary.kernels if row.category == "compute"]
    if any(row.name.startswith("triton_") for row in kernels):
        return 0.0
    return sum(row.share for row in kernels if row.operator_class in _FUSED)


def _unevenness(summary: Summary) -> float:
    """Own time of the slowest rank of each step over the mean of all, mean over the steps; 1 where not known, or only
    of recorded steps.
    """
    if profiling_effect(summary) is not None:
        return 1.0
    steps = list(zip(*(row.own_us_per_step for row in summary.time_breakdown), strict=False))
    ratios = [max(own) * len(own) / math.fsum(own) for own in steps if math.fsum(own) > 0]
    return math.fsum(ratios) / len(ratios) if ratios else 1.0


def _slowest_alone(summary: Summary) -> str | None:
    """The one rank that is the slowest in most steps, in words, where no rank is seen to wait; None elsewhere."""
    rows = summary.time_breakdown
    shares, _ = losses(summary)
    if len(rows) < 2 or shares[WAIT] >= _NO_WAITS or summary.stragglers or profiling_effect(summary) is not None:
        return None
    steps = list(zip(*(row.own_us_per_step for row in rows), strict=False))
    slowest = Counter(own.index(max(own)) for own in steps)
    ((place, often),) = slowest.most_common(1) if slowest else ((0, 0),)
    own = [math.fsum(row.own_us_per_step) for row in rows]
    ratio = own[place] / max(median(own), 1e-9)
    if often < _MOST_STEPS * len(steps) or ratio < UNEVEN:
        return None
    return (
        f"Rank {rows[place].rank} is the slowest: in each step it works {ratio:.2f} times as long as the median of all "
        "ranks. Nothing in the recording makes the others wait for it"
    )


def _missing(summary: Summary) -> list[str]:
    """In words, what a recording must have to show that a job is healthy, and this one lacks."""
    job = summary.job
    none = "nothing marks the steps" if _is_unmarked(summary) else "no whole step"
    few = [plural(len(job.steps), "step") if job.steps else none] if job.few_steps else []
    absent = [f"{ranks_in_words(job.ranks)} of {job.world_size:,}"] if job.missing_ranks else []
    return [*few, *absent]


def _is_unmarked(summary: Summary) -> bool:
    """Does nothing in the recording tell where a step begins? More steps are of no use then."""
    return not summary.job.steps and summary.job.steps_from == UNMARKED


def _is_lower_bound(summary: Summary) -> bool:
    """Is the MFU one, because shapes of some matrix operators are missing?"""
    coverage = summary.utilisation.flops_coverage
    return coverage is not None and coverage < 0.95


def _bubble(pipeline: Pipeline | None) -> str:
    """The bubble of a pipeline in words, as far as balanced stages have it too; empty without one."""
    if pipeline is None or inherent_bubble_share(pipeline) < 0.005:
        return ""
    size = f"{pipeline.degree} stages, {pipeline.microbatches} micro-batches"
    if pipeline.virtual_stages > 1:
        size += f", {pipeline.virtual_stages} chunks per stage"
    ideal = pipeline.ideal_bubble_share or 0.0
    if pipeline.bubble_share - ideal >= BEYOND_IDEAL:
        size = f"{ideal:.0%} is inherent in {size}"
    return f"{pipeline.bubble_share:.0%} ({size})"


def _first_action(finding: Finding, summary: Summary) -> str:
    """What to change, and the speedup: the same as in the ranked list, predicted or at most."""
    what = _change(finding.action)
    predicted = finding.predicted_step_us
    gain = finding.gain(summary.job.step_us)
    if gain is None or not 0.005 <= gain < math.inf:
        return what
    if predicted is not None and predicted.mid:
        return f"{what} Predicted speedup: {predicted.speedup_of(summary.job.step_us)}."
    bounded = finding.obtained is Obtained.BOUNDED
    return f"{what} {'Speedup: at most' if bounded else 'Predicted speedup:'} {factor(1 + gain)}."


def _change(action: Action) -> str:
    """The change as one sentence: the setting with its new value where that is one word, else the instructions."""
    new = action.new
    phrase = " " in (new or "") or (" " in (action.old or "") and new != "set")
    machines = action.setting in _OF_MACHINES
    if new is None or new == action.old or new == "used" or machines or (phrase and "…" not in action.setting):
        first = plain(action.how).split("\n")[0]
        return f"{first.removesuffix(':')}." if first.endswith(":") else first  # its code is in the ranked list
    if "…" in action.setting:
        what = action.setting.replace("…", new)
    elif new == "set" or any(sign in action.setting for sign in "=(:"):
        what = action.setting
    else:
        what = f"{action.setting} to {new}"
    if new in ("on", "off"):
        return f"Turn {new} {action.setting}."
    return f"Set {what} (now {action.old})." if action.old is not None else f"Set {what}."
