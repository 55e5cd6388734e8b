"""Loader stalls in a few steps: at the start of epochs, or when batches take unequally long.

More workers do not help where they are fast enough on average. Where workers are restarted for every epoch, all ranks
wait for the first batches: ``persistent_workers=True``. A script that makes an iterator for each batch pays for them
each time. Where batches cost unequally much, more of them must be loaded ahead: ``prefetch_factor``. Workers that are
too slow stall the step regularly, once per round of all workers: see ``dataloader_workers``. Source: torch
``utils/data/dataloader.py``; tuning guide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from statistics import fmean, median
from typing import Final

from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.typed import data_loader, training_arguments
from perfscope.frozen import dataclass
from perfscope.recording.metadata import DataLoaderMetadata
from perfscope.results.findings import Action, Confidence, Evidence, Finding, code

RULE: Final = "loader-stalls"
SHARE: Final = 0.05
"""Least share of the recorded time that is stalls."""
CLEAR: Final = 0.02
"""Share of the step that a typical step may wait: with more, loading is slow, not uneven."""
STALL: Final = 0.25
"""A wait of at least this share of the step is a stall."""
RARE: Final = 0.25
"""Largest share of the steps that stall."""
OFTEN: Final = 1.5
"""Below this many steps from one start to the next, a loader is started in each step."""
SHORT_EPOCH: Final = 8
"""Least batches per epoch: with fewer every step is close to an epoch's start."""
_DEFAULT_PREFETCH: Final = 2


@dataclass(frozen=True)
class Stalls:
    """Steps in which most ranks wait for batches, among many in which none does."""

    steps: tuple[int, ...]
    wait_us: tuple[float, ...]
    """Of each of them, median over the ranks."""
    epoch_starts: bool
    loader: DataLoaderMetadata
    recorded: bool = False
    """Is the start of the loader recorded? Else it is inferred from the number of the step."""
    is_all: bool = True
    """Do the other steps hardly wait?"""
    abandoned: bool = False
    """Does the script start the loader again before its epoch ends?"""

    @property
    def apart(self) -> float:
        """Steps from one stall to the next, mean; 0 for a lone one."""
        return (self.steps[-1] - self.steps[0]) / max(len(self.steps) - 1, 1)


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: no such stalls, or the loader is not recorded."""
    stalls = find_stalls(job)
    if stalls is None:
        return None
    recorded = sum(stalls.wait_us) / job.steps
    lost = _lost_us(job, stalls)
    return job.finding(
        RULE,
        f"{_what(stalls)}: {job.share(recorded):.0%} of the recorded time",
        lost,
        evidence=(
            Evidence("steps with a stall", len(stalls.steps), ranks=job.ranks),
            Evidence("longest stall", max(stalls.wait_us), "us", job.ranks),
            Evidence(
                "stall per step, mean of the whole run" if stalls.epoch_starts else "stall per step (mean)",
                lost,
                "us",
                job.ranks,
            ),
        ),
        action=_action(job, stalls),
        confidence=Confidence.LOW if job.info.few_steps or len(stalls.steps) == 1 else Confidence.MEDIUM,
    )


def _what(stalls: Stalls) -> str:
    if stalls.abandoned:
        each = "each step" if stalls.apart < OFTEN else f"every {stalls.apart:.0f} steps"
        return f"A data loader is started anew in {each}, before its epoch ends"
    for_what = "the data loader's workers" if stalls.recorded else "batches"
    return f"All ranks wait for {for_what} {'at the start of an epoch' if stalls.epoch_starts else 'in a few steps'}"


def find_stalls(job: RuleContext) -> Stalls | None:
    """Rare stalls of most ranks; None where loading is slow throughout, fast enough, or slow on one rank only."""
    loader = job.loader
    per_rank = [steps.loading_us for steps in job.per_step.values()]
    if loader is None or not per_rank or not job.steps:
        return None
    if (recorded := _recorded_starts(job, loader)) is not None:
        return recorded
    if loader.num_workers == 0:
        return None
    waits = [median(step) for step in zip(*per_rank, strict=True)]
    step = job.step_time_us
    hit = rare_waits(waits, step)
    if sum(waits[index] for index in hit) < SHARE * step * len(waits):
        return None
    steps = tuple(job.info.steps[index] for index in hit)
    starts = _at_epoch_starts(steps, loader)
    # Workers that are too slow stall once per round of all workers; rarer stalls have another cause.
    if not starts and len(hit) >= len(waits) // loader.num_workers:
        return None
    return Stalls(steps, tuple(waits[index] for index in hit), starts, loader)


def rare_waits(waits: Sequence[float], step_us: float) -> list[int]:
    """Which of these steps wait long, by what each waits (µs), where they are few and a typical one hardly waits."""
    hit = [index for index, wait in enumerate(waits) if wait >= STALL * step_us]
    rare = bool(waits) and median(waits) <= CLEAR * step_us and len(hit) <= RARE * len(waits)
    return hit if rare else []


def _recorded_starts(job: RuleContext, loader: DataLoaderMetadata) -> Stalls | None:
    """Steps in which a loader starts its workers, which costs at least ``SHARE``; None without.

    They are started, and load their first batches, while the ranks wait.
    """
    starting = [median(step) for step in zip(*(each.starting_us for each in job.per_step.values()), strict=True)]
    hit = [index for index, us in enumerate(starting) if us > 0]
    if not hit:
        return None
    loading = [median(step) for step in zip(*(each.loading_us for each in job.per_step.values()), strict=True)]
    others = [us for index, us in enumerate(loading) if index not in hit] or [0.0]
    usual = median(others)
    # Without workers the batch has to be loaded then, anyway.
    first = [max(us - usual, 0.0) if loader.num_workers else 0.0 for us in loading]
    cost = tuple(starting[index] + first[index] for index in hit)
    if sum(cost) < SHARE * job.step_time_us * len(starting):
        return None
    # The mean: workers that are too slow are waited for once per round of all of them, and not in the median step.
    is_all = fmean(others) <= CLEAR * job.step_time_us
    steps = tuple(job.info.steps[index] for index in hit)
    stalls = Stalls(steps, cost, epoch_starts=True, loader=loader, recorded=True, is_all=is_all)
    taken = max((row.batches_per_step for row in job.summary.dataloader), default=1.0)
    if len(hit) > 1 and loader.batches_per_epoch and stalls.apart * taken < loader.batches_per_epoch / 2:
        return replace(stalls, abandoned=True)
    return None if loader.persistent_workers or loader.num_workers == 0 else stalls


def _at_epoch_starts(steps: tuple[int, ...], loader: DataLoaderMetadata) -> bool:
    """Are all stalls where the loader started again, or one step later? Steps count from 0, with one batch each."""
    length = loader.batches_per_epoch
    if not length or length < SHORT_EPOCH or loader.persistent_workers:
        return False
    return all(step % length <= 1 for step in steps)


def _lost_us(job: RuleContext, stalls: Stalls) -> float:
    """Mean per step of the whole run: an epoch's start counts once per epoch, however many were recorded."""
    if stalls.recorded and stalls.apart:
        return sum(stalls.wait_us) / len(stalls.wait_us) / stalls.apart
    if stalls.epoch_starts and stalls.loader.batches_per_epoch:
        taken = max((int(row.batches_per_step) for row in job.summary.dataloader), default=1)
        batches = max(taken, 1) if stalls.recorded else 1  # inferred starts are of steps that take one batch each
        return sum(stalls.wait_us) / len(stalls.wait_us) * batches / stalls.loader.batches_per_epoch
    return sum(stalls.wait_us) / job.steps


def _action(job: RuleContext, stalls: Stalls) -> Action:
    used, loader = job.framework, stalls.loader
    if stalls.abandoned:
        return Action(
            setting="iter(DataLoader)",
            old=None,
            new=None,
            how="Make the loader and its iterator once, before the loop. next(iter(loader)) starts it each time.\n"
            + code("python", "batches = iter(loader)  # before the loop\nbatch = next(batches)  # in each step")
            + "\nIf it is a second loader, such as for validation, make it once, with persistent_workers=True.",
        )
    if stalls.epoch_starts:
        return Action(
            setting="DataLoader(persistent_workers=…)",
            old="False",
            new="True",
            how=training_arguments(dataloader_persistent_workers=True)
            if used == "transformers"
            else data_loader(num_workers=loader.num_workers, persistent_workers=True),
            costs="Workers hold their memory between epochs, and their copy of the dataset: later changes by the "
            "training process do not reach them.",
        )
    old = loader.prefetch_factor or _DEFAULT_PREFETCH
    # Loading of the slow batch has to start that much earlier, in steps that do not stall.
    ahead = max(stalls.wait_us) / (job.step_time_us - sum(stalls.wait_us) / job.steps)
    new = old + ceil(ahead / loader.num_workers)
    return Action(
        setting="DataLoader(prefetch_factor=…)",
        old=str(old),
        new=str(new),
        how=training_arguments(dataloader_prefetch_factor=new)
        if used == "transformers"
        else data_loader(num_workers=loader.num_workers, prefetch_factor=new),
        costs=f"Host memory for {(new - old) * loader.num_workers} more batches per rank.",
    )
