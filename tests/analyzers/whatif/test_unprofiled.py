"""Predictions of steps without the profiler, from recordings in which it costs the host time for every event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perfscope.analyzers.job.asleep import asleep_shares
from perfscope.analyzers.job.unprofiled import LongStepShare
from perfscope.analyzers.whatif.change import Context
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.unprofiled import _slower, _solve, _work_slower, quickest_ns
from perfscope.analyzers.whatif.whatif import context_of
from perfscope.recording.metadata import CpuMetadata, DataLoaderMetadata, RunMetadata
from perfscope.results.categories import TimeCategory
from tests.generator import (
    MS,
    US,
    HostSpec,
    JobSpec,
    LoaderSpec,
    ModelSpec,
    NetworkSpec,
    Pause,
    ReduceEachMicrobatch,
    SlowCompute,
    cpu_job,
    simulate,
    step_time_ns,
)

PER_EVENT_NS = 4 * US

CPUS = cpu_job(ranks=2, steps=6)
LAUNCHING = JobSpec(
    ranks=2, steps=6, end_sync=True, model=ModelSpec(layers=12, tokens=1024, width=512, hidden=1024),
    host=HostSpec(operator_ns=20 * US), network=NetworkSpec(busbw_gbps=200.0, alpha_ns=15 * US),
)  # fmt: skip
COMPUTING = JobSpec(ranks=2, steps=6, end_sync=True, model=ModelSpec(layers=8, tokens=16384))


def profiled(spec: JobSpec) -> JobSpec:
    """The job with a profiler that makes every operator and every launch take longer."""
    host = spec.host
    return replace(
        spec,
        host=replace(host, operator_ns=host.operator_ns + PER_EVENT_NS, launch_ns=host.launch_ns + PER_EVENT_NS),
    )


def recorded(spec: JobSpec, folder: Path) -> Context:
    """The recording of the profiled job, with its unprofiled steps timed."""
    simulate(profiled(spec)).write(folder)
    return replace(context_of(folder), unprofiled_ns=step_time_ns(spec))


@pytest.mark.parametrize("spec", [CPUS, LAUNCHING, COMPUTING], ids=["CPUs", "launch-bound", "busy devices"])
def test_without_a_change_the_step_is_the_unprofiled_one(spec: JobSpec, tmp_path: Path) -> None:
    found = predict(recorded(spec, tmp_path), {})
    assert found.mid_ns == pytest.approx(step_time_ns(spec), rel=0.005)
    assert found.profiled_ns == pytest.approx(step_time_ns(profiled(spec)), rel=0.005)


def slow(spec: JobSpec) -> JobSpec:
    return replace(spec, causes=(SlowCompute(ranks=(1,), factor=1.5),))


def wider(spec: JobSpec) -> JobSpec:
    return replace(spec, network=replace(spec.network, busbw_gbps=4 * spec.network.busbw_gbps))


@pytest.mark.parametrize(
    ("spec", "setting", "value", "changed"),
    [
        pytest.param(slow(CPUS), "rank.1", "peers", CPUS, id="a slow rank on CPUs"),
        pytest.param(slow(COMPUTING), "rank.1", "peers", COMPUTING, id="a slow rank with a busy device"),
        pytest.param(CPUS, "network.bandwidth", "4x", wider(CPUS), id="a network between CPUs"),
    ],
)
def test_predictions_hold_for_the_job_without_the_profiler(
    spec: JobSpec, setting: str, value: str, changed: JobSpec, tmp_path: Path
) -> None:
    truth = step_time_ns(changed)
    found = predict(recorded(spec, tmp_path), {setting: value})
    assert found.mid_ns == pytest.approx(truth, rel=0.03)
    assert found.low_ns <= truth <= found.high_ns


WAITING = cpu_job(
    ranks=2, steps=6, microbatches=4, causes=(ReduceEachMicrobatch(),),
    model=replace(CPUS.model, tokens=128), network=replace(CPUS.network, alpha_ns=1000 * US),
)  # fmt: skip
"""Ranks wait for transfers, and some of what their operators take is hidden behind those."""


def slowed_alike(spec: JobSpec, transfers: float) -> JobSpec:
    """Under a profiler that makes every operator and launch 20 µs longer, and transfers by this share."""
    host, network = spec.host, spec.network
    return replace(
        spec,
        host=replace(host, operator_ns=host.operator_ns + 20 * US, launch_ns=host.launch_ns + 20 * US),
        network=replace(
            network,
            alpha_ns=round(network.alpha_ns * (1 + transfers)),
            busbw_gbps=network.busbw_gbps / (1 + transfers),
        ),
    )


@pytest.mark.parametrize("transfers", [0.0, 0.2, 0.4])
def test_on_cpus_the_profiler_may_have_slowed_down_transfers_too(transfers: float, tmp_path: Path) -> None:
    simulate(slowed_alike(WAITING, transfers)).write(tmp_path)
    job = replace(context_of(tmp_path), unprofiled_ns=step_time_ns(WAITING))
    truth = step_time_ns(replace(WAITING, causes=()))
    found = predict(job, {"ddp.no_sync": "true"})
    assert found.low_ns <= truth <= found.high_ns
    # The likely cost: what the step became longer by, over the events in it.
    likely = job.profiler
    assert likely is not None
    whole, none = (each.profiler for each in job.with_other_costs)
    assert whole is not None
    assert none is not None
    assert whole.event_ns >= likely.event_ns > none.event_ns == 0
    events = likely.of_step(job.result, 0) / likely.event_ns
    most = float(found.profiled_ns or 0) - found.measured_ns
    assert likely.event_ns * events == pytest.approx(min(most, whole.event_ns * events), rel=0.02)


def test_on_devices_nothing_else_is_slowed_down(tmp_path: Path) -> None:
    assert recorded(LAUNCHING, tmp_path).with_other_costs == []


def test_the_cost_of_an_event_is_the_profilers(tmp_path: Path) -> None:
    """The autograd wrappers and annotations are events too, which the simulated profiler makes no longer."""
    profiler = recorded(CPUS, tmp_path).profiler
    assert profiler is not None
    assert 0.3 * PER_EVENT_NS < profiler.event_ns < PER_EVENT_NS


@pytest.mark.parametrize(
    ("step_at", "target", "cost"),
    [
        (lambda each: 100 - 10 * each, 80, 2.0),
        # A step that stops getting shorter, and one that was longer without the profiler.
        (lambda each: max(100 - 10 * each, 90), 80, 2.0),
        (lambda each: 100 - 10 * each, 120, 0.0),
        (lambda each: 100, 80, 0.0),
    ],
)
def test_the_cost_is_found_along_its_slope(step_at: Callable[[float], float], target: float, cost: float) -> None:
    assert _solve(step_at, target, 10.0) == pytest.approx(cost)


@pytest.mark.parametrize("each", [1.0, 8.0])
def test_no_event_costs_more_than_the_quickest_take(each: float) -> None:
    """200 moments, one every 3 µs for each event at it, and 100 that take a millisecond."""
    took = np.concatenate((np.full(200, 3 * US * each), np.full(100, 1 * MS)))
    assert quickest_ns(np.cumsum(took).astype(np.int64), each) == pytest.approx(3 * US)


def test_the_most_that_an_event_costs_is_not_known_of_few_events_and_of_slow_ones() -> None:
    assert quickest_ns(np.arange(10) * 3 * US, 1.0) == 20 * US
    assert quickest_ns(np.arange(1000) * MS, 1.0) == 20 * US


LOAD_NS = 12 * MS
LOADING = replace(CPUS, loader=LoaderSpec(workers=0, load_ns=LOAD_NS))
"""Half of a step is spent in a loader that waits for something."""


def slower_work(spec: JobSpec, times: float) -> JobSpec:
    """All that computes or sends takes that many times as long, as where something else has a part of the cores."""
    model, host, network = spec.model, spec.host, spec.network
    return replace(
        spec,
        model=replace(
            model,
            flops_per_ns=model.flops_per_ns / times,
            small_kernel_ns=round(model.small_kernel_ns * times),
            optimizer_kernel_ns=round(model.optimizer_kernel_ns * times),
        ),
        host=replace(host, operator_ns=round(host.operator_ns * times), python_ns=round(host.python_ns * times)),
        network=replace(network, alpha_ns=round(network.alpha_ns * times), busbw_gbps=network.busbw_gbps / times),
    )


def timed_runs(context: Context, asleep_ns: int, *, sending: bool = True) -> dict[int, RunMetadata]:
    """What ranks record that sleep so long in the loader of each step, on two cores each. ``sending``: threads compute
    for as long as transfers take; else these wait for the network.
    """
    transfers_ns = context.recorded.transfers_ns()
    steps, step_ns = len(context.result.steps), context.result.step_ns
    runs = {}
    for rank in context.result.partials:
        exposed_ns = float(
            context.result.totals[rank][:, [TimeCategory.COMM_WAIT, TimeCategory.COMM_TRANSFER]].sum(axis=1).mean()
        )
        busy_ns = round((step_ns - asleep_ns - exposed_ns) * steps)
        others_ns = round(transfers_ns[rank] * steps) if sending else 0
        cpu = CpuMetadata(
            cores="0-3", steps=steps, wall_ns=round(step_ns * steps), thread_ns=busy_ns,
            process_ns=busy_ns + others_ns, waited_ns=0,
        )  # fmt: skip
        loader = DataLoaderMetadata(
            num_workers=0, timed_batches=steps, load_ns=LOAD_NS * steps, load_cpu_ns=(LOAD_NS - asleep_ns) * steps,
            load_process_cpu_ns=(LOAD_NS - asleep_ns) * steps,
        )  # fmt: skip
        runs[rank] = RunMetadata(
            rank=rank, world_size=2, host="a", local_world_size=2, cpu_count=4, cpu_threads=1, cpu=cpu,
            dataloaders=(loader,),
        )  # fmt: skip
    return runs


@pytest.mark.parametrize("times", [1.3, 2.0])
def test_a_loader_that_sleeps_was_not_slowed_down(times: float, tmp_path: Path) -> None:
    simulate(slower_work(LOADING, times)).write(tmp_path)
    context = context_of(tmp_path)
    job = replace(context, runs=timed_runs(context, LOAD_NS), unprofiled_ns=step_time_ns(LOADING))
    assert predict(job, {}).mid_ns == pytest.approx(step_time_ns(LOADING), rel=0.005)
    found = predict(job, {"dataloader.num_workers": "1"})
    truth = step_time_ns(replace(LOADING, loader=LoaderSpec(workers=1, load_ns=LOAD_NS)))
    assert found.mid_ns == pytest.approx(truth, rel=0.03)
    assert found.low_ns <= truth <= found.high_ns
    assert found.high_ns - found.low_ns < 0.35 * truth


def test_the_cpu_time_of_the_profiler_is_not_needed_without_it(tmp_path: Path) -> None:
    """Of the 39 ms of CPU time in a profiled step, 7 are what 800 events cost."""
    spec = replace(LOADING, model=replace(CPUS.model, layers=48, tokens=32))
    simulate(slowed_alike(spec, 0.0)).write(tmp_path)
    context = context_of(tmp_path)
    job = replace(context, runs=timed_runs(context, LOAD_NS), unprofiled_ns=step_time_ns(spec))
    found = predict(job, {"dataloader.num_workers": "1"})
    truth = step_time_ns(replace(spec, loader=LoaderSpec(workers=1, load_ns=LOAD_NS)))
    assert found.mid_ns == pytest.approx(truth, rel=0.03)
    assert found.low_ns <= truth <= found.high_ns


def test_what_sleeps_is_what_no_cpu_time_and_no_communication_explain(tmp_path: Path) -> None:
    simulate(LOADING).write(tmp_path)
    context = context_of(tmp_path)
    runs = timed_runs(context, LOAD_NS // 2)
    (first, second) = asleep_shares(context.result, runs).values()
    assert first == second
    assert first == {TimeCategory.DATALOADER: pytest.approx(0.5, abs=0.02)}
    threaded = {rank: replace(run, cpu_threads=2) for rank, run in runs.items()}
    assert asleep_shares(context.result, threaded) == {}, "threads of operators wait for one another"
    unknown = {rank: replace(run, cpu=replace(run.cpu or CpuMetadata(), waited_ns=None)) for rank, run in runs.items()}
    assert asleep_shares(context.result, unknown) == {}
    assert asleep_shares(context.result, {}) == {}


SENDING = cpu_job(ranks=2, steps=6, network=replace(CPUS.network, alpha_ns=200 * US, busbw_gbps=1.0))
"""Half of a step is exposed transfers."""
DISTURBED = 2.5
"""Other programs on the cores made work take that many times as long in the recorded steps."""


def disturbed(spec: JobSpec, *, transfers: bool = False) -> JobSpec:
    slower = slower_work(spec, DISTURBED)
    return slower if transfers else replace(slower, network=spec.network)


@pytest.mark.parametrize("sending", [False, None], ids=["threads slept while they sent", "not known"])
@pytest.mark.parametrize(
    ("setting", "value", "network"),
    [
        ("network.bandwidth", "4x", replace(SENDING.network, busbw_gbps=4.0)),
        ("network.bandwidth", "0.5x", replace(SENDING.network, busbw_gbps=0.5)),
    ],
)
def test_other_programs_on_the_cores_do_not_slow_the_network_down(
    sending: bool | None, setting: str, value: str, network: NetworkSpec, tmp_path: Path
) -> None:
    """No event can cost what is missing, so all of it may have been of the work alone."""
    simulate(disturbed(SENDING)).write(tmp_path)
    context = context_of(tmp_path)
    runs = {} if sending is None else timed_runs(context, 0, sending=sending)
    job = replace(context, runs=runs, unprofiled_ns=step_time_ns(SENDING))
    found = predict(job, {setting: value})
    truth = step_time_ns(replace(SENDING, network=network))
    assert found.low_ns <= truth <= found.high_ns
    if sending is not None:
        assert found.mid_ns == pytest.approx(truth, rel=0.05)


def test_threads_that_send_are_slowed_down_with_the_rest(tmp_path: Path) -> None:
    simulate(disturbed(SENDING, transfers=True)).write(tmp_path)
    context = context_of(tmp_path)
    job = replace(context, runs=timed_runs(context, 0), unprofiled_ns=step_time_ns(SENDING))
    found = predict(job, {"network.bandwidth": "4x"})
    truth = step_time_ns(replace(SENDING, network=replace(SENDING.network, busbw_gbps=4.0)))
    assert found.mid_ns == pytest.approx(truth, rel=0.05)
    assert found.low_ns <= truth <= found.high_ns


def test_a_rank_that_sleeps_takes_its_peers_pace_without_what_was_slower(tmp_path: Path) -> None:
    """In the recorded steps work takes 2.5 times as long, and what one rank sleeps as long as ever: at its peers' pace
    all of that goes, and not the share that it has of the longer steps.
    """
    asleep_ns = round(step_time_ns(CPUS))
    spec = replace(CPUS, causes=(Pause(ranks=(1,), pause_ns=asleep_ns),))
    simulate(disturbed(spec, transfers=True)).write(tmp_path)
    context = context_of(tmp_path)
    runs = timed_runs(context, 0)
    cpu = runs[1].cpu
    assert cpu is not None
    less = asleep_ns * cpu.steps
    cpu = replace(cpu, thread_ns=cpu.thread_ns - less, process_ns=cpu.process_ns - less)
    runs[1] = replace(runs[1], cpu=cpu)
    job = replace(context, runs=runs, unprofiled_ns=step_time_ns(spec))
    found = predict(job, {"rank.1": "peers"})
    assert found.mid_ns == pytest.approx(step_time_ns(CPUS), rel=0.05)


@pytest.mark.parametrize("target", [100.0, 60.0, 45.0])
def test_how_much_slower_the_work_alone_became(target: float) -> None:
    """120 ms of work beside 40 of transfers, of which 20 are hidden behind work as long as there is as much."""
    found = _work_slower(lambda more: max(120 / (1 + more), 20) + 20, target)
    assert max(120 / (1 + found), 20) + 20 == pytest.approx(target, rel=0.01)


def test_work_is_not_slowed_down_without_end() -> None:
    assert _work_slower(lambda more: 120 / (1 + more) + 40, 50.0) == pytest.approx(4.0)


def test_how_much_slower_work_became_beside_what_sleeps() -> None:
    """30 ms of work and 70 asleep became 115: work took 1.5 times as long."""
    assert _slower(lambda more: 45 + 70 * (1 + more), 100.0) == pytest.approx(0.5)
    assert _slower(lambda more: 45.0, 30.0) == pytest.approx(0.5), "nothing sleeps"
    assert _slower(lambda more: 90.0, 100.0) == 0, "the profiled step was not longer"
    # More is said to sleep than the unprofiled step lasts: that cannot be, and work is not slowed down without end.
    assert _slower(lambda more: 50 + 150 * (1 + more), 100.0) == pytest.approx(1.0)


@pytest.mark.parametrize("paused", [(3,), ()], ids=["recorded", "not recorded"])
def test_a_pause_counts_as_often_as_the_unprofiled_steps_have_it(paused: tuple[int, ...], tmp_path: Path) -> None:
    """Rank 1 pauses in one of the 6 recorded steps, or in none, and in every 20th step."""
    healthy_ns, pause_ns = step_time_ns(CPUS), 10 * step_time_ns(CPUS)
    steps = tuple(CPUS.first_step + step for step in paused)
    pause = Pause(ranks=(1,), pause_ns=round(pause_ns), steps=steps)
    simulate(replace(CPUS, causes=(pause,))).write(tmp_path)
    context = context_of(tmp_path)
    recorded_ns = healthy_ns + len(paused) * pause_ns / CPUS.steps
    assert context.result.step_ns == pytest.approx(recorded_ns, rel=0.02)
    is_long = np.array([step in paused for step in range(CPUS.steps)])
    long = LongStepShare(recorded=is_long, share=0.05, longer_ns=pause_ns, step_ns=recorded_ns)
    context = replace(context, unprofiled_ns=recorded_ns, long_step_share=long)
    whole_ns = healthy_ns + 0.05 * pause_ns
    unchanged, wider = predict(context, {}), predict(context, {"network.bandwidth": "4x"})
    assert (unchanged.measured_ns, unchanged.mid_ns) == (pytest.approx(whole_ns), pytest.approx(whole_ns, rel=0.02))
    quicker_ns = simulate(replace(CPUS, network=replace(CPUS.network, busbw_gbps=4 * CPUS.network.busbw_gbps)))
    assert wider.mid_ns == pytest.approx(quicker_ns.truth.step_time_ns + 0.05 * pause_ns, rel=0.03)
    if paused:
        assert predict(context, {"rank.1": "peers"}).mid_ns == pytest.approx(healthy_ns, rel=0.03)
