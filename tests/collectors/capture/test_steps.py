"""Where a step ends: optimizers in turn, replaced or nested, engines, and explicit steps."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfscope.collectors.capture.steps import RARE, StepDetector, StepVerdict


def boundaries(events: Iterable[str]) -> tuple[StepDetector, list[int]]:
    """The detector after a sequence of optimizers, and the positions (from 0) after which a step ended."""
    detector = StepDetector()
    ends = [i for i, key in enumerate(events) if detector.optimizer_step(key) is StepVerdict.STEP]
    return detector, ends


def test_one_optimizer_ends_a_step_each_time() -> None:
    detector, ends = boundaries("AAAA")
    assert ends == [0, 1, 2, 3]
    assert (detector.completed, detector.source) == (4, "optimizer")


def test_two_optimizers_in_turn_end_a_step_after_the_second() -> None:
    detector, ends = boundaries("DGDGDGDGDG")
    assert [end for end in ends if end > 4] == [5, 7, 9]
    assert detector.completed == 5


def test_critic_steps_belong_to_the_generators_step() -> None:
    detector, ends = boundaries("DDDDDG" * 6)
    assert [end for end in ends if end > 11] == [17, 23, 29, 35]
    assert detector.completed == 6


def test_the_rarer_optimizer_may_come_first() -> None:
    detector, ends = boundaries("GDDD" * 8)
    assert [end for end in ends if end > 12] == [16, 20, 24, 28]
    assert detector.completed == 8


def test_an_optimizer_per_parameter_ends_a_step_with_the_last() -> None:
    keys = [f"p{i}" for i in range(40)]
    detector, ends = boundaries(keys * 5)
    assert [end for end in ends if end > 80] == [119, 159, 199]
    assert detector.completed == 5


def test_a_new_optimizer_restarts_once_and_nothing_ends_until_it_is_settled() -> None:
    detector = StepDetector()
    verdicts = [detector.optimizer_step(key) for key in "AABABA"]
    step, nothing = StepVerdict.STEP, StepVerdict.NOTHING
    assert verdicts == [step, step, StepVerdict.RESTART, nothing, step, nothing]


def test_optimizers_that_replace_one_another_go_on_with_the_steps() -> None:
    """Folds or a search: none of them comes back, and no step is lost or taken back."""
    for runs in ((12, 12, 12, 12, 12), (20, 20), (12, 100), (40, 40, 40)):
        events = [index for index, steps in enumerate(runs) for _ in range(steps)]
        detector, ends = boundaries(events)
        assert ends == list(range(sum(runs)))
        assert detector.completed == sum(runs)


def test_short_runs_are_distinguished_from_a_cycle_when_a_third_optimizer_comes() -> None:
    events = [fold for fold in range(6) for _ in range(6)]
    detector, ends = boundaries(events)
    # The second could be a generator after six of its critic's steps.
    assert ends == [*range(6), *range(12, 36)]
    assert detector.completed == 36


def test_an_optimizer_that_was_replaced_does_not_stop_the_count() -> None:
    detector, ends = boundaries("A" * 50 + "B" * 50)
    assert ends[-20:] == list(range(80, 100))
    assert detector.completed == 100


def test_an_optimizer_replaced_every_epoch_never_stops_the_count_for_good() -> None:
    epochs = [f"epoch{i}" for i in range(8) for _ in range(40)]
    detector, ends = boundaries(epochs)
    assert ends[-30:] == list(range(290, 320))
    assert detector.completed > 250


def test_an_optimizer_that_steps_once_in_a_while_does_not_define_a_step() -> None:
    detector, ends = boundaries(("A" * 100 + "X") * 3)
    assert 301 in ends
    assert detector.completed == pytest.approx(300, abs=5)


def test_an_optimizer_made_every_step_is_ignored_after_a_while() -> None:
    _, ends = boundaries(key for i in range(200) for key in (f"inner{i}", "outer"))
    assert [end for end in ends if end > 300] == list(range(301, 400, 2))


def test_explicit_steps_take_over_for_good() -> None:
    detector = StepDetector()
    assert detector.optimizer_step("A") is StepVerdict.STEP
    assert detector.explicit_step() is StepVerdict.RESTART
    assert detector.optimizer_step("A") is StepVerdict.NOTHING
    assert detector.engine_step() is StepVerdict.NOTHING
    assert detector.explicit_step() is StepVerdict.STEP
    assert (detector.completed, detector.source) == (2, "explicit")


def test_engine_steps_beat_optimizer_steps() -> None:
    detector = StepDetector()
    assert [detector.engine_step() for _ in range(3)] == [StepVerdict.STEP] * 3
    assert detector.optimizer_step("A") is StepVerdict.NOTHING
    assert (detector.completed, detector.source) == (3, "deepspeed")


def test_without_an_optimizer_each_backward_pass_is_a_step_until_one_steps() -> None:
    detector = StepDetector()
    assert [detector.backward(accumulates=True) for _ in range(3)] == [StepVerdict.STEP] * 3
    assert (detector.completed, detector.source) == (3, "backward")
    assert detector.optimizer_step("A") is StepVerdict.RESTART
    assert detector.backward(accumulates=True) is StepVerdict.NOTHING
    assert [detector.optimizer_step("A") for _ in range(3)] == [StepVerdict.STEP] * 3
    assert (detector.completed, detector.source) == (4, "optimizer")


def test_gradients_that_are_returned_are_part_of_a_step_with_a_backward() -> None:
    detector = StepDetector()
    assert [detector.backward(accumulates=False) for _ in range(3)] == [StepVerdict.STEP] * 3
    assert detector.backward(accumulates=True) is StepVerdict.RESTART
    assert detector.backward(accumulates=False) is StepVerdict.NOTHING
    assert detector.backward(accumulates=True) is StepVerdict.STEP
    assert (detector.completed, detector.source) == (2, "backward")
    assert detector.explicit_step() is StepVerdict.RESTART


@given(runs=st.lists(st.integers(1, 9), min_size=1, max_size=6), repeats=st.integers(12, 20))
def test_optimizers_in_turn_end_as_many_steps_as_the_rarest_steps(runs: list[int], repeats: int) -> None:
    """A cycle of several optimizers, each stepping some times in a row, however often it is gone through."""
    cycle = [f"optimizer{i}" for i, run in enumerate(runs) for _ in range(run)]
    detector, ends = boundaries(cycle * repeats)
    assert sum(end >= 3 * len(cycle) for end in ends) == min(runs) * (repeats - 3)
    assert detector.completed == min(runs) * repeats


@given(st.lists(st.integers(0, 5), max_size=400))
def test_whatever_steps_it_never_falls_silent(keys: list[int]) -> None:
    """Among many events of a single optimizer at the end, steps end again."""
    _, ends = boundaries([str(key) for key in keys] + ["last"] * (RARE * 8 + 400))
    assert ends
    assert ends[-1] == len(keys) + RARE * 8 + 400 - 1


@given(st.lists(st.tuples(st.sampled_from("ABC"), st.integers(1, 30)), max_size=12))
def test_steps_of_an_optimizer_that_is_left_alone_count_as_any(runs: list[tuple[str, int]]) -> None:
    """They are counted together, when another one steps; here beside a detector that counts each as it comes."""
    together, each = StepDetector(), StepDetector()
    for key in (key for key, run in runs for _ in range(run)):
        each._lone = None
        assert together.optimizer_step(key) is each.optimizer_step(key)
        assert together.completed == each.completed
