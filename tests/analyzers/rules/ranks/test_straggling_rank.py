"""Which straggler is named, and with what remedy; those that have a rule of their own are left to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perfscope.analyzers.job.rank_steps import RankSteps
from perfscope.analyzers.job.slow_operators import SlowOperator
from perfscope.analyzers.rank.host_activity import BETWEEN, SAVING
from perfscope.analyzers.rank.loop_phases import IN_FORWARD
from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.host import cpu_contention, garbage_collection
from perfscope.analyzers.rules.ranks import remedies, straggling_rank
from perfscope.recording.metadata import CaptureMetadata, CpuMetadata, DeviceMetadata, RunMetadata, StepsMetadata
from perfscope.results.findings import Confidence, Finding, Prediction
from perfscope.results.rows import DataLoaderRow, StragglerRow
from tests.analyzers.measured import advised
from tests.analyzers.rules.jobs import breakdown, changed, context, runs
from tests.emulator import Cause, Job, Model, Recording, emulate, step_ns

PAUSES = StragglerRow(rank=0, cause="host", lost_us=20_000.0, confidence="high", ranks=(0,))
SLOW = StragglerRow(rank=1, cause="compute", lost_us=15_000.0, confidence="high", ranks=(1,))


def steps(collecting_us: float) -> RankSteps:
    return RankSteps(
        loading_us=(0.0,) * 8, sampling_us=(0.0,) * 8, compute_us=(50_000.0,) * 8, batches=(1,) * 8,
        starting_us=(0.0,) * 8, compiling_us=(0.0,) * 8, collecting_us=(collecting_us,) * 8,
        pausing_us=(collecting_us,) * 8, saving_us=(0.0,) * 8, copied_beside_us=(0.0,) * 8, flops=None, forward_us=None,
    )  # fmt: skip


def job(collecting_us: float):
    return context(
        breakdown(0), breakdown(1), stragglers=(PAUSES, SLOW), per_step={0: steps(collecting_us), 1: steps(0.0)}
    )  # fmt: skip


def test_the_next_one_is_named_where_the_worst_collects_garbage():
    finding = straggling_rank.evaluate(job(20_000.0))
    assert finding is not None
    assert finding.title.startswith("Rank 1 is a straggler (slower compute): waiting for it costs 15% of each step")
    assert garbage_collection.evaluate(job(20_000.0)) is not None


def test_collections_that_explain_less_than_half_of_it_are_not_its_cause():
    finding = straggling_rank.evaluate(job(9_000.0))
    assert finding is not None
    assert finding.title.startswith(
        "Rank 0 is a straggler (Python work outside operators): waiting for it costs 20% of each step"
    )


def test_a_job_of_one_straggler_that_collects_has_one_finding():
    assert straggling_rank.evaluate(changed(job(20_000.0), stragglers=(PAUSES,))) is None


def test_a_straggler_of_some_steps_is_not_said_to_cost_a_part_of_each():
    """The cost is a mean of all used steps, which says nothing of one of them where most have none of it."""
    case = changed(job(20_000.0), stragglers=(replace(SLOW, pattern="intermittent", steps=(11, 14)),))
    used = len(case.summary.job.steps)
    finding = straggling_rank.evaluate(case)
    assert finding is not None
    assert finding.title == (
        f"Rank 1 is a straggler (slower compute): waiting for it in 2 of {used} steps costs 15% of the time"
    )
    in_turn = replace(SLOW, scope="job", pattern="rotating", ranks=(0, 1), steps=(11, 12, 14))
    finding = straggling_rank.evaluate(changed(case, stragglers=(in_turn,)))
    assert finding is not None
    assert finding.title.startswith("Ranks 0, 1 are stragglers in turn")
    assert finding.title.endswith(f"waiting for them in 3 of {used} steps costs 15% of the time")
    ranks = tuple(breakdown(rank, exposed_comm_wait=waits) for rank, waits in enumerate((30_000, 0, 0, 0)))
    finding = straggling_rank.evaluate(changed(case, stragglers=(in_turn,), time_breakdown=ranks))
    assert finding is not None
    assert finding.title.startswith("Ranks 0, 1 are stragglers now and then, mostly rank 1 (slower compute)")


def late(lost_us: float, next_us: float = 0.0, share: float = 0.6) -> RuleContext:
    rows = [
        StragglerRow(rank=3, cause="compute", lost_us=lost_us, confidence="high", host="node7", share_of_steps=share)
    ]
    if next_us:
        rows.append(StragglerRow(rank=1, cause="host", lost_us=next_us, confidence="medium"))
    return context(breakdown(1, exposed_comm_wait=lost_us), breakdown(3), stragglers=tuple(rows))


def test_names_rank_host_and_cause():
    finding = straggling_rank.evaluate(late(25_000))
    assert finding is not None
    assert "Rank 3" in finding.title
    assert "slower compute" in finding.title
    assert "node7" in finding.action.setting
    assert finding.action.how.startswith("Compare rank 3 on node7 with the other ranks: clocks")
    assert finding.ceiling == pytest.approx(100 / 75 - 1)


def test_silent_below_five_percent_and_where_ranks_take_turns():
    assert straggling_rank.evaluate(late(4_900)) is None
    assert straggling_rank.evaluate(late(10_000, next_us=4_000)) is None
    assert straggling_rank.evaluate(late(10_000, next_us=3_000)) is not None
    assert straggling_rank.evaluate(late(10_000, next_us=4_000, share=0.875)) is not None
    assert straggling_rank.evaluate(late(16_000, next_us=14_000)) is not None


def test_a_rank_that_costs_more_than_noise_in_all_steps_takes_no_turns():
    """Pauses of others cost the most in some steps."""
    asked = late(10_000, next_us=4_000)
    slow, other = asked.summary.stragglers
    used = asked.summary.job.steps
    always = changed(asked, stragglers=(replace(slow, steps=used), other))
    assert straggling_rank.evaluate(always) is not None
    often = changed(asked, stragglers=(replace(slow, steps=used[: len(used) // 2]), other))
    assert straggling_rank.evaluate(often) is None


def test_uneven_work_of_all_is_no_other_straggler() -> None:
    """What all ranks cost in turn was told apart from what this one does."""
    asked = late(10_000, next_us=4_000)
    slow, other = asked.summary.stragglers
    in_turn = replace(other, scope="job", pattern="rotating", ranks=(0, 1, 2, 3))
    finding = straggling_rank.evaluate(changed(asked, stragglers=(slow, in_turn)))
    assert finding is not None
    assert finding.title.startswith(f"Rank {slow.rank} is a straggler")


@pytest.mark.parametrize(("waits", "doubtful"), [((4, 9), True), ((4, 6, 9), False)])
def test_a_rank_that_waited_in_few_of_many_steps_may_be_as_quick_as_the_others(
    waits: tuple[int, ...], doubtful: bool
) -> None:
    """In 2 of 12 steps it may be by chance that this rank's batch came last; in 3 it is not."""
    late = StragglerRow(
        rank=0, cause="dataloader", lost_us=30_000.0, confidence="medium", ranks=(0,), steps=waits, share_of_steps=0.2
    )
    waited_us = (30_000.0, 100.0, 100.0)
    rows = [breakdown(rank, idle_dataloader=us if rank == 0 else 0.0) for rank, us in enumerate(waited_us)]
    loading = tuple(
        DataLoaderRow(rank=rank, wait_us=us, blocking_us=us, batch_us=None, num_workers=4)
        for rank, us in enumerate(waited_us)
    )
    asked = context(*rows, stragglers=(late,), dataloader=loading)
    info = replace(asked.summary.job, steps=tuple(range(12)))
    finding = straggling_rank.evaluate(replace(asked, summary=replace(asked.summary, job=info)))
    assert finding is not None
    assert (finding.confidence is Confidence.LOW) == doubtful


def test_a_cost_that_was_not_replayed_is_the_most_that_it_may_be():
    asked = late(25_000)
    (slow,) = asked.summary.stragglers
    finding = straggling_rank.evaluate(changed(asked, stragglers=(replace(slow, replayed=False),)))
    assert finding is not None
    assert "costs up to 25%" in finding.title
    assert "The recording does not show which ranks the messages" in finding.action.how
    assert finding.confidence == "low"
    assert finding.predicted_step_us is not None
    assert finding.predicted_step_us.high == pytest.approx(asked.step_time_us)


def test_a_slow_cpu_is_not_looked_for_with_nvidia_smi():
    case = changed(late(25_000), runs={3: RunMetadata(rank=3)})
    finding = straggling_rank.evaluate(case)
    assert finding is not None
    assert "nvidia" not in finding.action.how
    assert "OMP_NUM_THREADS" in finding.action.how


@pytest.mark.parametrize(
    ("scope", "looks_at"), [("rank", "number of threads (OMP_NUM_THREADS)"), ("host", "Compare the CPUs of host node1")]
)
def test_what_other_recorders_write_of_a_job_on_cpus_is_told_of_its_cores(scope: str, looks_at: str) -> None:
    """Nor do they tell for how long threads waited for cores: a rank may have been late for that."""
    asked = changed(late(25_000), devices=("CPU",), runs={})
    (row,) = asked.summary.stragglers
    finding = straggling_rank.evaluate(changed(asked, stragglers=(replace(row, scope=scope, host="node1"),)))
    assert finding is not None
    assert "nvidia" not in finding.action.how
    assert looks_at in finding.action.how
    assert row.confidence == "high"
    assert finding.confidence is Confidence.MEDIUM


@pytest.mark.parametrize(("waited_ns", "looks_at"), [(30, "CPU frequencies that change, and for caches"), (200, "top")])
def test_ranks_that_hardly_wait_for_cores_have_these_to_themselves(waited_ns: int, looks_at: str) -> None:
    turns = replace(SLOW, scope="job", ranks=(0, 1))
    equal = {rank: replace(steps(0.0), flops=(1e9,) * 8) for rank in (0, 1)}
    cpu = CpuMetadata(steps=8, wall_ns=1000, process_ns=700, thread_ns=700, waited_ns=waited_ns)
    case = context(
        breakdown(0), breakdown(1), stragglers=(turns,), per_step=equal, devices=("CPU",),
        runs={rank: RunMetadata(rank=rank, cpu=cpu) for rank in (0, 1)},
    )  # fmt: skip
    finding = straggling_rank.evaluate(case)
    assert finding is not None
    assert looks_at in finding.action.how
    assert ("top" in finding.action.how) is (looks_at == "top")


def with_work(flops: float, predicted_us: float | None = None) -> Finding:
    """Rank 1 of two computes 30 ms of a step of 100 longer, with so many FLOPs where rank 0 has 100."""
    each = {rank: replace(steps(0.0), flops=(count,) * 8) for rank, count in ((0, 100.0), (1, flops))}
    row = StragglerRow(rank=1, cause="compute", lost_us=30_000, confidence="high", ranks=(1,))
    asked = context(breakdown(0), breakdown(1), stragglers=(row,), per_step=each)
    if predicted_us is not None:
        answers = {"ranks.work": Prediction(low=predicted_us, mid=predicted_us, high=predicted_us)}
        asked = changed(asked, predict=lambda settings: answers.get(*settings))
    finding = straggling_rank.evaluate(asked)
    assert finding is not None
    return finding


def test_a_rank_with_more_work_can_only_share_it():
    slow, busy, replayed = with_work(104.0), with_work(160.0), with_work(160.0, predicted_us=87_000)
    assert slow.title == "Rank 1 is a straggler (slower compute): waiting for it costs 30% of each step"
    assert slow.predicted_step_us is not None
    assert slow.predicted_step_us.mid == 70_000
    assert busy.title == "Rank 1 has 1.60 times the work of its peers: waiting for it costs 30% of each step"
    assert "Spread samples evenly" in busy.action.how
    assert busy.predicted_step_us is not None
    assert busy.predicted_step_us.mid == 85_000, "half of it goes to rank 0"
    assert replayed.predicted_step_us is not None
    assert (replayed.predicted_step_us.mid, replayed.whatif) == (87_000, {"ranks.work": "even"})


def test_every_cause_of_the_contract_has_a_remedy():
    for cause in ("compute", "dataloader", "launch", "host", "sync", "copy", "communication"):
        row = StragglerRow(rank=0, cause=cause, lost_us=30_000, confidence="high")
        finding = straggling_rank.evaluate(context(breakdown(0), breakdown(1), stragglers=(row,)))
        assert finding is not None
        assert finding.action.how


def test_host_work_with_a_name_is_evidence():
    named = {0: {"train.py(70): log": 19_000.0, "gc": 500.0}, 1: {"train.py(70): log": 1_000.0}}
    rows = [replace(breakdown(rank), named_host_us=names) for rank, names in named.items()]
    finding = straggling_rank.evaluate(context(*rows, stragglers=(PAUSES,)))
    assert finding is not None
    found = {evidence.what: evidence.value for evidence in finding.evidence}
    assert found["its host time in train.py(70): log over the others'"] == 18_000.0
    assert "that only rank 0 does outside operators, mostly in log (train.py:70), for" in finding.action.how


def test_a_pause_in_the_loop_is_looked_for_there():
    rows = [replace(breakdown(rank), named_host_us={BETWEEN: us}) for rank, us in enumerate((15_000.0, 1_000.0))]
    finding = straggling_rank.evaluate(context(*rows, stragglers=(PAUSES,)))
    assert finding is not None
    assert "that only rank 0 does in the loop between optimizer and forward (" in finding.action.how


@pytest.mark.parametrize(
    ("name", "titled", "told"),
    [
        (IN_FORWARD, "the forward", "does in the forward, outside its operators (hooks"),
        ("the loop between forward and backward", None, "does in the loop between forward and backward (logging"),
        (SAVING, "checkpoint saving", "Save checkpoints in fewer steps"),
    ],
)
def test_a_pause_is_looked_for_in_its_phase(name: str, titled: str | None, told: str) -> None:
    rows = [replace(breakdown(rank), named_host_us={name: us}) for rank, us in enumerate((15_000.0, 1_000.0))]
    finding = straggling_rank.evaluate(context(*rows, stragglers=(PAUSES,)))
    assert finding is not None
    assert finding.title.startswith(
        f"Rank 0 is a straggler (Python work outside operators, mostly in {titled or name}): waiting for it costs"
    )
    assert told in finding.action.how


def test_a_rank_that_computes_longer_in_one_operator_is_told_which() -> None:
    case = changed(job(0.0), stragglers=(SLOW,))
    operator = SlowOperator("SlowBackward", 40_200.0, 23.0)
    finding = straggling_rank.evaluate(replace(case, slow_operators={1: operator}))
    assert finding is not None
    assert finding.title.startswith("Rank 1 is a straggler (slower compute, mostly in SlowBackward): waiting for it")
    assert finding.action.how.startswith(
        "Look at SlowBackward: it takes 40.2 ms per step on rank 1 and 23 µs on its peers, which call it as often."
    )
    others = straggling_rank.evaluate(replace(case, slow_operators={0: operator}))
    assert others is not None
    assert "SlowBackward" not in f"{others.title} {others.action.how}"


@pytest.mark.parametrize(
    ("kind", "first"),
    [("attention", "Compare the lengths of sequences"), ("matrix", "Compare shapes"), ("other", "Compare shapes")],
)
def test_clocks_are_not_blamed_where_other_kernels_are_as_quick(kind: str, first: str) -> None:
    operator = SlowOperator("aten::some", 7_700.0, 3_850.0, kind=kind)
    finding = straggling_rank.evaluate(replace(changed(job(0.0), stragglers=(SLOW,)), slow_operators={1: operator}))
    assert finding is not None
    assert finding.title.startswith(
        "Rank 1 is a straggler (slower compute, mostly in aten::some, while other kernels are as quick): waiting for it"
    )
    assert finding.action.how.startswith(first)
    assert "aten::some: 7.70 ms per step on rank 1, 3.85 ms on its peers, as many calls" in finding.action.how
    assert "clocks, power and temperature are not the cause" in finding.action.how
    assert "nvidia-smi" not in finding.action.how


def test_a_rank_whose_matrix_products_take_longer_among_experts_may_have_more_tokens() -> None:
    case = changed(job(0.0), stragglers=(SLOW,))
    run = RunMetadata(rank=0, settings={"megatron": {"expert_model_parallel_size": 2}})
    operator = SlowOperator("aten::bmm", 9_000.0, 5_000.0, kind="matrix")
    finding = straggling_rank.evaluate(replace(case, slow_operators={1: operator}, runs={0: run}))
    assert finding is not None
    assert finding.action.how.startswith("Compare how many tokens are routed to its experts with the other ranks'.")
    assert "--moe-aux-loss-coeff" in finding.action.how


def test_work_of_another_kind_is_not_more_samples() -> None:
    """Its further FLOPs are of what its peers do not do, so samples need not be spread."""
    flops = {rank: replace(steps(0.0), flops=((1.0 + 3.0 * (rank == 1)),) * 8) for rank in range(4)}
    case = changed(job(0.0), stragglers=(SLOW,), per_step=flops)
    plain = straggling_rank.evaluate(case)
    assert plain is not None
    assert plain.action.how.startswith("Spread samples evenly")
    operator = SlowOperator("aten::sort", 15_000.0, 0.0, 1.0, 0.0)
    finding = straggling_rank.evaluate(replace(case, slow_operators={1: operator}))
    assert finding is not None
    assert finding.title.startswith(
        "Rank 1 is a straggler (slower compute, mostly in aten::sort, which its peers do not call): waiting for it"
    )
    assert finding.action.how.startswith(
        "Rank 1 calls aten::sort 1 time per step (15.0 ms), its peers never do, and most of the rest as often"
    )


@pytest.mark.parametrize(
    ("waited_ms", "ran_ms", "said"), [(30, 10, True), (15, 10, False), (None, 10, False), (30, 25, False)]
)
def test_who_waits_for_a_core_is_told_so_first(waited_ms: int | None, ran_ms: int, said: bool) -> None:
    """Rank 0 loads for 20 ms longer than its peers; each of these runs for 10 ms per step and waits as long for a core.
    Who runs for 25 ms and waits for 30 waits for 25 of these because it has more work.
    """
    row = replace(PAUSES, cause="dataloader")
    times = ((waited_ms, ran_ms), (10, 10), (10, 10))
    runs = {
        rank: RunMetadata(
            rank=rank,
            cpu=CpuMetadata(steps=2, thread_ns=2_000_000 * ran, waited_ns=None if ms is None else 2_000_000 * ms),
        )
        for rank, (ms, ran) in enumerate(times)
    }
    finding = straggling_rank.evaluate(context(*map(breakdown, range(3)), stragglers=(row,), runs=runs))
    assert finding is not None
    first = finding.action.how.split("\n")[0]
    assert first.endswith("waits for a core 20.0 ms per step longer than its peers' for such work.") is said
    assert ("waits for a core" in first) is said
    assert "Check the storage" in finding.action.how


@pytest.mark.parametrize(
    ("cause", "thread_ms", "device", "said"),
    [("host", 5, "cpu", True), ("host", 27, "cpu", False), ("dataloader", 5, "cpu", False), ("host", 5, "cuda", False)],
)
def test_other_threads_of_its_process_are_looked_at_first(cause: str, thread_ms: int, device: str, said: bool) -> None:
    """Each process computes for 10 ms per step on its training thread; that of rank 0 for 30 in all."""
    row = replace(PAUSES, cause=cause)
    cpus = [CpuMetadata(steps=2, process_ns=60_000_000, thread_ns=2_000_000 * thread_ms)]
    cpus += [CpuMetadata(steps=2, process_ns=22_000_000, thread_ns=20_000_000)] * 2
    kind = DeviceMetadata(type=device)
    runs = {rank: RunMetadata(rank=rank, cpu=cpu, device=kind) for rank, cpu in enumerate(cpus)}
    finding = straggling_rank.evaluate(context(*map(breakdown, range(3)), stragglers=(row,), runs=runs))
    assert finding is not None
    first = finding.action.how.split("\n")[0]
    assert first.startswith("Look at what other threads of rank 0 do") is said
    assert ("they compute for 24.0 ms per step longer than its peers'" in first) is said


@pytest.mark.parametrize(("beside_ms", "own"), [(25, True), (10, False)])
def test_threads_of_its_own_may_be_what_it_waits_for_a_core_for(beside_ms: int, own: bool) -> None:
    """Rank 0 waits 40 ms per step longer for a core than its peers, and its other threads compute meanwhile."""
    row = replace(PAUSES, lost_us=60_000.0)
    cpus = [CpuMetadata(steps=2, process_ns=2_000_000 * (10 + beside_ms), thread_ns=20_000_000, waited_ns=90_000_000)]
    cpus += [CpuMetadata(steps=2, process_ns=20_000_000, thread_ns=20_000_000, waited_ns=10_000_000)] * 2
    runs = {rank: RunMetadata(rank=rank, cpu=cpu, device=DeviceMetadata(type="cpu")) for rank, cpu in enumerate(cpus)}
    finding = straggling_rank.evaluate(context(*map(breakdown, range(3)), stragglers=(row,), runs=runs))
    assert finding is not None
    assert ("Look at what other threads of rank 0 do" in finding.action.how) is own
    assert ("Look for other processes on the cores of rank 0" in finding.action.how) is not own


def pausing(others_us: float, thread_ns: int, elsewhere_us: float = 0.0) -> RuleContext:
    """Rank 0 pauses for 40 ms of 100, all but ``elsewhere_us`` in its loop, where the others do for so long; of its
    time its thread ran ``thread_ns``.
    """
    rows = [
        replace(breakdown(rank, idle_host=us), named_host_us={BETWEEN: us})
        for rank, us in enumerate((40_000.0 - elsewhere_us, others_us, others_us))
    ]
    row = StragglerRow(rank=0, cause="host", lost_us=30_000.0, confidence="high", ranks=(0,))
    cpu = CpuMetadata(steps=10, wall_ns=1_000_000_000, thread_ns=thread_ns, waited_ns=0)
    runs = {rank: RunMetadata(rank=rank, cpu=cpu) for rank in range(3)}
    return context(*rows, stragglers=(row,), runs=runs)


@pytest.mark.parametrize(
    ("job", "high_us"),
    [
        (pausing(15_000.0, 550_000_000), 100_000.0),  # may wait for the same
        (pausing(5_000.0, 550_000_000), 74_500.0),  # waits alone
        (pausing(15_000.0, 900_000_000), 74_500.0),  # works
        (pausing(300.0, 550_000_000, elsewhere_us=39_500.0), 74_500.0),  # waits elsewhere
    ],
)
def test_who_waits_where_its_peers_wait_too_may_gain_nothing_at_their_pace(job, high_us):
    finding = straggling_rank.evaluate(job)
    assert finding is not None
    assert finding.predicted_step_us is not None
    assert (finding.predicted_step_us.mid, finding.predicted_step_us.high) == (70_000.0, high_us)
    assert ("only the last one" in finding.action.how) == (high_us == 100_000.0)
    assert (finding.confidence is Confidence.LOW) == (high_us == 100_000.0)


@pytest.mark.parametrize(
    ("late_in", "workers", "others_us", "doubtful"),
    [
        ((3,), None, None, True),
        ((3,), 4, None, True),
        ((3,), 4, 20e3, False),  # theirs are quicker
        ((3,), 0, None, False),  # it loads itself
        ((3, 5), None, None, False),
    ],
)
def test_a_rank_that_waited_for_one_batch_may_gain_nothing_at_its_peers_pace(
    late_in: tuple[int, ...], workers: int | None, others_us: float | None, doubtful: bool
) -> None:
    """Rank 0 waits 150 ms for one of its batches of five steps of 100, and its peers for it."""
    late = StragglerRow(
        rank=0, cause="dataloader", lost_us=30_000.0, confidence="medium", ranks=(0,), steps=late_in, share_of_steps=0.2
    )
    loading = tuple(
        DataLoaderRow(rank=rank, wait_us=us, blocking_us=us, batch_us=others_us, num_workers=workers)
        for rank, us in enumerate((30_000.0, 100.0, 100.0))
    )
    if others_us is not None:
        loading = (replace(loading[0], batch_us=2 * others_us), *loading[1:])
    rows = [breakdown(rank, idle_dataloader=us) for rank, us in enumerate((30_000.0, 0.0, 0.0))]
    finding = straggling_rank.evaluate(context(*rows, stragglers=(late,), dataloader=loading))
    assert finding is not None
    assert finding.predicted_step_us is not None
    assert (finding.predicted_step_us.high == 100_000.0) == doubtful
    assert ("only the last one" in finding.action.how) == doubtful
    assert (finding.confidence is Confidence.LOW) == doubtful


def test_ranks_that_pause_in_the_same_steps_are_not_told_of_pauses_one_after_another():
    """Each of both pauses for 30 ms in every step and for 10 more in every other one, or only for these 10."""
    turns = replace(PAUSES, scope="job", pattern="rotating", ranks=(0, 1))
    said = []
    for always in (0.0, 30_000.0):
        longer = {0: (always, always + 10_000.0) * 4, 1: (always + 10_000.0, always) * 4}
        each = {rank: replace(steps(0.0), pausing_us=us) for rank, us in longer.items()}
        finding = straggling_rank.evaluate(context(breakdown(0), breakdown(1), stragglers=(turns,), per_step=each))
        assert finding is not None
        said.append(finding.action.how)
    assert said[0].startswith("One rank after another pauses")
    assert said[1].startswith("All of ranks 0, 1 pause in the same steps, now one for longer and now another")
    assert "garbage" not in said[1]


def test_recorded_pauses_in_turn_are_named_and_no_garbage_collection_is_suspected() -> None:
    """Of ranks that perfscope run recorded every collection has a name: none is behind pauses between two phases."""
    turns = replace(PAUSES, scope="job", pattern="rotating", ranks=(0, 1))
    place = "the loop between forward and backward"
    each = {rank: replace(steps(0.0), pausing_us=(20_000.0 * (1 - rank), 20_000.0 * rank) * 4) for rank in (0, 1)}
    rows = [replace(breakdown(rank), named_host_us={place: 10_000.0, "the forward": 900.0}) for rank in (0, 1)]
    case = context(*rows, stragglers=(turns,), per_step=each, runs=runs(2))
    finding = straggling_rank.evaluate(case)
    assert finding is not None
    assert f"mostly in {place})" in finding.title
    assert finding.action.how.startswith(f"One rank after another pauses in {place} (logging")
    assert "garbage" not in finding.action.how
    assert "sleep" not in finding.action.how
    slept = straggling_rank.evaluate(replace(case, slept_us={0: 9_000.0, 1: 9_000.0}))
    assert slept is not None
    assert "Their threads sleep there for most of that time" in slept.action.how


@pytest.mark.parametrize(("loader", "batch"), [(False, True), (True, False)])
def test_a_rank_that_sleeps_before_its_forward_may_wait_for_its_batch(*, loader: bool, batch: bool) -> None:
    rows = [replace(breakdown(rank), named_host_us={BETWEEN: us}) for rank, us in enumerate((15_000.0, 1_000.0))]
    loaders = (DataLoaderRow(rank=0, wait_us=0.0, blocking_us=0.0, batch_us=None, num_workers=0),) if loader else ()
    case = context(*rows, stragglers=(PAUSES,), slept_us={0: 14_000.0}, dataloader=loaders, runs=runs(2))
    finding = straggling_rank.evaluate(case)
    assert finding is not None
    assert finding.action.how.startswith("Look for what rank 0")
    assert "its thread sleeps there for most of that time" in finding.action.how
    assert ("(getting the batch, logging" in finding.action.how) is batch


@pytest.mark.parametrize(("flops", "said"), [((1e9, 1e9), True), ((1e9, 1.4e9), False), (None, False)])
def test_products_of_as_many_flops_are_slow_by_cores(flops: tuple[float, float] | None, said: bool) -> None:
    each = {rank: replace(steps(0.0), flops=None if flops is None else (flops[rank],) * 8) for rank in (0, 1)}
    operator = SlowOperator("aten::mm", 30_000.0, 10_000.0)
    case = context(
        breakdown(0), breakdown(1), stragglers=(replace(SLOW, ranks=(1,)),), per_step=each, devices=("CPU",),
        slow_operators={1: operator}, runs=runs(2),
    )  # fmt: skip
    told = remedies.in_operator(case, case.summary.stragglers[0], "rank 1")
    assert ("as many FLOPs: it has no more to compute" in told) is said
    assert told.startswith("Look at aten::mm") is not said


@pytest.mark.parametrize(
    ("devices", "clocks", "links"),
    [
        (("NVIDIA H100 80GB HBM3",), "nvidia-smi -q -d PERFORMANCE,CLOCK,POWER", "nvidia-smi topo -m"),
        ((), "nvidia-smi -q -d PERFORMANCE,CLOCK,POWER", "nvidia-smi topo -m"),
        (("AMD Instinct MI300X",), "amd-smi metric --clock --power", "amd-smi topology or rocm-smi --showtopo"),
    ],
)
def test_commands_are_those_of_the_devices_maker(devices, clocks, links):
    """A slow device, one whose links are slow, a slow host, and ranks that are slow in turn with equal work."""
    pair = StragglerRow(
        rank=0, cause="compute", lost_us=30_000.0, confidence="high", ranks=(0, 1), scope="ranks",
        causes=("compute", "communication"), alone_us=(1_000.0, 1_000.0), adds_us=(15_000.0, 15_000.0),
    )  # fmt: skip
    turns = replace(SLOW, scope="job", ranks=(0, 1))
    equal = {rank: replace(steps(0.0), flops=(1e9,) * 8) for rank in (0, 1)}
    rows = {SLOW: (clocks,), replace(SLOW, cause="communication"): (links,), pair: (clocks, links)}
    rows |= {replace(SLOW, scope="host", host="node1"): (clocks,), turns: (clocks,)}
    for row, said in rows.items():
        found = context(breakdown(0), breakdown(1), stragglers=(row,), per_step=equal, devices=devices)
        finding = straggling_rank.evaluate(found)
        assert finding is not None
        assert all(command in finding.action.how for command in said)
        assert ("nvidia" in finding.action.how) == ("nvidia" in clocks)


@pytest.mark.parametrize(
    ("cause", "looks_at"),
    [
        ("compute", "clocks, power caps and temperature"),
        ("dataloader", "what host node1 reads its samples from"),
        ("host", "the CPUs of host node1"),
        ("launch", "the CPUs of host node1"),
        ("copy", "the PCIe links of host node1"),
        ("communication", "links and network adapters of host node1"),
    ],
)
def test_what_to_look_at_on_a_whole_host_is_what_its_ranks_are_slow_in(cause: str, looks_at: str) -> None:
    row = replace(SLOW, scope="host", host="node1", cause=cause, ranks=(0, 1))
    finding = straggling_rank.evaluate(context(*(breakdown(rank) for rank in range(4)), stragglers=(row,)))
    assert finding is not None
    assert looks_at in finding.action.how
    assert ("temperature" in finding.action.how) is (cause == "compute")


def test_a_host_without_a_name_is_called_by_its_ranks_once() -> None:
    row = replace(SLOW, scope="host", host="host of ranks 0-1", ranks=(0, 1))
    finding = straggling_rank.evaluate(context(*(breakdown(rank) for rank in range(4)), stragglers=(row,)))
    assert finding is not None
    assert finding.title.startswith("Host of ranks 0-1 is a straggler")
    assert finding.action.setting == "host of ranks 0-1"


@pytest.mark.parametrize(("factor", "also"), [(1.25, True), (1.0, False)])
def test_a_second_cause_on_the_same_rank_is_told(factor: float, also: bool, tmp_path: Path) -> None:
    """Rank 1 pauses for a third of the step; where its device is slow as well, removing the pause alone is not all."""
    model = Model(blocks=4, tokens=16384, width=512)
    job = Job(strategy="ddp", ranks=4, model=model, item_every=1, recording=Recording(steps=6))
    pause = Cause("pause", 0.33 * step_ns(job), (1,), how="log")
    slow = (Cause("slow compute", factor, ranks=(1,)),) if factor > 1 else ()
    emulate(replace(job, causes=(pause, *slow))).write(tmp_path)
    finding = next(one for one in advised(tmp_path).findings if one.rule == straggling_rank.RULE)
    assert finding.title.startswith("Rank 1 is a straggler (Python work outside operators")
    assert ("; and slower compute)" in finding.title) == also
    assert ("clocks, power and throttle reasons" in finding.action.how) == also


def test_a_rank_that_alone_reads_many_values_is_told_as_such(tmp_path: Path) -> None:
    """All read the loss, and rank 0 so many values more that its host takes longer for them: no slow machine."""
    model = Model(blocks=4, tokens=16384, width=512)
    job = Job(strategy="ddp", ranks=4, model=model, item_every=1, recording=Recording(steps=6))
    emulate(replace(job, causes=(Cause("sync", 60.0, ranks=(0,)),))).write(tmp_path)
    finding = next(one for one in advised(tmp_path).findings if one.rule == straggling_rank.RULE)
    assert finding.title.startswith("Rank 0 is a straggler (host synchronization, mostly in aten::_local_scalar_dense")
    assert "calls aten::_local_scalar_dense 61 times per step, its peers 1," in finding.action.how


def on_cpus(slow: StragglerRow, numbers: tuple[int, ...], *, other_steps: bool = False) -> RuleContext:
    """``other_steps``: rank 1 takes as much more CPU time in unprofiled steps as in the recorded ones."""
    took_ns = [round((50_000 + rank * slow.lost_us) * 1e3) for rank in range(2)]
    runs = {
        rank: RunMetadata(
            rank=rank, cpu=CpuMetadata(steps=1, thread_ns=ns), steps=StepsMetadata(unprofiled_thread_ns=(ns,) * 8)
        )
        for rank, ns in enumerate(took_ns)
    }
    return context(
        breakdown(0),
        breakdown(1),
        stragglers=(slow,),
        steps=numbers,
        devices=("CPU",),
        runs=runs if other_steps else {},
    )


@pytest.mark.parametrize(("numbers", "where"), [((4,), "the only recorded step"), ((4, 5), "the 2 recorded steps")])
def test_in_one_step_or_two_a_rank_is_late_and_no_straggler(numbers: tuple[int, ...], where: str) -> None:
    """Whether it is slow, more steps show; what that would gain is no prediction."""
    slow = replace(SLOW, lost_us=34_000.0, share_of_steps=1.0, steps=numbers)
    finding = straggling_rank.evaluate(on_cpus(slow, numbers))
    assert finding is not None
    step = "the step" if len(numbers) == 1 else "each step"
    assert finding.title == f"Rank 1 is late in {where} (slower compute): waiting for it costs 34% of {step}"
    assert finding.predicted_step_us is None
    assert finding.ceiling == pytest.approx(1 / 0.66 - 1)
    assert not finding.whatif
    record, again = finding.action.how.split("\n")
    assert record.startswith("Record more steps (perfscope run --active 8)")
    assert again.startswith("If it is late again: look for other processes on the cores of rank 1")


@pytest.mark.parametrize(("last_step", "went_on"), [(5, True), (48, False)])
def test_a_capture_that_the_script_ended_is_not_made_longer_by_more_steps(last_step: int, went_on: bool) -> None:
    """Of 50 steps the job made; where it ended with the capture, more steps are recorded by a longer job."""
    slow = replace(SLOW, lost_us=34_000.0, share_of_steps=1.0, steps=(4, 5))
    capture = CaptureMetadata(file="", first_step=4, last_step=last_step, complete=False)
    run = RunMetadata(rank=0, captures=(capture,), steps=StepsMetadata(seen=49 + went_on))
    finding = straggling_rank.evaluate(replace(on_cpus(slow, (4, 5)), runs={0: run}))
    assert finding is not None
    assert finding.action.how.startswith("Record again without the script's own profiler") is went_on
    assert finding.action.how.startswith("Record more steps") is not went_on


def test_what_is_little_in_one_step_is_not_told() -> None:
    """13 % of three steps is told, of one it may be an accident."""
    slow = replace(SLOW, lost_us=13_000.0, share_of_steps=1.0)
    three = on_cpus(replace(slow, steps=(4, 5, 6)), (4, 5, 6), other_steps=True)
    assert straggling_rank.evaluate(three) is not None
    assert straggling_rank.evaluate(on_cpus(replace(slow, steps=(4,)), (4,), other_steps=True)) is None


BRIEF, LONG = tuple(range(4, 10)), tuple(range(4, 12))


@pytest.mark.parametrize(
    ("numbers", "share", "changes", "confidence"),
    [
        (BRIEF, 0.13, {}, None),
        (BRIEF, 0.34, {}, "low"),
        (LONG, 0.13, {}, "medium"),
        (BRIEF, 0.13, {"other_steps": True}, "medium"),
        (BRIEF, 0.13, {"cause": "dataloader"}, "high"),
        (BRIEF, 0.13, {"scope": "job", "ranks": (0, 1)}, None),
        (LONG, 0.13, {"scope": "job", "ranks": (0, 1)}, "medium"),
    ],
    ids=["brief", "brief and large", "long enough", "in other steps, too", "another cause", "in turn", "long, in turn"],
)
def test_what_all_operators_take_longer_in_half_a_second_may_be_the_machine(
    numbers: tuple[int, ...], share: float, changes: dict[str, Any], confidence: str | None
) -> None:
    """Steps of 100 ms on CPUs: other programs may use a core for as long as 0.6 s, and for no longer than 0.8."""
    other_steps = changes.pop("other_steps", False)
    slow = replace(SLOW, lost_us=share * 1e5, share_of_steps=1.0, steps=numbers, **changes)
    case = on_cpus(slow, numbers, other_steps=other_steps)
    finding = straggling_rank.evaluate(case)
    assert (None if finding is None else finding.confidence.value) == confidence
    doubted = straggling_rank.is_in_doubt(case)
    assert doubted is (confidence in (None, "low"))
    if finding is not None and doubted:
        assert "The recording is 600 ms long. On CPUs another program may have used a core" in finding.action.how


@pytest.mark.parametrize(
    ("late", "share", "confidence"),
    [((4,), 0.13, None), ((4, 5), 0.2, "low"), ((5, 6), 0.2, "medium"), ((4, 5, 6), 0.2, "medium")],
    ids=["the first", "the first two, by much", "others", "three"],
)
def test_a_rank_that_is_late_right_behind_the_profilers_start(
    late: tuple[int, ...], share: float, confidence: str | None
) -> None:
    slow = replace(SLOW, cause="host", lost_us=share * 1e5, steps=late, pattern="intermittent", share_of_steps=0.25)
    finding = straggling_rank.evaluate(on_cpus(slow, LONG, other_steps=True))
    assert (None if finding is None else finding.confidence.value) == confidence
    if confidence == "low":
        assert finding is not None
        assert "right behind the profiler's start" in finding.action.how


@pytest.mark.parametrize("own", ["an operator", "work", "a pause", "waits for a core"])
def test_a_rank_that_does_something_of_its_own_is_slow_by_that(own: str) -> None:
    cause = "host" if own == "a pause" else "compute"
    slow = replace(SLOW, lost_us=13_000.0, share_of_steps=1.0, steps=BRIEF, cause=cause)
    case = on_cpus(slow, BRIEF)
    if own == "an operator":
        case = replace(case, slow_operators={1: SlowOperator("aten::svd", 9e3, 0.0, calls=3.0)})
    elif own == "work":
        case = replace(case, per_step={rank: replace(steps(0.0), flops=(10.0 + rank,) * 6) for rank in range(2)})
    elif own == "a pause":
        rows = (breakdown(0), replace(breakdown(1), named_host_us={"save (train.py:9)": 12_000.0}))
        case = changed(case, time_breakdown=rows)
    else:
        case = waiting_for_cores(case, "0", "1")
    assert straggling_rank.is_in_doubt(on_cpus(slow, BRIEF))
    assert not straggling_rank.is_in_doubt(case)


def test_who_waits_for_cores_that_all_share_is_told_by_the_contention() -> None:
    """All wait for a core, rank 1 for 11.7 ms of a step longer in these six: it is no straggler by that."""
    slow = replace(SLOW, lost_us=20_000.0, share_of_steps=1.0, steps=BRIEF)
    shared, bound = (waiting_for_cores(on_cpus(slow, BRIEF), *cores) for cores in (("0-1", "0-1"), ("0", "1")))
    assert cpu_contention.evaluate(shared) is not None
    assert straggling_rank.evaluate(shared) is None
    assert straggling_rank.evaluate(bound) is not None


def waiting_for_cores(case: RuleContext, *cores: str) -> RuleContext:
    """Rank 1 waits for one for 11.7 ms of each step; the ranks may run on these."""
    cpus = {
        rank: CpuMetadata(
            steps=6, wall_ns=6 * 10**8, process_ns=4 * 10**8, thread_ns=4 * 10**8,
            waited_ns=70_000_000 + rank * 70_000_000,
            cores=own,
        )
        for rank, own in enumerate(cores)
    }  # fmt: skip
    return replace(
        case, runs={rank: RunMetadata(rank=rank, host="vm", cpu_count=2, cpu=cpu) for rank, cpu in cpus.items()}
    )


@pytest.mark.parametrize(
    ("numbers", "cause", "slow"),
    [((4,), "compute", True), ((4,), "launch", False), ((4, 5), "launch", True)],
)
def test_a_device_that_is_slow_in_each_kernel_of_one_step_is_slow(
    numbers: tuple[int, ...], cause: str, slow: bool
) -> None:
    row = replace(SLOW, cause=cause, lost_us=34_000.0, share_of_steps=1.0, steps=numbers)
    finding = straggling_rank.evaluate(context(breakdown(0), breakdown(1), stragglers=(row,), steps=numbers))
    assert finding is not None
    assert ("is a straggler" in finding.title) is slow
    assert (finding.predicted_step_us is not None) is slow


@pytest.mark.parametrize(("late", "said"), [((5,), True), ((5, 6), False)])
def test_one_late_batch_may_be_any_rank_s(late: tuple[int, ...], said: bool) -> None:
    row = replace(SLOW, cause="dataloader", steps=late, host="host of ranks 0-1")
    for hosts, where in ((("host of ranks 0-1",), ""), (("host of ranks 0-1", "b"), " on host of ranks 0-1")):
        case = context(breakdown(0), breakdown(1), stragglers=(row,), hosts=hosts)
        finding = straggling_rank.evaluate(case)
        assert finding is not None
        assert finding.action.how.startswith("Load more batches ahead") is said
        assert f"of rank 1{where}" in finding.action.how
        assert ("host of ranks" in finding.action.how) is bool(where)
