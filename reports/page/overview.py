"""The first screen: what the job was, its main numbers, how sure the verdict is."""

from __future__ import annotations

import json
import shlex
from datetime import datetime, timezone
from statistics import median
from typing import Final

from perfscope.frozen import dataclass
from perfscope.reports.page import hang
from perfscope.reports.page.run_history import drift
from perfscope.results.findings import GRADIENTS_BY_HAND
from perfscope.results.rows import JobInfo
from perfscope.results.summary import Summary
from perfscope.text import ABSENT, byte_size, count, duration, factor, known, percent, plural, rank_list

_TIMES: Final = 2.0
"""From this ratio on, longer steps are so many times as long: percentages above 100 are hard to read."""

_NOTICEABLE: Final = 0.02
"""Change of the median step time by profiling, as a share, from which it is said."""
_AS_MUCH: Final = 0.05
"""Up to this difference two such shares read as one."""
_LONGER: Final = 0.05
"""Share by which the mean of steps without the profiler is above the recorded steps, from which that is explained."""
_PACED: Final = 0.9
"""Share of an unprofiled step that its batches take the loader's workers, from which it waits for them."""

_STRATEGIES = {
    "ddp": "DDP",
    "fsdp": "FSDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "pipeline": "pipeline parallel",
    "tensor": "tensor parallel",
    "context": "context parallel",
    "expert": "expert parallel",
    "data": "data parallel",
    "shard": "sharding",
    "single": "single process",
    "unknown": "",
}
_BY_HAND = ("data", "shard")
"""Shown by collectives: the user's own, if nothing wraps the model."""

_SHARDING = {"fsdp", "zero3", "tensor", "pipeline"}


@dataclass(frozen=True)
class Fact:
    """One line about the job."""

    label: str
    value: str
    code: bool = False
    """Shown in fixed width: a command, a path."""


def identity(summary: Summary) -> tuple[str, ...]:
    """The job in a few words: model, strategy, ranks, devices, versions, when."""
    job = summary.job
    return tuple(
        part for part in (_model(job), strategy(summary), _world(job), _devices(job), _torch(job), _when(job)) if part
    )


def command(job: JobInfo) -> str:
    """The command as one would type it."""
    return shlex.join(job.command)


def facts(summary: Summary) -> tuple[Fact, ...]:
    """Everything known about the job."""
    job = summary.job
    lines = [
        Fact("Command", command(job), code=True),
        Fact("Recording", summary.source, code=True),
        Fact("Started", _when(job)),
        Fact("Model", _model(job)),
        Fact("Parameters", _parameters(job)),
        Fact("Strategy", strategy(summary)),
        Fact("Batch per rank", " × ".join(str(length) for length in job.batch_shape or ())),
        Fact("Ranks", _world(job)),
        Fact("Hosts", ", ".join(job.hosts)),
        Fact("Devices", ", ".join(job.devices)),
        Fact("Backend", job.backend or ""),
        Fact("Steps", _steps(job) if job.steps or summary.history is None else job.steps_from),
        Fact("Versions", ", ".join(f"{name} {version}" for name, version in job.versions.items())),
        Fact("PerfScope", summary.perfscope_version),
    ]
    lines += [Fact(name, value, code=True) for name, value in _flat(job.settings)]
    return tuple(fact for fact in lines if fact.value and fact.value != ABSENT)


def strategy(summary: Summary) -> str:
    """The parallel strategy in words: ``DDP``, ``FSDP + tensor parallel``."""
    own = _reduces_by_hand(summary)
    named = summary.job.strategies
    return " + ".join(_STRATEGIES.get(name, name) + (" by hand" if own and name in _BY_HAND else "") for name in named)


def _reduces_by_hand(summary: Summary) -> bool:
    """Is it known that no wrapper reduces the gradients: a wrapper would be recorded, or a loop over them is seen?"""
    return summary.job.shows_wrappers or any(finding.rule == GRADIENTS_BY_HAND for finding in summary.findings)


def certainty(summary: Summary) -> str:
    """How sure the verdict is, and what it rests on."""
    job = summary.job
    sentences = []
    if summary.hang is not None:
        sentences.append(hang.certainty(summary.hang))
    elif summary.findings and not summary.verdict.healthy and summary.crash is None:
        sentences.append(f"{summary.findings[0].confidence.capitalize()} confidence.")
    if job.ranks and (summary.time_breakdown or summary.history is not None):
        sentences.append(f"Based on {_basis(summary)}.")
    if job.perturbation is not None and known(job.perturbation):
        sentences.append(perturbation(summary, job.perturbation))
    return " ".join(sentences)


def perturbation(summary: Summary, ratio: float) -> str:
    """How profiling changed the step time (``ratio``: profiled over unprofiled), as a sentence."""
    job, change = summary.job, ratio - 1
    if change <= -_NOTICEABLE:
        faster = f"Profiled steps were {percent(-change)} faster than unprofiled ones"
        faster += _unlike_their_mean(job, ratio, slower=False)
        if _wait_for_workers(summary):
            return f"{faster}, whose loader workers are as slow: more batches were ready."
        return f"{faster}: the step time varies by more than the profiler overhead."
    if change < _NOTICEABLE:
        return f"Profiling did not noticeably change the step time{_some_took_longer(job)}."
    slowed = f"Profiling slowed the steps by {percent(change)}"
    if ratio >= _TIMES:
        slowed = f"Profiling made the steps {factor(ratio).removesuffix('x')} times as long"
    if not known(job.unprofiled_step_us):
        return f"{slowed}: everything here is of the recorded steps, because too few were timed without the profiler."
    slowed += _some_took_longer(job) or _unlike_their_mean(job, ratio, slower=True)
    return (
        f"{slowed}: shares of the step are of the recorded steps, step time and predictions are of steps without the "
        "profiler."
    )


def _wait_for_workers(summary: Summary) -> bool:
    """Do loader workers take as long as an unprofiled step for its batches?"""
    step_us = summary.job.unprofiled_step_us
    return known(step_us) and any((row.workers_us or 0.0) >= _PACED * step_us for row in summary.dataloader)


def _unlike_their_mean(job: JobInfo, ratio: float, *, slower: bool) -> str:
    """Where profiled steps are no faster, or ``slower``, on the mean, which is what the page gives, or by another share
    of it.
    """
    mean_us = job.unprofiled_step_us
    if not known(mean_us):
        return ""
    change = job.step_time_us / mean_us - 1
    as_said = change >= _NOTICEABLE if slower else change <= -_NOTICEABLE
    if not as_said:
        return " in the median, though not on the mean"
    return "" if abs(change + 1 - ratio) <= _AS_MUCH else " in the median"


def _some_took_longer(job: JobInfo) -> str:
    """Medians are compared, and the step time is a mean: where a few of the other steps took much longer, it is above
    that of the recorded steps, whatever profiling does.
    """
    if not known(job.unprofiled_step_us) or job.unprofiled_step_us < (1 + _LONGER) * job.step_time_us:
        return ""
    return f" in the median; unprofiled steps take {duration(job.unprofiled_step_us)} on the mean, as some took longer"


def since(summary: Summary) -> str:
    """In which steps the job is limited so, as far as the recording shows; empty where nothing limits it."""
    job = summary.job
    if summary.verdict.healthy or not job.steps:
        return ""
    sentences = []
    worst = summary.stragglers[:1]
    if worst and worst[0].steps and summary.findings and "straggl" in summary.findings[0].rule:
        slow = worst[0].steps
        if len(slow) == len(job.steps):
            sentences.append(f"In every recorded step ({rank_list(job.steps)}).")
        else:
            sentences.append(
                f"In {len(slow)} of {plural(len(job.steps), 'recorded step')}, first in step {slow[0]:,}, last in step "
                f"{slow[-1]:,}."
            )
    elif len(job.steps) > 1:
        sentences.append(f"In the recorded steps {rank_list(job.steps)}.")
    trend = drift(summary.history) if summary.history is not None else ""
    if trend:
        sentences.append(f"{trend[0].upper()}{trend[1:]}.")
    return " ".join(sentences)


def _basis(summary: Summary) -> str:
    job = summary.job
    steps = plural(len(job.steps), "step") if job.steps else "one window without steps"
    if summary.history is not None and not summary.time_breakdown:
        steps = f"the times of {plural(max(row.steps for row in summary.history.ranks), 'step')}, without a trace,"
    size = job.world_size
    if size is not None and size > len(job.ranks):
        return f"{steps} of {len(job.ranks):,} of {plural(size, 'rank')}"
    everyone = {1: "the only rank", 2: "both ranks"}.get(len(job.ranks), f"all {len(job.ranks):,} ranks")
    return f"{steps} of {everyone}"


def _steps(job: JobInfo) -> str:
    if not job.steps:
        return f"none found ({job.steps_from})" if job.steps_from else "none found"
    times = [time for time in job.step_time_us_per_step if known(time)]
    middle = f", median {duration(median(times))}" if times else ""
    source = f", found by {job.steps_from}" if job.steps_from else ""
    return f"{rank_list(job.steps)} ({plural(len(job.steps), 'step')}{middle}{source})"


def _world(job: JobInfo) -> str:
    present = len(job.ranks)
    size = job.world_size if job.world_size is not None else present
    text = plural(size, "rank") if present >= size else f"{present:,} of {plural(size, 'rank')}"
    return text + (f" on {plural(len(job.hosts), 'host')}" if job.hosts else "")


def _model(job: JobInfo) -> str:
    if not job.model or not job.model.get("name"):
        return ""
    parameters = job.model.get("parameters")
    shard = f" in the shard of rank {min(job.ranks)}" if _is_shard(job) else ""
    return str(job.model["name"]) + (f", {count(parameters)} parameters{shard}" if parameters else "")


def _is_shard(job: JobInfo) -> bool:
    """Is what a rank holds of the model a part of it?"""
    return bool(job.ranks) and bool(set(job.strategies) & _SHARDING)


def _parameters(job: JobInfo) -> str:
    model = job.model or {}
    number, size = model.get("parameters"), model.get("parameter_bytes")
    if not number:
        return ""
    shard = f", the shard of rank {min(job.ranks)}" if _is_shard(job) else ""
    dtypes = ", ".join(str(dtype) for dtype in model.get("dtypes") or ())
    return f"{number:,}" + (f" ({byte_size(size)}{', ' + dtypes if dtypes else ''})" if size else "") + shard


def _devices(job: JobInfo) -> str:
    names = ["CPU" if device == "cpu" else device for device in job.devices[:2]]
    return ", ".join(names) + (f" and {len(job.devices) - 2} other kinds" if len(job.devices) > 2 else "")


def _torch(job: JobInfo) -> str:
    return f"PyTorch {job.versions['torch']}" if "torch" in job.versions else ""


def _when(job: JobInfo) -> str:
    """The start in UTC to the minute; as written where it is no ISO time."""
    try:
        moment = datetime.fromisoformat((job.started_at or "").replace("Z", "+00:00"))
    except ValueError:
        return job.started_at or ""
    if moment.tzinfo is None:
        return moment.strftime("%Y-%m-%d %H:%M")
    return moment.astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def _flat(settings: dict[str, object], prefix: str = "") -> list[tuple[str, str]]:
    """Settings as (dotted name, value as JSON); what is None was not set and is left out."""
    lines: list[tuple[str, str]] = []
    for name, value in settings.items():
        if isinstance(value, dict):
            lines += _flat(value, f"{prefix}{name}.")
        elif value is not None:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            lines.append((f"{prefix}{name}", text))
    return lines
