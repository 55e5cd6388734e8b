"""Uneven work: ranks that take turns at being slow because they have more to compute, and those that do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.ranks import imbalanced_work, straggling_rank
from perfscope.analyzers.rules.ranks.remedies import by_straggler
from tests.analyzers.rules.jobs import QUICK, Analyzed, analyze, changed
from tests.generator import SlowCompute

TURNS = tuple(SlowCompute(ranks=(step % 4,), steps=(step,), factor=1.4 + 0.1 * (step % 3)) for step in range(10, 18))


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    """Kernels of one rank after another are slow, on the same shapes."""
    return analyze(replace(QUICK, causes=TURNS), tmp_path_factory.mktemp("turns"))


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    return analyze(replace(QUICK, causes=(SlowCompute(ranks=(2,), factor=1.4),)), tmp_path_factory.mktemp("steady"))


def with_flops(context: RuleContext, *, uneven: bool) -> RuleContext:
    """As if each step's FLOPs followed what it took (``uneven``), or as if there were no shapes."""
    steps = {
        rank: replace(steps, flops=tuple(us * 1e6 for us in steps.compute_us) if uneven else None)
        for rank, steps in context.per_step.items()
    }
    return changed(context, per_step=steps)


def test_the_job_s_ranks_are_found_slow_in_turn(in_turn):
    assert in_turn.context.summary.stragglers[0].pattern == "rotating"
    assert in_turn.context.summary.stragglers[0].cause == "compute"


def test_with_more_flops_where_it_is_slow_the_work_is_uneven(in_turn):
    context = with_flops(in_turn.context, uneven=True)
    finding = imbalanced_work.evaluate(context)
    assert finding is not None
    assert finding.confidence == "high"
    assert finding.predicted_step_us.mid == pytest.approx(
        context.step_time_us - context.summary.stragglers[0].lost_us, rel=1e-6
    )
    values = {row.what: row.value for row in finding.evidence}
    assert values["ranks that had the most in some step"] == 4
    assert "pack samples to one length" in finding.action.how
    assert straggling_rank.evaluate(context) is None


def test_what_to_do_about_ranks_that_are_slow_in_turn_follows_from_their_flops(in_turn):
    """Equal ones: it is not the work. Unknown ones: record shapes, and see."""
    (row, *_) = in_turn.context.summary.stragglers
    equal = {rank: replace(steps, flops=(1e12,) * 8) for rank, steps in in_turn.context.per_step.items()}
    told = by_straggler(changed(in_turn.context, per_step=equal), row, "ranks 0-3")
    assert "not the work that varies" in told
    assert "clocks" in told
    assert "With shapes recorded" not in told
    unknown = by_straggler(with_flops(in_turn.context, uneven=False), row, "ranks 0-3")
    assert "pack samples" in unknown
    assert "With shapes recorded" in unknown
    varying = by_straggler(with_flops(in_turn.context, uneven=True), row, "ranks 0-3")
    assert "pack samples" in varying
    assert "With shapes recorded" not in varying


def test_a_rank_that_never_waits_does_not_take_turns(in_turn):
    """All ranks wait in turn; but where rank 1 never does, the others wait for it."""
    context = with_flops(in_turn.context, uneven=True)
    (row, *_) = context.summary.stragglers
    context = changed(context, stragglers=(replace(row, ranks=(0, 1, 2, 3)),))
    finding = imbalanced_work.evaluate(context)
    assert finding is not None
    assert finding.title.endswith("of the step, in turn for one another")
    rows = tuple(
        replace(each, exposed_comm_wait_us=10.0 if each.rank == 1 else 600.0) for each in context.summary.time_breakdown
    )
    finding = imbalanced_work.evaluate(changed(context, time_breakdown=rows))
    assert finding is not None
    assert finding.title.endswith("of the step, mostly for rank 1")


def test_the_same_rank_has_more_each_time(in_turn):
    """Rank 0 has 1.5 times as much as the three others, whatever all have: 4/3 of the mean of 1.125."""
    (row, *_) = in_turn.context.summary.stragglers
    lengths = (1.0, 1.4, 0.8, 1.2, 1.0, 1.6, 0.9, 1.1)
    per_step = {
        rank: replace(
            steps,
            flops=tuple(1e12 * (1.5 if rank == 0 else 1.0) * length for length in lengths),
            compute_us=tuple(1e3 * (1.5 if rank == 0 else 1.0) * length for length in lengths),
        )
        for rank, steps in in_turn.context.per_step.items()
    }
    case = changed(in_turn.context, per_step=per_step, stragglers=(replace(row, ranks=(0, 1, 2, 3)),))
    finding = imbalanced_work.evaluate(case)
    assert finding is not None
    assert finding.title.endswith("mostly for rank 0, which has 1.33 times the mean in each step")
    assert finding.action.how.startswith("The same rank has more each time: look at how samples are divided")


def test_without_shapes_forward_and_backward_times_decide(in_turn):
    finding = imbalanced_work.evaluate(with_flops(in_turn.context, uneven=False))
    assert finding is not None
    assert finding.confidence == "medium"
    assert any("the rest of compute" in row.what for row in finding.evidence)


def test_few_ranks_that_are_slow_in_turn_are_named_unless_they_have_more_work(tmp_path: Path):
    """Two of eight ranks, and the others never: work that varies would come to those, too."""
    two = tuple(SlowCompute(ranks=(2 + 3 * (step % 2),), steps=(step,), factor=1.4) for step in range(10, 18))
    case = with_flops(analyze(replace(QUICK, ranks=8, causes=two), tmp_path).context, uneven=False)
    assert imbalanced_work.evaluate(case) is None
    finding = straggling_rank.evaluate(case)
    assert finding is not None
    assert finding.title.startswith("Ranks 2, 5 are stragglers in turn (slower compute): waiting for them costs")
    assert finding.action.how.startswith("Compare ranks 2, 5 with the others, of which none is ever slow")
    more = imbalanced_work.evaluate(with_flops(case, uneven=True))
    assert more is not None
    assert more.confidence == "high"


def waiting_for_cores(context: RuleContext, *, uneven: bool) -> RuleContext:
    """On CPUs: rank 1 computes for 40 ms on its core in each step and the others for 10, by four times the FLOPs or by
    as many; beside that now one waits for a core, now another.
    """
    ran, count = {rank: 40_000.0 if rank == 1 else 10_000.0 for rank in context.per_step}, len(context.info.steps)
    waited = {rank: tuple(90_000.0 * ((rank + step) % 4 == 0) for step in range(count)) for rank in ran}
    steps = {
        rank: replace(
            each,
            compute_us=tuple(ran[rank] + us for us in waited[rank]),
            flops=(1e9 * (ran[rank] if uneven else 10_000.0),) * count,
        )
        for rank, each in context.per_step.items()
    }
    return changed(context, per_step=steps, core_us=waited)


def test_compute_that_waits_for_cores_follows_flops_without_those_waits(in_turn):
    uneven = waiting_for_cores(in_turn.context, uneven=True)
    finding = imbalanced_work.evaluate(uneven)
    assert finding is not None
    values = {row.what: row.value for row in finding.evidence}
    assert values["correlation of model FLOPs with compute"] == pytest.approx(1.0)
    assert imbalanced_work.evaluate(changed(uneven, core_us={})) is None
    assert imbalanced_work.evaluate(waiting_for_cores(in_turn.context, uneven=False)) is None


def test_equal_flops_are_equal_work_whatever_they_take(in_turn):
    assert imbalanced_work.evaluate(in_turn.context) is None
    assert straggling_rank.evaluate(in_turn.context) is not None


def test_one_rank_that_is_always_slow_is_not_this(steady):
    assert imbalanced_work.evaluate(with_flops(steady.context, uneven=True)) is None


def test_a_straggler_with_more_work_is_reported_as_such(steady):
    finding = straggling_rank.evaluate(with_flops(steady.context, uneven=True))
    assert finding is not None
    assert "1.40 times the work of its peers" in finding.title
    assert "its device is not the cause" in finding.action.how
    same = straggling_rank.evaluate(steady.context)
    assert same is not None
    assert "clocks, power" in same.action.how


def test_megatron_s_arguments_name_experts_only_where_there_are_some(in_turn):
    context = with_flops(in_turn.context, uneven=True)
    dense = changed(context, runs=in_turn.with_settings(megatron={"expert_model_parallel_size": 1}).runs)
    assert "--moe" not in imbalanced_work.evaluate(dense).action.how
    experts = changed(context, runs=in_turn.with_settings(megatron={"expert_model_parallel_size": 8}).runs)
    assert "--moe-aux-loss-coeff" in imbalanced_work.evaluate(experts).action.how


def test_work_that_differs_from_one_collective_to_the_next_is_of_experts_where_tokens_are_exchanged(in_turn):
    """Whole steps need not correlate with anything. All-to-alls of embedding tables are no experts'."""
    (row, *_) = in_turn.context.summary.stragglers
    context = changed(in_turn.context, stragglers=(replace(row, within_steps=True),))
    finding = imbalanced_work.evaluate(context)
    assert finding is not None
    assert "at each collective for another one" in finding.title
    assert "branches that only some ranks take" in finding.action.how
    assert finding.action.costs is None
    assert straggling_rank.evaluate(context) is None
    collectives = context.summary.collectives
    swapped = tuple(replace(each, kind="all_to_all", count=4 * len(context.info.steps)) for each in collectives)
    experts = changed(context, collectives=swapped)
    assert "capacity factor" in imbalanced_work.evaluate(experts).action.how
    groups = tuple(
        replace(group, role="unknown", role_from="all-to-alls of indices and values, as of embedding tables")
        for group in context.summary.groups
    )
    assert "capacity factor" not in imbalanced_work.evaluate(changed(experts, groups=groups)).action.how
    few = tuple(replace(each, count=1) for each in swapped[:1])
    assert "capacity factor" not in imbalanced_work.evaluate(changed(context, collectives=few)).action.how


@pytest.mark.parametrize(("times", "named"), [(1.4, True), (1.05, False)])
def test_ranks_that_always_have_more_are_named(in_turn, times, named):
    """Ranks 0 and 1 of five compute longer than the others in every step, as those with the experts that are liked."""
    (row, *_) = in_turn.context.summary.stragglers
    (one, *_) = in_turn.context.per_step.values()
    steps = len(one.compute_us)
    per_step = {
        rank: replace(one, compute_us=(1_000.0 * (times if rank < 2 else 1.0),) * steps, flops=None, forward_us=None)
        for rank in range(5)
    }
    context = changed(in_turn.context, stragglers=(replace(row, within_steps=True),), per_step=per_step)
    title = imbalanced_work.evaluate(context).title
    assert ("mostly for ranks 0, 1, which compute longer each time" in title) is named
    assert ("at each collective for another one" in title) is not named


def test_tokens_that_are_exchanged_come_before_lengths_where_work_differs_within_steps(in_turn):
    """Whole steps follow the FLOPs, which tells work, and not whether it is of sequences or of experts."""
    context = with_flops(in_turn.context, uneven=True)
    count = 4 * len(context.info.steps)
    swapped = tuple(replace(each, kind="all_to_all", count=count) for each in context.summary.collectives)
    within = tuple(replace(row, within_steps=True) for row in context.summary.stragglers)
    whole_steps = imbalanced_work.evaluate(changed(context, collectives=swapped))
    experts = imbalanced_work.evaluate(changed(context, collectives=swapped, stragglers=within))
    assert whole_steps.action.how.startswith("Sequences of different length")
    assert experts.action.how.startswith("Experts that get more tokens")


def test_ranks_that_take_more_batches_than_others_in_a_step_are_told_so(in_turn):
    """Compute follows how many of them each takes, not how long their sequences are."""
    number = [(3, 5), (5, 3), (4, 4), (4, 4)] * 2
    each = {
        rank: replace(
            steps, flops=None, batches=tuple(one[rank % 2] for one in number),
            compute_us=tuple(20_000.0 * one[rank % 2] for one in number),
            forward_us=tuple(6_000.0 * one[rank % 2] for one in number),
        )
        for rank, steps in in_turn.context.per_step.items()
    }  # fmt: skip
    finding = imbalanced_work.evaluate(changed(in_turn.context, per_step=each))
    assert finding is not None
    assert finding.action.how.startswith("Take as many batches on all ranks in a step")
    assert "they take 3 to 5 now" in finding.action.how
    as_many = {rank: replace(steps, batches=(4,) * 8) for rank, steps in each.items()}
    other = imbalanced_work.evaluate(changed(in_turn.context, per_step=as_many))
    assert other is not None
    assert "pack samples to one length" in other.action.how
