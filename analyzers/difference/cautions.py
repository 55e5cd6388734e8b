"""What makes two runs hard to compare, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Final

from perfscope.comparison import SettingChange, StepChange
from perfscope.summary import Summary

_PERTURBED: Final = 0.05
"""Difference of the runs' perturbations from which their step times are hard to compare."""

_CROWDED: Final = 0.25
"""Share of a host's cores that other processes must take to be mentioned."""

_OTHER_CLOCK: Final = 0.02
"""Relative difference of the devices' mean clocks from which it is mentioned."""


def cautions(before: Summary, after: Summary, step: StepChange, changed: Sequence[SettingChange]) -> Iterator[str]:
    """What makes the two hard to compare."""
    first, second = before.job, after.job
    ranks = [job.world_size or len(job.ranks) for job in (first, second)]
    if ranks[0] != ranks[1] and 0 not in ranks:
        yield (
            f"The runs have {ranks[0]} and {ranks[1]} ranks: their steps differ for that alone; "
            "the scaling table compares their work per second and device."
        )
    parameters = [(job.model or {}).get("parameters") for job in (first, second)]
    if None not in parameters and parameters[0] != parameters[1] and first.world_size == second.world_size:
        yield f"The models differ: {parameters[0]:,} and {parameters[1]:,} parameters on the first rank."
    if first.batch_shape and second.batch_shape and first.batch_shape != second.batch_shape:
        shapes = " and ".join(" × ".join(map(str, job.batch_shape or ())) for job in (first, second))
        yield f"The batches differ ({shapes}): steps do different work; compare samples a second."
    ratios = first.perturbation, second.perturbation
    if ratios[0] is not None and ratios[1] is not None and abs(ratios[0] - ratios[1]) > _PERTURBED:
        yield (
            f"Profiling slowed the steps differently: {ratios[0]:.2f}× before, {ratios[1]:.2f}× after. The times "
            "without profiling are beside the step time."
        )
    yield from _machines(before, after)
    if step.verdict in ("faster", "slower") and not changed:
        yield (
            "Nothing that the recordings hold differs between the runs, so the machines may: record the first job "
            "again and give that as --baseline, to see what runs of it differ by."
        )
    for when, job in (("before", first), ("after", second)):
        if job.missing_ranks or job.failures:
            missing = len(job.missing_ranks) + len(job.failures)
            yield f"The recording {when} lacks {missing} of its ranks or files."
    bare = [when for when, summary in (("before", before), ("after", after)) if not summary.accounting]
    if bare:
        yield (
            f"The recording {bare[0]} holds no trace, only how long each step took: nothing tells "
            "why the step changed, and what it is compared with was profiled."
            if len(bare) == 1
            else "Both recordings hold no trace, only how long each step took: nothing tells why the step changed."
        )
    elif not before.job.account_us_per_step or not after.job.account_us_per_step:
        yield (
            "The rows of the account were not kept step by step in one of the summaries (written by an earlier "
            "version?): their changes are called real only where they exceed the noise of the whole step."
        )


def _machines(before: Summary, after: Summary) -> Iterator[str]:
    """Hosts that other processes crowded, and devices that ran at other clocks."""
    others = _taken_by_others(before), _taken_by_others(after)
    if max((share for share in others if share is not None), default=0.0) > _CROWDED:
        told = " and ".join(
            f"{share:.0%} {when}" for share, when in zip(others, ("before", "after"), strict=True) if share is not None
        )
        yield f"Other processes took {told} of the cores of a host: step times say as much of them as of the job."
    clocks = _clock_mhz(before), _clock_mhz(after)
    if clocks[0] and clocks[1] and abs(clocks[1] / clocks[0] - 1) > _OTHER_CLOCK:
        yield f"The devices ran at {clocks[0]:,.0f} MHz before and {clocks[1]:,.0f} MHz after."


def _taken_by_others(summary: Summary) -> float | None:
    """Share of the cores busy with something else than the job, on the host where it is most."""
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
