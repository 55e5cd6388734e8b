"""What is no longer sent takes no cores from the training threads: how far that goes into a prediction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perfscope.analyzers.job.cores import SharedCores
from perfscope.analyzers.whatif.predict import WhatIfAnswer, predict
from perfscope.analyzers.whatif.ranges import RankWork, least_computed_ns, least_run_ns
from perfscope.analyzers.whatif.whatif import context_of
from perfscope.recording.metadata import CpuMetadata, RunMetadata
from tests.generator import MS, US, JobSpec, NetworkSpec, Pause, ReduceEachMicrobatch, cpu_job, simulate, step_time_ns

CPUS = cpu_job(ranks=2, steps=6, microbatches=4, causes=(ReduceEachMicrobatch(),))
DEVICES = JobSpec(ranks=2, steps=6, end_sync=True, microbatches=4, causes=(ReduceEachMicrobatch(),))
STEPS = 8
NO_SYNC = {"ddp.no_sync": "true"}


def run_of(rank: int, waited_ns: int | None, others_ns: int, threads: int = 1) -> RunMetadata:
    """A rank whose training thread waited that long for a core in each step, while others computed for that long."""
    thread_ns = 10 * MS * STEPS
    cpu = CpuMetadata(
        cores="0-1", steps=STEPS, thread_ns=thread_ns, process_ns=thread_ns + others_ns * STEPS,
        waited_ns=None if waited_ns is None else waited_ns * STEPS,
    )  # fmt: skip
    return RunMetadata(rank=rank, world_size=2, local_world_size=2, cpu_count=2, cpu_threads=threads, cpu=cpu)


def answers(spec: JobSpec, folder: Path, *runs: RunMetadata) -> tuple[WhatIfAnswer, WhatIfAnswer]:
    """(with what these ranks recorded, without)."""
    simulate(spec).write(folder)
    context = context_of(folder)
    with_cpu = replace(context, runs={run.rank: run for run in runs})
    return predict(with_cpu, NO_SYNC), predict(replace(context, runs={}), NO_SYNC)


@pytest.mark.parametrize(
    ("runs", "freed_ns"),
    [
        # Of four rounds of reductions three go, and with them up to three quarters of the waits.
        pytest.param([(800 * US, 900 * US), (800 * US, 900 * US)], 600 * US, id="waits"),
        pytest.param([(5000 * US, 800 * US), (5000 * US, 800 * US)], 600 * US, id="no more than others computed"),
        pytest.param([(800 * US, 900 * US), (400 * US, 900 * US)], 300 * US, id="the rank that waited least"),
        pytest.param([(800 * US, 900 * US), (None, 900 * US)], 0, id="not known of one"),
        pytest.param([(800 * US, 900 * US, 4), (800 * US, 900 * US, 4)], 0, id="threads of operators"),
    ],
)
def test_half_of_the_waits_for_cores_is_predicted_to_go(
    runs: list[tuple[int | None, int]], freed_ns: int, tmp_path: Path
) -> None:
    found, without = answers(CPUS, tmp_path, *(run_of(rank, *run) for rank, run in enumerate(runs)))
    assert without.mid_ns - found.mid_ns == pytest.approx(freed_ns / 2, rel=0.05)
    assert without.low_ns - found.low_ns == pytest.approx(freed_ns, rel=0.05)
    assert found.high_ns == without.high_ns


def test_devices_sum_what_they_send_themselves(tmp_path: Path) -> None:
    found, without = answers(DEVICES, tmp_path, run_of(0, 800 * US, 900 * US), run_of(1, 800 * US, 900 * US))
    assert found.mid_ns == without.mid_ns


def test_a_step_is_no_shorter_than_what_its_training_threads_run(tmp_path: Path) -> None:
    """Rank 1 sleeps for most of the step. At its peers' pace the step takes at least what rank 0 runs, less a tenth."""
    spec = cpu_job(ranks=2, steps=6, causes=(Pause(ranks=(1,), pause_ns=100 * MS),))
    simulate(spec).write(tmp_path)
    context = context_of(tmp_path)
    runs_for = round(0.97 * step_time_ns(replace(spec, causes=())))

    def found(thread_ns: int, steps: int = 6, threads: int = 1) -> WhatIfAnswer:
        run = run_of(0, 0, 0, threads)
        assert run.cpu is not None
        cpu = replace(run.cpu, steps=steps, thread_ns=thread_ns * steps)
        return predict(replace(context, runs={0: replace(run, cpu=cpu)}), {"rank.1": "peers"})

    unknown = predict(replace(context, runs={}), {"rank.1": "peers"})
    assert found(runs_for).low_ns >= 0.9 * runs_for
    assert found(runs_for // 4).low_ns == unknown.low_ns
    assert found(20 * runs_for, steps=8).low_ns == unknown.low_ns, "some of the captured steps were left out"
    assert found(20 * runs_for, threads=2).low_ns == unknown.low_ns, "threads of operators wait for one another"


def test_what_is_run_counts_as_far_as_no_change_can_have_taken_it(tmp_path: Path) -> None:
    """9 ms of CPU time in each of 6 steps. A change takes 2 ms from the rank's own time; or a collective, of which
    nobody knows what CPU time it took.
    """
    simulate(cpu_job(ranks=2, steps=6)).write(tmp_path)
    context = context_of(tmp_path)
    run = run_of(0, 0, 0)
    assert run.cpu is not None
    run = replace(run, cpu=replace(run.cpu, steps=6, thread_ns=9 * MS * 6))
    context = replace(context, runs={0: run})
    before = {rank: RankWork(40 * MS * 6, 12) for rank in (0, 1)}
    correction = max(context.correction, 1.0)
    for after, least_ms in (
        (RankWork(40 * MS * 6, 12), 8.1),
        (RankWork(38 * MS * 6, 12), 6.1),
        (RankWork(40 * MS * 6, 11), 0),
    ):
        found = least_run_ns(before, dict.fromkeys((0, 1), after), context)
        assert found * correction == pytest.approx(least_ms * MS)


def test_what_is_added_to_computing_takes_none_of_it_away(tmp_path: Path) -> None:
    """Ranks compute 30 ms in 6 steps. One flat all-reduce of all gradients adds to that."""
    simulate(cpu_job(ranks=2, steps=6)).write(tmp_path)
    context = replace(context_of(tmp_path), runs={})
    before = {0: 30.0 * MS, 1: 30.0 * MS}
    same = least_computed_ns(before, before, context, 0.0)
    assert 0.8 * 5 * MS < same < 5 * MS
    assert least_computed_ns(before, {0: 36.0 * MS, 1: 36.0 * MS}, context, 0.0) == same
    assert least_computed_ns(before, {0: 24.0 * MS, 1: 24.0 * MS}, context, 0.0) == 0


@pytest.mark.parametrize(("idle", "most_saved"), [(0.0, 0.0), (0.1, 0.1), (1.0, 1.0)])
def test_waits_that_end_make_a_step_shorter_by_what_cores_were_idle(
    idle: float, most_saved: float, tmp_path: Path
) -> None:
    """With a network that takes no time both ranks only compute, as much as before. Of a core that both have, this
    share was idle: no more of the step is saved, however much the transfers took.
    """
    simulate(cpu_job(ranks=2, steps=6, network=NetworkSpec(busbw_gbps=0.05))).write(tmp_path)
    context, faster = replace(context_of(tmp_path), runs={}), {"network.bandwidth": "1000x"}
    alone = predict(context, faster)
    found = predict(replace(context, shared_cores=(SharedCores((0, 1), 1.0, idle),)), faster)
    assert alone.mid_ns < 0.85 * alone.measured_ns
    assert found.mid_ns == pytest.approx(max(alone.mid_ns, (1 - most_saved) * alone.measured_ns))
    assert found.low_ns == pytest.approx(alone.low_ns, rel=0.02), "others may leave the cores to the job"
    assert found.high_ns >= found.mid_ns
