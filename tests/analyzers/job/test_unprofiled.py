"""What a step takes without the profiler: without evaluations where the recorded steps are without them."""

from __future__ import annotations

import pytest

from perfscope.analyzers.job.aligned import AlignedJob, align_job
from perfscope.analyzers.job.unprofiled import long_step_share, unprofiled_median_ns, unprofiled_step_ns
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.recording.metadata import RunMetadata, StepsMetadata
from tests.analyzers.job.test_aligned_evaluation import job
from tests.traces import TraceBuilder


def unprofiled(*steps_ns: int) -> dict[int, RunMetadata]:
    return {0: RunMetadata(steps=StepsMetadata(unprofiled_ns=steps_ns))}


def test_steps_with_an_evaluation_are_left_out_as_of_the_recorded_ones() -> None:
    """Recorded: 1,100 with an evaluation, 100 without."""
    runs = unprofiled(*[80, 80, 80, 90, 900] * 8)
    assert unprofiled_step_ns(runs, job({0: {2, 4}}, steps=8)) == pytest.approx(82.5)


def test_steps_with_an_evaluation_may_be_more_than_the_others() -> None:
    """Every second one. Recorded: 1,100 with an evaluation, 100 without. The median of all is one with."""
    runs = unprofiled(*[900, 80] * 8, 900)
    recorded = job({0: {1, 3, 5, 7}}, steps=8)
    assert unprofiled_step_ns(runs, recorded) == pytest.approx(80)
    assert unprofiled_median_ns(runs, recorded) == 80


def test_steps_that_evaluate_count_where_the_recorded_ones_do() -> None:
    runs = unprofiled(*[80, 80, 80, 90, 900] * 8)
    assert unprofiled_step_ns(runs, job({0: set(range(8))}, steps=8)) == pytest.approx(sum([80, 80, 80, 90, 900]) / 5)
    assert unprofiled_step_ns(runs, job({0: set()}, steps=8)) == pytest.approx(sum([80, 80, 80, 90, 900]) / 5)


def test_steps_that_wait_for_batches_are_no_evaluations() -> None:
    """A quarter of the steps takes 4 times as long: nearer to a usual step than to one with an evaluation."""
    runs = unprofiled(*[80, 80, 80, 320] * 8)
    assert unprofiled_step_ns(runs, job({0: {2}}, steps=8)) == pytest.approx(140)


def test_no_more_than_twice_the_recorded_share_is_left_out() -> None:
    """Half of the steps are as long as an evaluation, of which there was one among 8 steps."""
    runs = unprofiled(*[100] * 21, *[1100] * 19)
    assert unprofiled_step_ns(runs, job({0: {2}}, steps=8)) == pytest.approx((21 * 100 + 9 * 1100) / 30)


def test_steps_that_are_as_long_without_an_evaluation_count() -> None:
    """One recorded step evaluates and one saves a checkpoint: so it is half of the long unprofiled ones each."""
    runs = unprofiled(*[80, 80, 80, 90, 900] * 8)
    recorded = job({0: {2}}, steps=8, pauses=frozenset({5}))
    assert unprofiled_step_ns(runs, recorded) == pytest.approx((8 * (80 + 80 + 80 + 90) + 4 * 900) / 36)


def test_long_steps_that_come_again_are_part_of_the_mean() -> None:
    """One step of a hundred is left out; three of them are as much the job's as the others."""
    recorded = job({0: set()}, steps=8)
    assert unprofiled_step_ns(unprofiled(*[100] * 99, 5100), recorded) == pytest.approx(100)
    assert unprofiled_step_ns(unprofiled(*[100] * 97, *[5100] * 3), recorded) == pytest.approx(250)


def test_how_often_steps_are_long_is_told_by_the_unprofiled_ones() -> None:
    """1 of 8 recorded steps pauses for 1000, and 2 of 40 others."""
    found = long_step_share(unprofiled(*[80] * 38, 1080, 1080), job({0: set()}, steps=8, pauses=frozenset({5})))
    assert found is not None
    assert found.recorded.tolist() == [step == 5 for step in range(8)]
    assert (found.share, found.longer_ns, found.step_ns) == (0.05, 1000, 80 + 1000 / 8)
    unseen = long_step_share(unprofiled(*[80] * 38, 1080, 1080), job({0: set()}, steps=8))
    assert unseen is not None
    assert (unseen.recorded.any(), unseen.share, unseen.step_ns) == (False, 0.05, 80)
    once = long_step_share(unprofiled(*[80] * 40), job({0: set()}, steps=8, pauses=frozenset({5})))
    assert once is not None
    assert (once.share, once.longer_ns) == (0, 1000)


@pytest.mark.parametrize(
    ("steps", "pauses"),
    [
        ([80] * 40, frozenset[int]()),  # none is long
        ([80] * 12, frozenset({5})),  # too few to tell
        ([80, 1080] * 20, frozenset({5})),  # half of them are no exception
    ],
)
def test_where_nothing_is_an_exception(steps: list[int], pauses: frozenset[int]) -> None:
    assert long_step_share(unprofiled(*steps), job({0: set()}, steps=8, pauses=pauses)) is None


def test_few_steps_tell_nothing() -> None:
    """A job's first steps also warm up, or have batches ready: four that are hardly shorter than the recorded ones, of
    100, may be such.
    """
    assert unprofiled_step_ns(unprofiled(80, 80), job({0: set()})) is None
    assert unprofiled_step_ns(unprofiled(95, 95, 95, 95), job({0: set()})) is None
    assert unprofiled_step_ns(unprofiled(80, 80, 100, 80), job({0: set()})) is None


def test_three_steps_tell_where_each_is_far_shorter_than_the_recorded_ones() -> None:
    assert unprofiled_step_ns(unprofiled(80, 88, 84), job({0: set()})) == pytest.approx(84)


def on_device(work: int, steps: int = 6) -> AlignedJob:
    """Steps of 100 with a kernel of ``work``, which is launched at their begin."""
    builder = TraceBuilder()
    for number in range(steps):
        now = 100 * number
        builder.op("aten::mm", now + 1, now + 4).launched("gemm", now + 2, now + 5, now + 5 + work)
        builder.step(number, now, now + 100)
    return align_job({0: analyze_rank(builder.build())})


def test_a_host_that_runs_ahead_of_its_device_tells_no_step_time() -> None:
    """The device works for 90 of each step, and the host hands over one in 40, until the queue is full."""
    ahead = unprofiled(*[40] * 12)
    assert unprofiled_step_ns(ahead, on_device(90)) is None
    assert unprofiled_median_ns(ahead, on_device(90)) is None
    assert unprofiled_step_ns(ahead, on_device(30)) == pytest.approx(40)
    assert unprofiled_median_ns(ahead, on_device(30)) == 40


def test_the_first_steps_in_which_the_host_runs_ahead_do_not_count() -> None:
    assert unprofiled_step_ns(unprofiled(30, 95, 95, 95, 95, 95), on_device(90)) == pytest.approx(95)
    assert unprofiled_step_ns(unprofiled(30, 40, 95, 95, 95, 95, 95), on_device(90)) == pytest.approx(95)
    # On CPUs a step's end is its end.
    assert unprofiled_step_ns(unprofiled(35, 95, 95, 95, 95, 95), job({0: set()})) == pytest.approx(85)


def test_steps_that_are_short_again_and_again_count() -> None:
    """Two loader workers deliver in turn."""
    assert unprofiled_step_ns(unprofiled(*[60, 120] * 6), on_device(50)) == pytest.approx(90)
