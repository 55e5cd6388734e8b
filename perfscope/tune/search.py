"""Decides what to try next, and what helps. Pure: it gets a function that measures, and knows no processes.

The unchanged job is measured before, after every second trial, and at the end, so that each trial is between two of its
runs and the machine's drift favours nothing::

    B  c1 c2  B  c3 c4  B      each change alone, the most promising first
       c1+c3  B                what helped together, one more at a time, as long as each one adds something
       c1+c3  B                the result is measured once more, and reported if it helps again

The last measurement is the one reported: of many trials the best one looks better than it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from math import hypot
from typing import Final

from perfscope.frozen import dataclass
from perfscope.tune.candidates import Candidate, Value, settings_of
from perfscope.tune.measuring import Drift, Measurement, TrialGain, gain

BETWEEN_BASELINES: Final = 2
"""Trials."""


class TrialFailed(Exception):
    """A trial is no evidence: it failed, ended too early, or ran without the change. The message says why."""


Measure = Callable[[Mapping[str, Value]], Measurement]
"""Settings -> step time; raises TrialFailed."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of the job with changes; ``gain`` is None where it ``failed``."""

    changes: tuple[Candidate, ...]
    measurement: Measurement | None = None
    around: tuple[Measurement, Measurement] | None = None
    """The unchanged job before and after it."""
    gain: TrialGain | None = None
    failed: str = ""

    def judged(self, drift: Drift) -> Trial:
        """With its gain, given the machine's drift."""
        if self.measurement is None or self.around is None:
            return self
        return replace(self, gain=gain(self.measurement, *self.around, drift))


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The decision about one candidate."""

    candidate: Candidate
    kept: bool
    why: str
    trial: Trial | None = None
    """In which it was tried alone; None where it was not."""


@dataclass(kw_only=True)
class SearchOutcome:
    """All that was measured and decided."""

    baselines: list[Measurement] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    """In their order."""
    decisions: list[Decision] = field(default_factory=list)
    confirmed: Trial | None = None
    """The second, independent measurement of the changes that help."""
    stopped: str = ""
    """Why the search ended early; empty where it did not."""
    interrupted: bool = False
    """By Ctrl-C or a signal."""

    @property
    def drift(self) -> Drift:
        """The unchanged job's measurements."""
        return Drift(tuple(self.baselines))

    @property
    def kept(self) -> tuple[Candidate, ...]:
        """The changes that help."""
        return tuple(decision.candidate for decision in self.decisions if decision.kept)


class Search:
    """One search. Raises TrialFailed where the unchanged job itself cannot be measured."""

    def __init__(self, measure: Measure, budget: int) -> None:
        self._measure = measure
        self._budget = budget
        self._since_baseline: list[tuple[tuple[Candidate, ...], Measurement | str]] = []
        self.outcome = SearchOutcome()

    def run(self, candidates: Sequence[Candidate]) -> SearchOutcome:
        """Try the candidates in their order. Ctrl-C ends the search with what has been measured; no change is then
        recommended.
        """
        outcome = self.outcome
        alone: dict[Candidate, Trial] = {}
        kept: tuple[Candidate, ...] = ()
        helped: list[Candidate] = []
        try:
            self._baseline()
            # One trial is for measuring the result again.
            for candidate in candidates[: max(self._budget - 1, 1)]:
                self._try((candidate,))
            self._close_round()
            # The first ones were judged when little was known of the noise.
            outcome.trials = [trial.judged(outcome.drift) for trial in outcome.trials]
            alone = {trial.changes[0]: trial for trial in outcome.trials}
            helped = self._best_of_each(alone)
            kept = self._together(helped, alone)
            if kept:
                outcome.confirmed = self._between_baselines(kept)
        except KeyboardInterrupt:
            outcome.interrupted = True
            outcome.stopped = "interrupted"
        except TrialFailed as failure:  # of the unchanged job
            if not outcome.baselines:
                raise
            outcome.stopped = f"the unchanged job failed: {failure}"
        if outcome.stopped:
            alone = {trial.changes[0]: trial for trial in outcome.trials if len(trial.changes) == 1}
        outcome.decisions = [self._decide(each, alone.get(each), helped, kept) for each in candidates]
        return outcome

    def _best_of_each(self, alone: Mapping[Candidate, Trial]) -> list[Candidate]:
        """Candidates that helped alone, of each setting the best value; the largest gain first."""
        helped = [each for each, trial in alone.items() if trial.gain is not None and trial.gain.real]
        best: dict[str, Candidate] = {}
        for candidate in sorted(helped, key=lambda each: -_share(alone[each])):
            best.setdefault(candidate.name, candidate)
        return list(best.values())

    def _together(self, helped: Sequence[Candidate], alone: Mapping[Candidate, Trial]) -> tuple[Candidate, ...]:
        """Add one after the other to the best, as long as each saves more than noise and the budget lasts."""
        kept: tuple[Candidate, ...] = tuple(helped[:1])
        so_far = alone[kept[0]].gain if kept else None
        for candidate in helped[1:]:
            if len(self.outcome.trials) + 1 >= self._budget:
                break
            trial = self._between_baselines((*kept, candidate))
            if trial.gain is not None and so_far is not None and _adds(trial.gain, so_far):
                kept, so_far = trial.changes, trial.gain
        return kept

    def _between_baselines(self, changes: tuple[Candidate, ...]) -> Trial:
        self._try(changes)
        self._close_round()
        return self.outcome.trials[-1]

    def _try(self, changes: tuple[Candidate, ...]) -> None:
        """Measure; the gain is known after the next baseline."""
        result: Measurement | str
        try:
            result = self._measure(settings_of(changes))
        except TrialFailed as failure:
            result = str(failure)
        self._since_baseline.append((changes, result))
        if len(self._since_baseline) == BETWEEN_BASELINES:
            self._close_round()

    def _baseline(self) -> None:
        self.outcome.baselines.append(self._measure({}))

    def _close_round(self) -> None:
        """Measure the unchanged job again and judge what was tried since the last time."""
        if not self._since_baseline:
            return
        self._baseline()
        before, after = self.outcome.baselines[-2:]
        for changes, result in self._since_baseline:
            if isinstance(result, str):
                self.outcome.trials.append(Trial(changes=changes, failed=result))
            else:
                trial = Trial(changes=changes, measurement=result, around=(before, after))
                self.outcome.trials.append(trial.judged(self.outcome.drift))
        self._since_baseline.clear()

    def _decide(
        self, candidate: Candidate, trial: Trial | None, helped: Sequence[Candidate], kept: Sequence[Candidate]
    ) -> Decision:
        why = self._why_not(candidate, trial, helped, kept)
        return Decision(candidate=candidate, kept=not why, why=why or "saves time, measured twice", trial=trial)

    def _why_not(
        self, candidate: Candidate, trial: Trial | None, helped: Sequence[Candidate], kept: Sequence[Candidate]
    ) -> str:
        """Why a candidate does not help; empty where it does."""
        if trial is None:
            return (
                "not tried: stopped early"
                if self.outcome.stopped
                else "not tried: the budget was used for other trials"
            )
        if trial.gain is None:
            return f"failed: {trial.failed}"
        if not trial.gain.real:
            return "slower" if trial.gain.share < -trial.gain.noise else "no gain beyond noise"
        if candidate in kept:
            return self._why_not_confirmed()
        if self.outcome.stopped:
            return "not measured twice"
        if candidate not in helped:
            return "another value saves more"
        together = any(len(trial.changes) > 1 and candidate in trial.changes for trial in self.outcome.trials)
        return "adds no gain beyond noise to the others" if together else "the budget ended before it could be added"

    def _why_not_confirmed(self) -> str:
        again = self.outcome.confirmed
        if again is None:
            return "not measured twice"
        if again.gain is None:
            return f"failed when measured again: {again.failed}"
        return "" if again.gain.real else "no gain when measured again"


def _share(trial: Trial) -> float:
    return trial.gain.share if trial.gain is not None else 0.0


def _adds(together: TrialGain, before: TrialGain) -> bool:
    """Is the step, as a share of what it was, shorter by more than noise?"""
    ratio = (1 - together.share) / (1 - before.share)
    return 1 - ratio > hypot(together.noise, before.noise) / 2**0.5
