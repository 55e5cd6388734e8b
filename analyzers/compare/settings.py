"""What differs between two runs: settings, versions, devices, the job itself; and what limits their comparison."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from statistics import fmean
from typing import Any, Final

from perfscope.results.comparison import PredictionCheck, SettingChange, StageChange, StepChange
from perfscope.results.rows import JobInfo
from perfscope.results.summary import Summary

_NAMES_OF_GROUPS: Final = {"group", "replicate_group"}
"""Settings that are only numbers of process groups."""

_ALWAYS: Final = ("threads", "precision", "optimizer")
"""Groups that every recording of today has: where one is absent, an earlier version made the recording."""


_SHOWN_BY_COLLECTIVES: Final = {
    "ddp": "data", "zero1": "shard", "zero2": "shard", "zero3": "shard", "fsdp": "shard",
}  # fmt: skip
"""Wrapper -> what its collectives show where it is not recorded itself."""

FOLLOWS: Final = {
    "ddp.bucket_bytes",
    "ddp.bucket_cap_bytes",
    "ddp.num_buckets_reduced",
    "ddp.total_parameter_size_bytes",
    "ddp.unused_parameter_size",
}
"""Recorded with the settings, but results of other settings and of the model."""


_SCRIPT: Final = ".py"


def setting_changes(baseline: Summary, candidate: Summary) -> tuple[SettingChange, ...]:
    """Everything that differs, the user's settings first."""
    changes = []
    for about, described in (
        ("setting", _settings_of(baseline, candidate)),
        ("version", lambda summary: summary.job.versions),
        ("device", _devices),
        ("job", _job),
        ("command", lambda summary: _options(summary.job.command)),
    ):
        first, second = described(baseline), described(candidate)
        for name in {**first, **second}:
            old, new = first.get(name), second.get(name)
            if old != new and not (name == "strategy" and _may_be_same_strategy(baseline.job, candidate.job)):
                kind = "job" if name in FOLLOWS else about
                changes.append(SettingChange(about=kind, name=name, baseline=old, candidate=new))
    return tuple(changes)


def _settings_of(*both: Summary) -> Callable[[Summary], dict[str, str]]:
    """Reads settings without the groups of ``_ALWAYS`` that one of the two recordings lacks."""
    unknown = {group for group in _ALWAYS for summary in both if group not in summary.job.settings}

    def known(summary: Summary) -> dict[str, str]:
        return {name: value for name, value in settings(summary).items() if name.partition(".")[0] not in unknown}

    return known


def settings(summary: Summary) -> dict[str, str]:
    """Settings by dotted name; the number of loader workers has its name in ``perfscope whatif``."""
    flat = dict(_flat(summary.job.settings))
    workers = sorted({row.num_workers for row in summary.dataloader if row.num_workers is not None})
    if workers:
        flat["dataloader.num_workers"] = ", ".join(str(number) for number in workers)
    return flat


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None and name not in _NAMES_OF_GROUPS:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            yield f"{prefix}{name}", text


def _devices(summary: Summary) -> dict[str, str]:
    job = summary.job
    return {"devices": ", ".join(job.devices), "hosts": ", ".join(job.hosts)}


def _job(summary: Summary) -> dict[str, str]:
    job = summary.job
    facts: dict[str, Any] = {
        "ranks": job.world_size,
        "strategy": " + ".join(job.strategies),
        "backend": job.backend,
        "batch per rank": " × ".join(str(length) for length in job.batch_shape or ()),
    }
    facts.update({f"model {name}": value for name, value in (job.model or {}).items()})
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items() if value}


def _may_be_same_strategy(*both: JobInfo) -> bool:
    """Does one of two jobs show only that gradients are reduced or sharded, and not by what, as the other does?"""
    if all(_is_known(job) for job in both):
        return False
    first, second = ({_SHOWN_BY_COLLECTIVES.get(name, name) for name in job.strategies} for job in both)
    return first == second


def _is_known(job: JobInfo) -> bool:
    return job.shows_wrappers or not set(_SHOWN_BY_COLLECTIVES.values()) & set(job.strategies)


def _options(command: tuple[str, ...]) -> dict[str, str]:
    """A command's options and their values, its script and the script's arguments: ``python train.py --batch 4 x`` is
    {"script": "train.py", "--batch": "4", "arguments": "x"}. What comes before the script starts it.
    """
    options: dict[str, str] = {}
    others: list[str] = []
    takes_next = False
    for word, follows in zip_longest(command, command[1:], fillvalue=""):
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            takes_next = not equals and bool(follows) and not follows.startswith("-") and not follows.endswith(_SCRIPT)
            options[name] = value if equals else follows if takes_next else "given"
        elif takes_next:
            takes_next = False
        else:
            others.append(word)
    script = next((place for place, word in enumerate(others) if word.endswith(_SCRIPT)), -1)
    named = {"arguments": others[script + 1 :]}
    if script >= 0:
        named = {"started by": others[:script], "script": [others[script]], **named}
    return {**options, **{name: " ".join(these) for name, these in named.items() if these}}


_PERTURBED: Final = 0.05
"""Difference of the runs' profiler overheads from which their step times are hard to compare."""

_CROWDED: Final = 0.25
"""Share of a host's cores used by other processes from which it is mentioned."""

_OTHER_CLOCK: Final = 0.02
"""Relative difference of the devices' mean clocks from which it is mentioned."""


def cautions(
    baseline: Summary,
    candidate: Summary,
    step: StepChange,
    changed: Sequence[SettingChange],
    stages: Sequence[StageChange] = (),
    predictions: Sequence[PredictionCheck] = (),
) -> Iterator[str]:
    """What limits the comparison, one sentence each. ``predictions`` are of changes that were found."""
    first, second = baseline.job, candidate.job
    ranks = [job.rank_count for job in (first, second)]
    if ranks[0] != ranks[1] and 0 not in ranks:
        yield (
            f"The runs have {ranks[0]} and {ranks[1]} ranks, so their steps are not comparable: the scaling table "
            "compares work per second and device."
        )
    parameters = [(job.model or {}).get("parameters") for job in (first, second)]
    if None not in parameters and parameters[0] != parameters[1] and first.world_size == second.world_size:
        yield f"The models differ: {parameters[0]:,} and {parameters[1]:,} parameters on the first rank."
    if first.batch_shape and second.batch_shape and first.batch_shape != second.batch_shape:
        shapes = " and ".join(" × ".join(map(str, job.batch_shape or ())) for job in (first, second))
        yield f"The batches differ ({shapes}): compare samples/s, not step times."
    ratios = first.perturbation, second.perturbation
    if ratios[0] is not None and ratios[1] is not None and abs(ratios[0] - ratios[1]) > _PERTURBED:
        yield (
            f"The profiler overhead differs: {ratios[0]:.2f}x in the baseline, {ratios[1]:.2f}x in the candidate. "
            "Compare the unprofiled steps."
        )
    yield from _machines(baseline, candidate)
    if step.verdict in ("faster", "slower") and not changed and not predictions:
        yield (
            "No recorded setting, version or device differs, so the cause may be the machines: record the baseline's "
            "job again and give it as --baseline, to measure how much its runs differ."
        )
    for which, job in (("baseline", first), ("candidate", second)):
        if job.missing_ranks or job.failures:
            missing = len(job.missing_ranks) + len(job.failures)
            yield f"{missing} ranks or files of the {which} are missing."
    bare = [which for which, job in (("baseline", baseline), ("candidate", candidate)) if not job.time_breakdown]
    if bare:
        yield (
            f"The {bare[0]} has step times but no trace, so the cause of the change is unknown, and profiled steps are "
            "compared with unprofiled ones."
            if len(bare) == 1
            else "Both recordings have step times but no trace: stages are timed on the host, and each holds its wait "
            "for the device and for other ranks."
            if stages
            else "Both recordings have step times but no trace, so the cause of the change is unknown."
        )
    elif not baseline.job.time_breakdown_us_per_step or not candidate.job.time_breakdown_us_per_step:
        yield (
            "One of the summaries has no time breakdown of each step (an earlier version wrote it?): the change of a "
            "category is significant only where it exceeds the noise of the whole step."
        )


def _machines(baseline: Summary, candidate: Summary) -> Iterator[str]:
    """Hosts that other processes used, and devices that ran at other clocks."""
    others = _taken_by_others(baseline), _taken_by_others(candidate)
    if max((share for share in others if share is not None), default=0.0) > _CROWDED:
        shares = " and ".join(
            f"{share:.0%} of the cores of a host in the {which}"
            for share, which in zip(others, ("baseline", "candidate"), strict=True)
            if share is not None
        )
        yield f"Other processes used {shares}: they may explain the change."
    clocks = _clock_mhz(baseline), _clock_mhz(candidate)
    if clocks[0] and clocks[1] and abs(clocks[1] / clocks[0] - 1) > _OTHER_CLOCK:
        yield f"The devices ran at {clocks[0]:,.0f} MHz in the baseline and at {clocks[1]:,.0f} MHz in the candidate."


def _taken_by_others(summary: Summary) -> float | None:
    """Share of the cores that other processes use, on the host with the largest; None where it was not sampled."""
    hosts = summary.system.hosts if summary.system is not None else ()
    return max(
        (
            row.cpu_share - row.job_cores / row.cores
            for row in hosts
            if row.cpu_share is not None and row.cores and row.job_cores is not None
        ),
        default=None,
    )


def _clock_mhz(summary: Summary) -> float | None:
    devices = summary.system.devices if summary.system is not None else ()
    clocks = [row.sm_mhz for row in devices if row.sm_mhz is not None and row.ranks]
    return fmean(clocks) if clocks else None
