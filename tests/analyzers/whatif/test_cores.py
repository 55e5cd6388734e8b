"""Predictions that depend on cores: loader workers that compute, and threads that operators are spread over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perfscope.analyzers.whatif.change import BadSetting, CannotReplay, Context
from perfscope.analyzers.whatif.predict import WhatIfAnswer, predict
from perfscope.analyzers.whatif.whatif import context_of
from perfscope.recording.metadata import CpuMetadata, DataLoaderMetadata, RunMetadata
from perfscope.results.categories import TimeCategory
from tests.generator import MS, JobSpec, LoaderSpec, ModelSpec, cpu_job, simulate

THREADS = "env.OMP_NUM_THREADS"
WORKERS = "dataloader.num_workers"


@pytest.fixture(scope="module")
def loading(tmp_path_factory: pytest.TempPathFactory) -> Context:
    """Two ranks without workers that load for 8 ms per batch."""
    folder = tmp_path_factory.mktemp("loading")
    loader = LoaderSpec(workers=0, load_ns=8 * MS)
    simulate(JobSpec(ranks=2, model=ModelSpec(layers=12, tokens=2048), loader=loader, end_sync=True)).write(folder)
    return context_of(folder)


@pytest.fixture(scope="module")
def healthy(samples: Path) -> Context:
    """Two ranks on CPUs, of one thread each on two cores."""
    return context_of(samples / "healthy")


def with_runs(context: Context, **changes: Any) -> Context:
    """The recording as if its ranks had written ``changes``."""
    runs = {
        rank: replace(context.runs.get(rank, RunMetadata(rank=rank)), **{"host": "a", "local_world_size": 2, **changes})
        for rank in context.result.partials
    }
    return replace(context, runs=runs)


def computing(context: Context, *, cores: int, load_ms: float, train_ms: float, **changes: Any) -> Context:
    """With CPU time: of loading a batch, and of the rest of a step."""
    load = DataLoaderMetadata(
        timed_batches=10, load_ns=80 * MS, load_cpu_ns=round(10 * load_ms * MS),
        load_process_cpu_ns=round(10 * load_ms * MS),
    )  # fmt: skip
    used = round(10 * (load_ms + train_ms) * MS)
    cpu = CpuMetadata(
        cores="0", steps=10, wall_ns=10 * MS, process_ns=used, thread_ns=used, waited_ns=changes.pop("waited_ns", 0)
    )
    return with_runs(context, cpu_count=cores, cpu_threads=1, cpu=cpu, dataloaders=(load,))


def workers(context: Context, number: int = 1) -> WhatIfAnswer:
    return predict(context, {WORKERS: str(number)})


def rest_ms(context: Context) -> float:
    """Of the slower rank's step, without the loader."""
    return max(
        (context.result.step_ns - float(context.result.totals[r][:, TimeCategory.DATALOADER].mean())) / 1e6
        for r in (0, 1)
    )


def test_a_rank_that_slept_wants_a_core_once_it_does_not(samples: Path) -> None:
    """Rank 1 of three sleeps in its forward. At its peers' pace all three compute at once, on one core."""
    context = context_of(samples / "slow_rank")
    asked = {"rank.1": "peers"}
    free = predict(context, asked)
    for cpu_ms, cores in ((30.0, 1), (30.0, 8)):
        steps = len(context.result.steps)
        used = round(steps * cpu_ms * MS)
        cpu = CpuMetadata(
            cores="0", steps=steps, wall_ns=steps * 130 * MS, process_ns=used, thread_ns=used, waited_ns=0
        )
        runs = {
            rank: replace(run, host="a", local_world_size=3, cpu_count=cores, cpu_threads=1, cpu=cpu)
            for rank, run in context.runs.items()
        }
        found = predict(replace(context, runs=runs), asked)
        share = min(found.measured_ns / context.result.step_ns, 1.0)
        assert found.mid_ns >= 3 * cpu_ms * MS * share / cores - 1
        assert found.mid_ns == pytest.approx(max(free.mid_ns, 3 * cpu_ms * MS * share / cores), rel=0.05)


class TestWorkers:
    def test_loading_that_waits_needs_no_core(self, loading: Context) -> None:
        found = workers(computing(loading, cores=2, load_ms=0.1, train_ms=2.0))
        unknown = workers(with_runs(loading, cpu_count=2, cpu_threads=1, dataloaders=(DataLoaderMetadata(),)))
        assert found.mid_ns == pytest.approx(unknown.mid_ns, rel=0.02)
        assert found.high_ns - found.mid_ns < 0.2 * (found.measured_ns - found.mid_ns)
        assert unknown.high_ns > unknown.measured_ns, "where nothing is known, it may as well compute"

    def test_loading_that_computes_has_no_core_left(self, loading: Context) -> None:
        rest = rest_ms(loading)
        found = workers(computing(loading, cores=2, load_ms=8.0, train_ms=rest))
        assert found.mid_ns == pytest.approx(found.measured_ns, rel=0.03)

    def test_with_a_core_for_every_worker_it_helps(self, loading: Context) -> None:
        rest = rest_ms(loading)
        found = workers(computing(loading, cores=8, load_ms=8.0, train_ms=rest))
        assert found.mid_ns < 0.85 * found.measured_ns
        assert found.high_ns < found.measured_ns

    def test_a_training_that_waits_half_of_the_time_leaves_half_a_core(self, loading: Context) -> None:
        rest = rest_ms(loading)
        busy, half, idle = (
            workers(computing(loading, cores=2, load_ms=4.0, train_ms=share * rest)) for share in (1.0, 0.5, 0.01)
        )
        assert idle.mid_ns < half.mid_ns < busy.mid_ns
        assert half.low_ns <= idle.mid_ns * 1.02
        assert half.high_ns >= busy.mid_ns * 0.98

    def test_what_others_leave_of_the_cores_counts(self, loading: Context) -> None:
        """Both cores are half another job's: the CPU time of a step takes twice as long, now as then."""
        rest = rest_ms(loading)
        halved = {"cores": 2, "load_ms": 4.0, "train_ms": rest / 2}
        alone, beside = (
            workers(computing(loading, waited_ns=waited, **halved)) for waited in (0, round(10 * (4.0 + rest / 2) * MS))
        )
        assert beside.mid_ns > 1.2 * alone.mid_ns
        assert beside.mid_ns == pytest.approx(beside.measured_ns, rel=0.05)
        assert beside.low_ns <= alone.mid_ns

    def test_more_workers_are_no_more_cores(self, loading: Context) -> None:
        context = computing(loading, cores=2, load_ms=8.0, train_ms=rest_ms(loading))
        assert workers(context, 4).mid_ns == pytest.approx(workers(context, 1).mid_ns, rel=0.02)


@pytest.mark.parametrize(
    ("fetch", "waits", "half"),
    [(1.0, 0.5, True), (0.7, 0.5, False), (1.0, 0.0, False)],
    ids=["workers take the whole step", "workers are quicker", "no thread waits for a core"],
)
def test_waits_for_cores_that_hide_waits_for_batches_are_in_the_range(
    fetch: float, waits: float, half: bool, tmp_path: Path
) -> None:
    """One worker takes a share of the step for its batch, of half of which the training thread waits for a core and no
    longer for the batch. With a core at once, and a second worker, the step takes half as long; how much of the wait is
    hidden the recording does not tell.
    """
    simulate(cpu_job(ranks=2)).write(tmp_path)
    context = context_of(tmp_path)
    step_ns = context.result.step_ns
    loader = DataLoaderMetadata(
        num_workers=1, timed_batches=10, load_ns=10, load_cpu_ns=10, load_process_cpu_ns=10, fetched_batches=10,
        fetch_ns=round(10 * fetch * step_ns),
    )  # fmt: skip
    ran, waited = (round(10 * share * step_ns) for share in (0.4, waits))
    cpu = CpuMetadata(
        cores="0-7", steps=10, wall_ns=round(10 * step_ns), process_ns=ran, thread_ns=ran, waited_ns=waited
    )
    found = workers(with_runs(context, cpu_count=8, cpu_threads=1, cpu=cpu, dataloaders=(loader,)), 2)
    assert found.mid_ns > 0.8 * step_ns
    assert (found.low_ns <= 0.5 * step_ns) is half
    assert half or found.low_ns > 0.8 * step_ns


def crowded(context: Context, *, threads: int, count: int = 2, spinning: float = 0.0, share: float = 0.5) -> Context:
    """With so many threads per rank: the training thread had a core for ``share`` of the time it wanted one."""
    step = context.result.step_ns
    thread_ns = round(10 * share * step)
    cpu = CpuMetadata(
        cores="0-1", steps=10, wall_ns=round(10 * step), thread_ns=thread_ns,
        process_ns=round(thread_ns * (1 + spinning)), waited_ns=round(thread_ns * (1 / share - 1)),
    )  # fmt: skip
    return with_runs(context, cpu_count=count, cpu_threads=threads, cpu=cpu)


def asked(context: Context, number: int | str) -> WhatIfAnswer:
    return predict(context, {THREADS: str(number)})


class TestThreads:
    def test_threads_that_fit_share_what_can_be_shared(self, healthy: Context) -> None:
        context = crowded(healthy, threads=1, count=16, share=1.0)
        one, two, eight = asked(context, 1), asked(context, 2), asked(context, 8)
        assert one.mid_ns == pytest.approx(one.measured_ns)
        assert one.measured_ns > two.mid_ns > eight.mid_ns
        assert two.high_ns >= two.measured_ns, "more threads may bring nothing"
        # No more than the operators' own time can be saved, and of that at most 7 of 8.
        compute = max(
            float(healthy.result.totals[rank][:, TimeCategory.COMPUTE].mean()) for rank in healthy.result.totals
        )
        assert eight.measured_ns - eight.mid_ns <= 7 / 8 * compute

    def test_fewer_threads_on_cores_that_are_there_cost(self, healthy: Context) -> None:
        context = crowded(healthy, threads=8, count=16, share=1.0)
        found = asked(context, 1)
        assert found.mid_ns > found.measured_ns
        assert found.low_ns <= found.measured_ns

    def test_threads_that_spin_beside_each_other_are_relieved(self, healthy: Context) -> None:
        """Four threads that always want one of two cores, half of the time: of what they use little is work."""
        found = asked(crowded(healthy, threads=2, spinning=1.0), 1)
        quickest = {rank: partial.tables.quickest for rank, partial in healthy.result.partials.items()}
        works = max(float((each.spread_ns + each.alone_ns).mean()) for each in quickest.values())
        assert found.mid_ns > works
        assert found.low_ns < found.mid_ns < found.high_ns
        # The same with twice the CPU time per rank: one that does not wait takes less.
        assert found.mid_ns != pytest.approx(found.measured_ns, rel=0.01)

    def test_the_more_threads_share_a_core_the_less_may_be_work(self, healthy: Context) -> None:
        """Of eight threads on a core even the quickest call of an operator may be mostly waiting for one another."""
        few, many = (asked(crowded(healthy, threads=threads), 1) for threads in (2, 16))
        assert many.mid_ns < few.mid_ns
        assert many.low_ns < 0.3 * many.mid_ns
        assert 0 < many.low_ns < few.low_ns
        assert many.high_ns < 2 * many.mid_ns

    def test_more_threads_than_cores_are_refused(self, healthy: Context) -> None:
        with pytest.raises(CannotReplay, match="2 threads per rank would compete for the 1 core"):
            asked(crowded(healthy, threads=1, share=1.0), 2)

    def test_more_threads_beside_other_processes_are_refused(self, healthy: Context) -> None:
        with pytest.raises(CannotReplay, match="waited for a core 50% of the time"):
            asked(crowded(healthy, threads=1, count=16, share=0.5), 2)

    def test_what_is_not_recorded_is_reported(self, healthy: Context) -> None:
        with pytest.raises(CannotReplay, match="record it again with perfscope run"):
            asked(with_runs(healthy, cpu=None), 1)

    def test_a_device_s_job_is_refused(self, loading: Context) -> None:
        with pytest.raises(CannotReplay, match="computes on devices"):
            asked(loading, 1)

    @pytest.mark.parametrize("value", ["0", "-1", "many", "1.5"])
    def test_values(self, healthy: Context, value: str) -> None:
        with pytest.raises(BadSetting, match="a number of threads"):
            asked(healthy, value)
