"""The stages of a step (data loading, forward, backward …) in two recordings, from the histories of their runs.

Recordings without a trace have nothing else that says where the time went. The times are the host's, and hold the wait
for the device and for other ranks.
"""

from __future__ import annotations

import numpy as np

from perfscope.analyzers.compare.noise import LEVEL, noise_of_part, within
from perfscope.results.comparison import StageChange, StepChange
from perfscope.results.history import History
from perfscope.results.summary import Summary
from perfscope.trace.trace import Float64

_MEASURED = 3
"""Stages, ``other`` included, from which they say where the time goes: by default runs time the optimizer alone."""


def stage_changes(baseline: Summary, candidate: Summary, step: StepChange) -> tuple[StageChange, ...]:
    """Each stage's change, tested by its means over the history's bins; empty where a run has not timed its stages.

    As with the time breakdown, the chance of any false alarm among them is below ``LEVEL`` (Bonferroni).
    """
    first, second = _stages(baseline.history), _stages(candidate.history)
    names = [name for name in first if name in second]
    if len(names) < _MEASURED:
        return ()
    level = LEVEL / len(names)
    changes = []
    for name in names:
        before, after = float(first[name].mean()), float(second[name].mean())
        noise = noise_of_part((first[name], second[name]), level, step)
        low, high, significant = within(after - before, noise)
        changes.append(
            StageChange(
                name=name,
                baseline_us=before,
                candidate_us=after,
                low_us=low,
                high_us=high,
                significant=significant,
            )
        )
    return tuple(changes)


def stage_share(summary: Summary, name: str) -> float | None:
    """A stage's share of the run's steps, mean over ranks; None where it was not timed."""
    stages = {each: float(times.mean()) for each, times in _stages(summary.history).items()}
    whole = sum(stages.values())
    return stages[name] / whole if name in stages and whole > 0 else None


def _stages(history: History | None) -> dict[str, Float64]:
    """Stage -> its time in each of the history's bins, µs per step."""
    if history is None or not history.bins:
        return {}
    return {
        name: np.array([entry.stages_us[name] for entry in history.bins])
        for name in history.bins[0].stages_us
        if all(name in entry.stages_us for entry in history.bins)
    }
