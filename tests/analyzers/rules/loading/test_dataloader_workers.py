"""The number of workers: when it is asked for, as each framework writes it, and where cores are the limit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perfscope.analyzers.job.loading import dataloader_rows
from perfscope.analyzers.job.rank_steps import RankSteps
from perfscope.analyzers.rules import evaluate
from perfscope.analyzers.rules.loading import dataloader_workers
from perfscope.analyzers.rules.ranks import straggling_rank
from perfscope.analyzers.whatif.whatif import context_of
from perfscope.recording.metadata import CpuMetadata, DataLoaderMetadata, RunMetadata
from perfscope.results.findings import Confidence, Finding, Prediction, Severity
from perfscope.results.notes import note
from perfscope.results.rows import DataLoaderRow, StragglerRow
from tests.analyzers.rules.jobs import analyze, breakdown, changed, context, runs, starved
from tests.generator import MS, JobSpec, LoaderSpec, step_time_ns


def test_recommends_the_smallest_number_that_keeps_up():
    # Loading takes 80 ms, the rest of the step 20 ms: 4 workers finish a batch every 20 ms.
    finding = dataloader_workers.evaluate(starved(80_000))
    assert finding is not None
    assert (finding.action.old, finding.action.new) == ("0", "4")
    assert "num_workers=4" in finding.action.how
    assert finding.ceiling == pytest.approx(100 / 20 - 1)
    assert finding.severity is Severity.HIGH
    assert finding.confidence is Confidence.HIGH


@pytest.mark.parametrize(("steps_ms", "workers"), [((50, 21, 20, 20, 20), "6"), ((20.3, 20, 20, 20, 20), "4")])
def test_the_replay_decides_how_many_are_enough(steps_ms, workers):
    """Ranks wait for one another's batches as well, so that a step may be shorter than without its own wait alone."""
    by_workers = {str(4 + more): Prediction(low=0, mid=ms * 1e3, high=1e6) for more, ms in enumerate(steps_ms)}
    job = changed(
        starved(80_000), predict=lambda asked: by_workers.get(asked["dataloader.num_workers"], by_workers["8"])
    )
    finding = dataloader_workers.evaluate(job)
    assert finding is not None
    assert finding.action.new == workers
    assert finding.whatif == {"dataloader.num_workers": workers}


def test_workers_of_an_iterable_dataset_each_deliver_all_of_it():
    def costs(iterable: bool, load_us: int) -> str | None:
        loader = DataLoaderMetadata(num_workers=0, iterable=iterable)
        finding = dataloader_workers.evaluate(changed(starved(load_us), runs=runs(1, loader)))
        assert finding is not None
        return finding.action.costs

    assert "get_worker_info" in (costs(True, 80_000) or "")
    assert costs(True, 40_000) is None  # one worker
    assert costs(False, 80_000) is None


def test_a_wait_of_the_only_step_that_may_not_have_been_hidden_may_all_be_saved():
    """Of a step of 100 ms loading blocks 20, after 50 that are assumed to be hidden behind the step before."""
    alone = starved(20_000, workers=None)
    waited = note("steps", "lone_step_waits", (0,), share=0.5)
    told, bounded = dataloader_workers.evaluate(alone), dataloader_workers.evaluate(changed(alone, notes=(waited,)))
    assert told is not None
    assert bounded is not None
    assert told.ceiling == pytest.approx(100 / 80 - 1)
    assert bounded.ceiling == pytest.approx(150 / 80 - 1)


def test_fires_from_five_percent():
    assert dataloader_workers.evaluate(starved(5_000)) is not None
    assert dataloader_workers.evaluate(starved(4_900)) is None


def test_does_not_ask_for_more_workers_than_cores():
    finding = dataloader_workers.evaluate(starved(80_000, cores=2))
    assert finding is not None
    assert finding.action.new == "2"
    # Two workers finish a batch every 40 ms: the step cannot go below that.
    assert finding.ceiling == pytest.approx(100 / 40 - 1)
    assert "all that the cores allow" in finding.action.how


@pytest.mark.parametrize(("batch_us", "quick"), [(300, True), (700, False)])
def test_batches_that_are_made_as_quickly_as_a_worker_hands_them_over(batch_us: float, quick: bool) -> None:
    """20 in each step of 100 ms block it for 6 ms or 14."""
    case = starved(20 * batch_us, batch_us=batch_us)
    rows = tuple(replace(row, batches_per_step=20.0) for row in case.summary.dataloader)
    finding = dataloader_workers.evaluate(changed(case, dataloader=rows))
    assert finding is not None
    assert (finding.action.new == finding.action.old == "0") is quick
    assert ("workers bring little, or slow the loop down" in finding.action.how) is quick
    assert (not finding.whatif) is quick


def test_reports_when_the_cores_are_the_limit_already():
    finding = dataloader_workers.evaluate(starved(50_000, workers=2, batch_us=190_000, cores=2))
    assert finding is not None
    assert (finding.action.old, finding.action.new) == ("2", "2")
    assert "The 2 cores that each rank has are the limit, not the number of workers." in finding.action.how


def test_silent_where_two_workers_load_as_long_as_the_step_takes():
    assert dataloader_workers.evaluate(starved(50_000, workers=2, batch_us=200_000, cores=2)) is None


def test_workers_that_do_not_keep_up():
    # Two workers deliver one batch each 100 ms step: 200 ms per batch; 40 ms of other work need 5 of them.
    finding = dataloader_workers.evaluate(starved(60_000, workers=2, batch_us=200_000))
    assert finding is not None
    assert (finding.action.old, finding.action.new) == ("2", "5")


@pytest.mark.parametrize(
    ("batch_us", "step_us", "new"),
    [
        (390_000.0, 80_000.0, "5"),
        (390_000.0, 98_000.0, None),
        (360_000.0, 80_000.0, None),
        (420_000.0, 97_000.0, "5"),
        (420_000.0, 101_000.0, None),
    ],
    ids=["more workers help", "they do not", "workers idle", "some batches were ready", "they were ready for all"],
)
def test_workers_that_take_the_whole_step_are_the_limit_though_devices_do_not_wait_for_batches(batch_us, step_us, new):
    """A step of 100 ms; 4 workers take 97.5 or 90 ms for its batch; or 105, which later steps take. Hosts wait 10 ms,
    devices 1 ms.
    """
    row = DataLoaderRow(rank=0, wait_us=10_000.0, blocking_us=1_000.0, batch_us=batch_us, num_workers=4)
    case = context(
        breakdown(0, idle_dataloader=1_000.0), dataloader=(row,),
        predict=lambda _: Prediction(low=step_us, mid=step_us, high=step_us),
    )  # fmt: skip
    finding = dataloader_workers.evaluate(case)
    assert (finding.action.new if finding is not None else None) == new


HIDDEN = {"batch_ms": 100, "waited_ms": 50, "loading_cpu_ms": 2, "ranks": 2, "devices": ("CPU",)}


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ({}, True),
        ({"batch_ms": 90}, False),
        ({"waited_ms": 5}, False),
        ({"loading_cpu_ms": 80}, False),
        ({"ranks": 1}, False),
        ({"devices": ("NVIDIA A100-SXM4-80GB",)}, False),
    ],
    ids=["hidden", "quicker workers", "no waits", "workers that compute", "one rank of two", "on devices"],
)
def test_waits_for_cores_hide_that_workers_set_the_pace(other, found):
    """A step of 100 ms, and one worker takes as long for its batch. The thread waits 1 ms for it and 50 for a core:
    with a core at once, and two workers, the step takes 50 ms.
    """
    case = {**HIDDEN, **other}
    rows = [
        DataLoaderRow(rank=rank, wait_us=1_000, blocking_us=1_000, batch_us=1e3 * case["batch_ms"], num_workers=1)
        for rank in range(case["ranks"])
    ]
    cpu = CpuMetadata(steps=1, wall_ns=100 * MS, thread_ns=45 * MS, waited_ns=case["waited_ms"] * MS)
    loader = DataLoaderMetadata(num_workers=1, timed_batches=1, load_cpu_ns=case["loading_cpu_ms"] * MS)
    steps = {"devices": case["devices"], "unprofiled_step_us": 100_000.0}
    job = context(breakdown(0), breakdown(1), dataloader=tuple(rows), **steps)
    job = replace(job, runs={rank: RunMetadata(rank=rank, cpu=cpu, dataloaders=(loader,)) for rank in range(2)})
    finding = dataloader_workers.evaluate(job)
    assert (finding is not None) is found
    if finding is not None:
        assert (finding.action.old, finding.action.new) == ("1", "2")
        assert (finding.predicted_step_us, finding.whatif) == (None, {})
        assert finding.ceiling == pytest.approx(100 / 50 - 1)


def test_a_number_that_the_batches_show_is_no_more_than_that():
    def how(workers: int | None) -> str:
        row = DataLoaderRow(rank=0, wait_us=60_000, blocking_us=60_000, batch_us=80_000, num_workers=workers)
        finding = dataloader_workers.evaluate(context(breakdown(0, idle_dataloader=60_000), dataloader=(row,)))
        assert finding is not None
        assert finding.action.new == "2"
        return finding.action.how

    assert "If there are 2 or more, use twice as many." in how(None)
    assert "twice" not in how(1)


@pytest.mark.parametrize(("waits_us", "few"), [((0.0,) * 7 + (240_000.0,), True), ((30_000.0,) * 8, False)])
def test_a_batch_that_takes_long_once_is_no_step_that_loading_blocks(waits_us, few):
    job = starved(30_000, workers=None)
    loader = replace(job.summary.dataloader[0], batch_us=None)
    steps = replace(
        job.per_step.get(0, RankSteps((), (), (), (), (), (), (), (), (), (), None, None)), loading_us=waits_us
    )
    finding = dataloader_workers.evaluate(changed(job, dataloader=(loader,), per_step={0: steps}))
    assert finding is not None
    assert ("in 1 of 8 steps" in finding.title) is few
    assert ("prefetch_factor" in finding.action.how) is few


def test_unknown_number_of_workers_gets_no_number():
    row = DataLoaderRow(rank=0, wait_us=60_000, blocking_us=60_000, batch_us=None, num_workers=None)
    finding = dataloader_workers.evaluate(context(breakdown(0, idle_dataloader=60_000), dataloader=(row,)))
    assert finding is not None
    assert finding.action.new is None


def test_a_rank_that_waits_longest_is_not_every_rank():
    """Where no straggler is found: the job's other rank waits 6 % of the step, or nearly as long."""
    for other_us, who in ((6_000, "rank 1"), (40_000, "every rank")):
        rows = tuple(
            DataLoaderRow(rank=rank, wait_us=us, blocking_us=us, batch_us=us, num_workers=0)
            for rank, us in enumerate((other_us, 60_000))
        )
        finding = dataloader_workers.evaluate(context(breakdown(0), breakdown(1), dataloader=rows))
        assert finding is not None
        assert finding.title.endswith(f"of the step on {who}")
        assert finding.title.startswith(f"Data loading blocks {60 if who == 'rank 1' else 50}%")


@pytest.mark.parametrize("other_us", [50, 5_000, 24_000])
def test_one_rank_that_waits_for_data_is_left_to_the_straggler_rule(other_us):
    rows = (
        DataLoaderRow(rank=0, wait_us=other_us, blocking_us=other_us, batch_us=other_us, num_workers=0),
        DataLoaderRow(rank=1, wait_us=50_000, blocking_us=50_000, batch_us=50_000, num_workers=0),
    )
    late = StragglerRow(rank=1, cause="dataloader", lost_us=50_000, confidence="high")
    ranks = (
        breakdown(0, exposed_comm_wait=50_000 - other_us, idle_dataloader=other_us),
        breakdown(1, idle_dataloader=50_000),
    )
    found = evaluate(context(*ranks, dataloader=rows, stragglers=(late,)))
    assert [finding.rule for finding in found] == [straggling_rank.RULE]


@pytest.mark.parametrize(
    ("batches_us", "steps", "rule"),
    [
        ((50e3, 52e3, 48e3, 51e3), (1, 3), dataloader_workers.RULE),
        ((50e3, 90e3, 48e3, 51e3), (1, 3), straggling_rank.RULE),
        ((None,) * 4, (3,), dataloader_workers.RULE),
        ((None,) * 4, (1, 3), straggling_rank.RULE),
    ],
    ids=["as slow as the others", "slower", "once", "twice"],
)
def test_of_loaders_that_are_all_as_slow_the_last_one_is_no_straggler(
    batches_us: tuple[float | None, ...], steps: tuple[int, ...], rule: str
) -> None:
    """Rank 1 waits 20 ms of a step of 100 for its batches, and the others for it."""
    late = StragglerRow(
        rank=1, cause="dataloader", lost_us=20_000, confidence="medium", steps=steps, share_of_steps=0.8
    )
    ranks = [breakdown(rank, idle_dataloader=20_000.0 if rank == 1 else 0.0) for rank in range(4)]
    rows = tuple(
        DataLoaderRow(rank=rank, wait_us=20e3, blocking_us=20e3 if rank == 1 else 0.0, batch_us=us, num_workers=None)
        for rank, us in enumerate(batches_us)
    )
    found = evaluate(context(*ranks, dataloader=rows, stragglers=(late,)))
    assert [finding.rule for finding in found] == [rule]


@pytest.mark.parametrize(
    ("others_us", "causes", "rule"),
    [
        (None, ("dataloader", "dataloader"), dataloader_workers.RULE),
        (49e3, ("dataloader", "dataloader"), dataloader_workers.RULE),
        (20e3, ("dataloader", "dataloader"), straggling_rank.RULE),
        (None, ("dataloader", "compute"), straggling_rank.RULE),
    ],
    ids=["not known", "as slow", "quicker", "one computes"],
)
def test_several_that_wait_for_their_loaders_are_no_stragglers_where_the_others_may_be_as_slow(
    others_us: float | None, causes: tuple[str, ...], rule: str
) -> None:
    """Ranks 0 and 2 wait 20 ms of each step of 100 for their batches, and the others for them."""
    late = StragglerRow(
        rank=0, cause="dataloader", lost_us=20_000, confidence="low", steps=(1, 2, 3), share_of_steps=1.0,
        scope="ranks", ranks=(0, 2), causes=causes, alone_us=(0.0, 0.0), adds_us=(10_000.0, 10_000.0),
    )  # fmt: skip
    waits = [20_000.0 if rank in (0, 2) else 0.0 for rank in range(4)]
    ranks = [breakdown(rank, idle_dataloader=us) for rank, us in enumerate(waits)]
    rows = tuple(
        DataLoaderRow(rank=rank, wait_us=us, blocking_us=us, batch_us=50e3 if us else others_us, num_workers=None)
        for rank, us in enumerate(waits)
    )
    found = evaluate(context(*ranks, dataloader=rows, stragglers=(late,)))
    assert found[0].rule == rule


@pytest.mark.parametrize(
    ("settings", "typed"),
    [
        ({}, "DataLoader(dataset, num_workers=4, persistent_workers=True)"),
        ({"transformers": {"bf16": True}}, "--dataloader_num_workers 4 --dataloader_persistent_workers True"),
        ({"megatron": {"bf16": True}}, "--num-workers 4"),
        ({"lightning": {"precision": "bf16-mixed"}}, "DataLoader(dataset, num_workers=4, persistent_workers=True)"),
    ],
)
def test_the_framework_s_own_words(settings, typed):
    # Loading takes 80 ms, the rest of the step 20 ms: 4 workers finish a batch every 20 ms.
    row = DataLoaderRow(rank=0, wait_us=80_000.0, blocking_us=80_000.0, batch_us=80_000.0, num_workers=0)
    finding = dataloader_workers.evaluate(
        context(breakdown(0, idle_dataloader=80_000.0), dataloader=(row,), runs=runs(1, **settings))
    )
    assert finding is not None
    assert typed in finding.action.how


def loading(
    batch_ms: float, cpu_ms: float, *, cores: int, predicted_ms: float | None = None, waited_ms: float = 0.0
) -> Finding | None:
    """Two ranks that load a batch for ``batch_ms`` of each step of 100 ms, ``cpu_ms`` of a core in all, and compute for
    the rest, ``waited_ms`` of a step without a core.
    """
    load = DataLoaderMetadata(timed_batches=1, load_ns=round(batch_ms * 1e6), load_cpu_ns=round(cpu_ms * 1e6))
    used = round((100 - batch_ms + cpu_ms) * 1e6)
    cpu = CpuMetadata(
        cores="0-7", steps=1, wall_ns=100_000_000, process_ns=used, thread_ns=used, waited_ns=round(waited_ms * 1e6)
    )
    known = {
        rank: RunMetadata(
            rank=rank, host="a", cpu_count=cores, local_world_size=2, cpu_threads=1, cpu=cpu, dataloaders=(load,)
        )
        for rank in (0, 1)
    }
    us = batch_ms * 1e3
    rows = tuple(DataLoaderRow(rank=rank, wait_us=us, blocking_us=us, batch_us=us, num_workers=0) for rank in (0, 1))
    predict = None if predicted_ms is None else lambda settings: Prediction(low=0, mid=predicted_ms * 1e3, high=1e6)
    breakdowns = (breakdown(0, idle_dataloader=us), breakdown(1, idle_dataloader=us))
    return dataloader_workers.evaluate(context(*breakdowns, dataloader=rows, runs=known, predict=predict))


def test_cores_that_are_busy_with_training_leave_none_for_workers():
    found = loading(30, 30, cores=2)
    assert found is not None
    assert found.title.endswith("and the cores are the limit")
    assert (found.action.old, found.action.new) == ("0", "0")
    assert "The one core that each rank has is the limit, not the number of workers" in found.action.how
    assert "num_workers" not in found.action.how
    assert found.whatif == {}
    # Loading that costs nothing would end the stall.
    assert found.ceiling == pytest.approx(100 / 70 - 1)
    values = {evidence.what: evidence.value for evidence in found.evidence}
    assert values["CPU time to load one batch"] == pytest.approx(30_000)
    assert values["CPU time of the rest of a step"] == pytest.approx(70_000)


def test_with_a_core_to_spare_workers_are_asked_for():
    found = loading(30, 30, cores=4)
    assert found is not None
    assert (found.action.new, found.whatif) == ("1", {"dataloader.num_workers": "1"})
    assert "limit" not in found.title


def test_workers_that_wait_may_be_more_than_the_cores():
    found = loading(80, 0.5, cores=2)
    assert found is not None
    assert found.action.new == "4", "a batch every 20 ms, from one core"
    assert "all that the cores allow" not in found.action.how


def test_what_is_replayed_decides_whether_workers_help():
    for little in (97, 93):  # of a stall of 30 ms
        found = loading(30, 15, cores=2, predicted_ms=little)
        assert found is not None
        assert found.whatif == {}
    found = loading(30, 15, cores=2, predicted_ms=87)
    assert found is not None
    assert found.whatif == {"dataloader.num_workers": "1"}
    assert found.ceiling == pytest.approx(100 / 87 - 1)


@pytest.mark.parametrize(("waited_ms", "confidence"), [(0, Confidence.HIGH), (60, Confidence.MEDIUM)])
def test_other_processes_on_the_cores_make_it_less_sure(waited_ms, confidence):
    found = loading(80, 0.5, cores=2, waited_ms=waited_ms)
    assert found is not None
    assert found.confidence is confidence


def test_workers_that_load_several_batches_for_a_step(tmp_path):
    # The simulated worker loads 4 batches of 20 ms for each step; the device needs some 44 ms for them.
    spec = JobSpec(ranks=2, steps=6, microbatches=4, loader=LoaderSpec(workers=1, load_ns=20 * MS), end_sync=True)
    analyzed = analyze(spec, tmp_path).context
    job = context_of(str(tmp_path))
    known = {rank: RunMetadata(rank=rank, dataloaders=(DataLoaderMetadata(num_workers=1),)) for rank in (0, 1)}
    rows = dataloader_rows(job.result, known)
    assert [row.batches_per_step for row in rows] == [4.0, 4.0]
    assert [row.batch_us for row in rows] == pytest.approx([20_000, 20_000], rel=0.05)
    finding = dataloader_workers.evaluate(changed(analyzed, dataloader=rows, runs=known))
    assert finding is not None
    with_them = replace(spec, loader=replace(spec.loader, workers=int(finding.action.new)))
    took_us = step_time_ns(with_them) / 1e3
    assert took_us < 0.6 * analyzed.step_time_us
    assert finding.ceiling == pytest.approx(analyzed.step_time_us / took_us - 1, rel=0.05)


@pytest.mark.parametrize(("others_us", "told"), [(0.0, True), (30_000.0, False)])
def test_ranks_whose_batches_were_ready_are_told_to_change_theirs_too(others_us, told):
    """All loaders may be as slow; those of ranks that wait for the others load meanwhile."""
    waits = {0: 40_000.0, 1: 40_000.0, 2: 40_000.0, 3: others_us, 4: others_us}
    rows = tuple(
        DataLoaderRow(rank=rank, wait_us=us, blocking_us=us, batch_us=None, num_workers=None)
        for rank, us in waits.items()
    )
    case = context(*(breakdown(rank, idle_dataloader=us) for rank, us in waits.items()), dataloader=rows)
    finding = dataloader_workers.evaluate(case)
    assert ("Ranks 3, 4 had batches ready" in finding.action.how) is told


@pytest.mark.parametrize(
    ("batch_us", "waited", "said"), [(2_000.0, 0.3, False), (2_000.0, 0.05, True), (80_000.0, 0.3, True)]
)
def test_idle_workers_of_ranks_that_wait_for_cores_are_not_too_few(batch_us: float, waited: float, said: bool) -> None:
    """12 of 100 ms are spent in a loader whose worker loads for 2 ms, or for 80, per step."""
    cpu = CpuMetadata(steps=8, wall_ns=800 * MS, thread_ns=400 * MS, waited_ns=round(waited * 800 * MS))
    run = RunMetadata(rank=0, cpu=cpu, cpu_count=16, local_world_size=1)
    job = changed(starved(12_000, workers=1, batch_us=batch_us), runs={0: run}, devices=("CPU",))
    assert (dataloader_workers.evaluate(job) is not None) is said
