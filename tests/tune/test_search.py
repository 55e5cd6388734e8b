"""What is tried, and what is kept: noise never wins, a real gain does. Measurements are planted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest

from perfscope.tune.candidates import Candidate, Value
from perfscope.tune.measuring import Measurement
from perfscope.tune.search import Search, SearchOutcome, TrialFailed

BASE_NS = 100e6


def change(name: str, new: Value = 1) -> Candidate:
    return Candidate(name=name, new=new, old=0, why="planted")


@dataclass
class Job:
    """A job of which it is known what each change does to its step, on a machine with noise and drift."""

    effects: Mapping[tuple[str, Value], float] = field(default_factory=dict)
    """Change -> what the step is multiplied by."""
    noise: float = 0.0
    """Standard deviation from run to run."""
    drift: float = 0.0
    """Slower with each run, relative."""
    seed: int = 0
    runs: list[dict[str, Value]] = field(default_factory=list)
    before: Callable[[dict[str, Value], int], None] = lambda settings, run: None

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def measure(self, settings: Mapping[str, Value]) -> Measurement:
        self.before(dict(settings), len(self.runs))
        self.runs.append(dict(settings))
        step = BASE_NS * (1 + self.drift) ** len(self.runs) * self.random.normal(1.0, self.noise)
        for chosen in settings.items():
            step *= self.effects.get(chosen, 1.0)
        return Measurement(step, step * self.noise / 3, 24)

    def tuned(self, *candidates: Candidate, budget: int = 10) -> SearchOutcome:
        return Search(self.measure, budget).run(candidates)


def why(outcome: SearchOutcome, name: str, new: Value = 1) -> str:
    return next(d.why for d in outcome.decisions if (d.candidate.name, d.candidate.new) == (name, new))


def test_the_unchanged_job_is_measured_between_trials() -> None:
    job = Job()
    outcome = job.tuned(change("a"), change("b"), change("c"))
    assert job.runs == [{}, {"a": 1}, {"b": 1}, {}, {"c": 1}, {}]
    assert outcome.kept == ()
    assert {d.why for d in outcome.decisions} == {"no gain beyond noise"}


def test_a_real_gain_is_found_and_measured_twice() -> None:
    job = Job({("a", 1): 0.8}, noise=0.01)
    outcome = job.tuned(change("b"), change("a"))
    assert [each.name for each in outcome.kept] == ["a"]
    assert job.runs.count({"a": 1}) == 2
    assert outcome.confirmed is not None
    assert outcome.confirmed.gain is not None
    assert outcome.confirmed.gain.share == pytest.approx(0.2, abs=0.05)


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.1])
def test_noise_does_not_win(noise: float) -> None:
    names = [change(name) for name in "abcdefgh"]
    kept = [Job(noise=noise, seed=seed).tuned(*names).kept for seed in range(150)]
    assert sum(bool(each) for each in kept) <= 3


@pytest.mark.parametrize("drift", [0.03, -0.03])
def test_drift_does_not_win(drift: float) -> None:
    outcome = Job(drift=drift).tuned(*(change(name) for name in "abcdefgh"))
    assert outcome.kept == ()


@pytest.mark.parametrize("noise", [0.01, 0.03])
def test_a_real_gain_wins_in_spite_of_noise(noise: float) -> None:
    names = [change(name) for name in "abcdef"]
    found = [Job({("d", 1): 0.7}, noise=noise, seed=seed).tuned(*names).kept for seed in range(100)]
    assert sum([each.name for each in kept] == ["d"] for kept in found) >= 90


def test_the_best_value_of_a_setting_is_kept() -> None:
    outcome = Job({("a", 1): 0.9, ("a", 2): 0.6}).tuned(change("a", 1), change("a", 2))
    assert [each.new for each in outcome.kept] == [2]
    assert why(outcome, "a", 1) == "another value saves more"


def test_what_adds_to_each_other_is_kept_together() -> None:
    job = Job({("a", 1): 0.8, ("b", 1): 0.7})
    outcome = job.tuned(change("a"), change("b"), change("c"))
    assert {each.name for each in outcome.kept} == {"a", "b"}
    assert outcome.confirmed is not None
    assert outcome.confirmed.gain is not None
    assert outcome.confirmed.gain.share == pytest.approx(1 - 0.8 * 0.7)
    assert job.runs.count({"b": 1, "a": 1}) == 2, "once to see whether it adds, once more at the end"


def test_what_adds_nothing_to_the_best_is_not_kept() -> None:
    class Overlapping(Job):
        def measure(self, settings: Mapping[str, Value]) -> Measurement:
            return super().measure({"a": 1} if settings.keys() >= {"a", "b"} else settings)

    outcome = Overlapping({("a", 1): 0.6, ("b", 1): 0.8}).tuned(change("a"), change("b"))
    assert [each.name for each in outcome.kept] == ["a"]
    assert why(outcome, "b") == "adds no gain beyond noise to the others"


def test_a_gain_that_does_not_come_again_is_not_kept() -> None:
    class Once(Job):
        def measure(self, settings: Mapping[str, Value]) -> Measurement:
            again = settings in self.runs
            found = super().measure(settings)
            return Measurement(BASE_NS, 0.0, 24) if again else found

    outcome = Once({("a", 1): 0.5}).tuned(change("a"))
    assert outcome.kept == ()
    assert why(outcome, "a") == "no gain when measured again"


@pytest.mark.parametrize("budget", [2, 3, 5])
def test_no_more_trials_than_the_budget(budget: int) -> None:
    effects: dict[tuple[str, Value], float] = {(name, 1): 0.8 for name in "abcdef"}
    job = Job(effects)
    outcome = job.tuned(*(change(name) for name in "abcdef"), budget=budget)
    assert sum(bool(run) for run in job.runs) == budget
    assert why(outcome, "f") == "not tried: the budget was used for other trials"


def test_a_change_that_slows_down_is_called_slower() -> None:
    assert why(Job({("a", 1): 1.3}).tuned(change("a")), "a") == "slower"


def test_a_failed_trial_costs_only_itself() -> None:
    def fail(settings: dict[str, Value], _run: int) -> None:
        if "a" in settings:
            raise TrialFailed("static_graph: RuntimeError")

    outcome = Job({("b", 1): 0.7}, before=fail).tuned(change("a"), change("b"))
    assert [each.name for each in outcome.kept] == ["b"]
    assert why(outcome, "a") == "failed: static_graph: RuntimeError"


def test_a_job_that_cannot_be_measured_at_all_is_an_error() -> None:
    def fail(_settings: dict[str, Value], _run: int) -> None:
        raise TrialFailed("no step")

    with pytest.raises(TrialFailed, match="no step"):
        Job(before=fail).tuned(change("a"))


@pytest.mark.parametrize(
    ("error", "stopped"),
    [(KeyboardInterrupt(), "interrupted"), (TrialFailed("gone"), "the unchanged job failed: gone")],
)
def test_what_was_measured_before_an_end_is_reported_and_nothing_kept(error: BaseException, stopped: str) -> None:
    def end(_settings: dict[str, Value], run: int) -> None:
        if run == 6:  # runs 0 and 3 are of the unchanged job, and so is this one
            raise error

    outcome = Job({("a", 1): 0.5}, before=end).tuned(*(change(name) for name in "abcde"))
    assert outcome.stopped == stopped
    assert outcome.interrupted == (stopped == "interrupted")
    assert outcome.kept == ()
    assert len(outcome.trials) == 2
    assert why(outcome, "a") == "not measured twice"
    assert why(outcome, "e") == "not tried: stopped early"


def test_nothing_to_try_is_no_error() -> None:
    outcome = Job().tuned()
    assert (outcome.kept, len(outcome.baselines)) == ((), 1)
