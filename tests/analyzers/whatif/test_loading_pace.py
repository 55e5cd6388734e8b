"""Jobs whose loader workers set the pace: whatever else gets quicker, the step takes what the workers need."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from pathlib import Path

import numpy as np
import pytest

from perfscope.analyzers.job.aligned import align_job
from perfscope.analyzers.job.deliveries import _busy, _own_cost_ns, _turns, deliveries
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.replay.schedules import record_schedules
from perfscope.analyzers.whatif.change import Context
from perfscope.analyzers.whatif.predict import WhatIfAnswer, predict
from perfscope.analyzers.whatif.whatif import context_of
from perfscope.recording.metadata import DataLoaderMetadata, RunMetadata
from tests.analyzers.measured import advised, measured
from tests.emulator.changes import apply
from tests.emulator.draw import draw
from tests.emulator.emulate import emulate, step_ns
from tests.emulator.spec import Cause, Job, Loader, Model, Recording
from tests.generator import MS, US, JobSpec, LoaderSpec, ModelSpec, SlowCompute, cpu_job, simulate, step_time_ns
from tests.traces import TraceBuilder

pytestmark = pytest.mark.scale

MODEL = ModelSpec(layers=8, tokens=4096)
DEVICES = JobSpec(ranks=2, steps=8, warmup=6, model=MODEL, end_sync=True)
CPUS = cpu_job(ranks=2, steps=8)


def paced(spec: JobSpec, pace: float, workers: int, spread: float = 0.0) -> JobSpec:
    """The job with workers that take ``pace`` times as long for the batches of a step as the training does."""
    alone = step_time_ns(replace(spec, loader=LoaderSpec(load_ns=1 * US)))
    load_ns = round(pace * alone * workers / spec.microbatches)
    return replace(spec, loader=LoaderSpec(workers=workers, load_ns=load_ns, spread=spread))


def quicker(spec: JobSpec, times: float) -> JobSpec:
    model = spec.model
    return replace(
        spec,
        model=replace(
            model,
            flops_per_ns=model.flops_per_ns * times,
            small_kernel_ns=round(model.small_kernel_ns / times),
            optimizer_kernel_ns=round(model.optimizer_kernel_ns / times),
        ),
    )


def asked(spec: JobSpec, folder: Path, setting: str, value: str) -> WhatIfAnswer:
    simulate(spec).write(folder)
    return predict(context_of(folder), {setting: value})


@pytest.mark.parametrize(
    ("spec", "workers", "spread"),
    [
        pytest.param(DEVICES, 1, 0.0, id="one worker"),
        pytest.param(replace(DEVICES, steps=17), 4, 0.0, id="four workers"),
        pytest.param(replace(DEVICES, microbatches=4), 1, 0.0, id="four batches in a step"),
        pytest.param(replace(DEVICES, microbatches=2), 3, 0.0, id="two batches in a step, three workers"),
        pytest.param(DEVICES, 3, 0.2, id="batches that take unequally long"),
        pytest.param(replace(DEVICES, steps=4), 1, 0.0, id="four steps"),
        pytest.param(replace(DEVICES, steps=3), 1, 0.0, id="three steps"),
        pytest.param(replace(DEVICES, end_sync=False), 2, 0.0, id="a host that runs ahead"),
        pytest.param(CPUS, 2, 0.0, id="on CPUs"),
        pytest.param(replace(CPUS, microbatches=4), 3, 0.0, id="on CPUs, four batches in a step"),
    ],
)
@pytest.mark.parametrize("times", [0.8, 1.5])
def test_computation_changes_nothing_where_workers_set_the_pace(
    spec: JobSpec, workers: int, spread: float, times: float, tmp_path: Path
) -> None:
    spec = paced(spec, 1.5, workers, spread)
    found = asked(spec, tmp_path, "compute", f"{times}x")
    truth = step_time_ns(quicker(spec, times))
    assert found.mid_ns == pytest.approx(truth, rel=0.05)
    assert found.low_ns <= truth <= found.high_ns


@pytest.mark.parametrize("spec", [DEVICES, CPUS], ids=["devices", "CPUs"])
def test_a_slow_rank_costs_no_more_than_the_workers_leave(spec: JobSpec, tmp_path: Path) -> None:
    slow = SlowCompute(ranks=(1,), factor=1.3)
    healthy = paced(spec, 1.6, 1)
    found = asked(replace(healthy, causes=(slow,)), tmp_path, "rank.1", "peers")
    truth = step_time_ns(healthy)
    assert found.mid_ns == pytest.approx(truth, rel=0.03)
    assert found.low_ns <= truth <= found.high_ns


@pytest.mark.parametrize("workers", [1, 3])
def test_the_loader_is_advised_and_not_the_slow_rank_behind_it(workers: int, tmp_path: Path) -> None:
    slow = SlowCompute(ranks=(1,), factor=1.3)
    spec = replace(paced(replace(DEVICES, steps=13), 1.6, workers), causes=(slow,))
    job = simulate(spec)
    job.write(tmp_path)
    summary = advised(tmp_path)
    assert (
        sum(row.lost_us for row in summary.stragglers) * 1e3
        <= max(job.lost_ns(slow), 0) + 0.02 * job.truth.step_time_ns
    )
    assert summary.findings[0].rule == "dataloader-workers"
    # As many as deliver as fast as the slow rank trains.
    assert summary.findings[0].whatif == {"dataloader.num_workers": str(ceil(1.6 * workers / 1.3))}


def test_loading_in_the_training_process_is_work_like_any_other(tmp_path: Path) -> None:
    spec = replace(DEVICES, loader=LoaderSpec(workers=0, load_ns=5 * MS))
    found = asked(spec, tmp_path, "compute", "1.5x")
    assert found.mid_ns == pytest.approx(step_time_ns(quicker(spec, 1.5)), rel=0.02)


@pytest.mark.parametrize(
    ("waits_ms", "workers", "busy"),
    [
        ([9, 9, 9, 9], None, True),
        ([9, 9, 9, 9], 1, True),
        # Every third batch: three workers deliver at once.
        ([9, 0, 0, 9, 0, 0, 9, 0], None, True),
        ([9, 0, 0, 9, 0, 0, 9, 0], 3, True),
        # Once a round, though not in turn: workers whose batches take unequally long.
        ([0, 9, 0, 9, 0, 0, 0, 9, 9], 3, True),
        ([0, 9, 0, 9, 0, 0, 0, 9, 9], None, False),
        # Too few to say.
        ([0, 0, 9, 0], None, False),
        ([0, 0, 9, 0], 8, False),
        # A slow sample now and then holds up workers that keep pace else.
        ([0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0], 2, None),
        ([0] * 20 + [9] + [0] * 20, None, None),
        ([0, 0, 0, 0], None, None),
        # So many are, though of how many workers is not known.
        ([26, 0, 517, 11, 4], None, True),
        # Less than a millisecond for every batch may be what taking one costs.
        ([0.8, 0.8, 0.8, 0.8], None, False),
    ],
)
def test_which_waits_show_that_workers_are_always_busy(
    waits_ms: list[float], workers: int | None, busy: bool | None
) -> None:
    waited = (np.array(waits_ms) * MS).astype(np.int64)
    started = np.zeros(len(waited), dtype=np.bool_)
    assert _busy(waited > 0, waited, started, workers, _turns(waited > 0, waited, np.cumsum(waited))) is busy


def test_rounds_in_which_workers_start_show_nothing() -> None:
    """Their first batch is waited for however quick they are: in the other rounds none is, or one in each."""
    waited = (np.array([9, 0, 0, 0, 9, 0, 0, 0]) * MS).astype(np.int64)
    started = np.array([True, False, False, False] * 2)
    assert _busy((waited > 0) & ~started, waited, started, 2, None) is None
    waited[[2, 6]] = 5 * MS
    assert _busy((waited > 0) & ~started, waited, started, 2, None) is True


@pytest.mark.parametrize(
    ("waits_ms", "workers"),
    [
        ([9, 9, 9, 9], 1),
        ([9, 0, 0, 9, 0, 0, 9, 0], 3),
        # Batches that take unequally long: the long waits are regular.
        ([9, 1, 12, 2, 8, 1, 10, 0], 2),
        ([9, 0, 0, 9, 9, 0], None),
        # Nearly each batch is waited for, but the last three come at about the same time: no lone worker's.
        ([26, 0, 517, 11, 4], None),
        ([120, 70, 150, 130], 1),
        ([3, 2, 9, 2, 0, 4, 8, 0, 3, 1, 9, 0], None),
        ([9, 0], None),
    ],
)
def test_turns_show_how_many_workers_there_are(waits_ms: list[float], workers: int | None) -> None:
    waited = (np.array(waits_ms) * MS).astype(np.int64)
    assert _turns(waited > 0, waited, np.cumsum(waited)) == workers


def test_taking_a_batch_that_is_there_is_no_wait() -> None:
    assert _own_cost_ns(np.array([800_000, 120_000, 460_000, 125_000, 330_000, 120_000])) == 125_000
    # All alike: they may all be waits, and whatever takes longer than a millisecond is one.
    assert _own_cost_ns(np.array([300_000, 310_000])) == 0
    assert _own_cost_ns(np.array([5 * MS, 20 * MS, 5 * MS])) == 0
    # So short, or so many, and so even: no workers deliver like that.
    assert _own_cost_ns(np.array([120_000, 121_000])) == 121_000
    assert _own_cost_ns(np.array([480_000, 490_000, 440_000])) == 490_000
    # Of one batch as little as of two.
    assert (_own_cost_ns(np.array([120_000])), _own_cost_ns(np.array([480_000]))) == (120_000, 0)


def test_one_rank_s_workers_set_the_pace_of_all(tmp_path: Path) -> None:
    """Where that rank begins the recording is assumed, but not how long the job's steps take."""
    slow = Cause("slow loader", 8.0, ranks=(2,))
    loader = Loader(workers=2, load_ns=20 * MS)
    job = Job(strategy="fsdp", noise=0.0, loader=loader, model=Model(blocks=3, tokens=8192, width=2048), causes=(slow,))
    emulate(job).write(tmp_path)
    changed = apply(job, {"compute": "1.5x"})
    assert changed is not None
    found = predict(context_of(tmp_path, workers=1), {"compute": "1.5x"})
    assert found.mid_ns == pytest.approx(step_ns(changed.job), rel=0.05)


@pytest.mark.parametrize("end_sync", [True, False], ids=["in step", "ahead"])
@pytest.mark.parametrize(("workers", "asked_for"), [(1, 0), (1, 2), (2, 0), (2, 1), (2, 4), (3, 6)])
def test_a_trace_whose_turns_show_the_workers_is_enough_for_another_number(
    workers: int, asked_for: int, end_sync: bool, tmp_path: Path
) -> None:
    spec = paced(replace(DEVICES, steps=13, end_sync=end_sync), 1.7, workers)
    found = asked(spec, tmp_path, "dataloader.num_workers", str(asked_for))
    truth = step_time_ns(replace(spec, loader=replace(spec.loader, workers=asked_for)))
    assert found.mid_ns == pytest.approx(truth, rel=0.08)
    assert found.low_ns <= truth <= found.high_ns


@pytest.mark.parametrize("item_every", [0, 1], ids=["ahead", "reads its loss"])
def test_loading_and_accumulating_beside_a_device_that_is_behind(item_every: int, tmp_path: Path) -> None:
    """On the second simulator: without workers the host loads while its device works; the loss is read once a step."""
    loader = Loader(workers=1, load_ns=25 * MS, jitter=0.0)
    job = Job(ranks=2, ranks_per_host=2, item_every=item_every, noise=0.0, model=Model(blocks=4), loader=loader)
    emulate(job).write(tmp_path)
    context = context_of(tmp_path)
    for settings in ({"dataloader.num_workers": "0"}, {"batch.accumulation": "2"}, {"dataloader.num_workers": "4"}):
        changed = apply(job, settings)
        assert changed is not None
        truth = step_ns(changed.job) / changed.batches
        found = predict(context, settings)
        assert found.mid_ns == pytest.approx(truth, rel=0.05)
        assert found.low_ns * 0.999 <= truth <= found.high_ns * 1.001


@pytest.mark.parametrize(
    "told",
    [{"timed_batches": 10, "load_cpu_ns": 10}, {"fetched_batches": 10, "fetch_ns": 10}],
    ids=["CPU time", "time"],
)
def test_what_loading_takes_bounds_a_step_that_never_waited(told: dict[str, int], tmp_path: Path) -> None:
    spec = paced(DEVICES, 0.9, 2)
    simulate(spec).write(tmp_path)
    context = context_of(tmp_path)
    taken = {name: count * spec.loader.load_ns if name.endswith("_ns") else count for name, count in told.items()}
    loader = DataLoaderMetadata(num_workers=2, **taken)
    known = replace(context, runs={rank: RunMetadata(rank=rank, dataloaders=(loader,)) for rank in (0, 1)})
    truth = step_time_ns(quicker(spec, 2.0))
    assert predict(context, {"compute": "2x"}).mid_ns < 0.8 * truth
    assert predict(known, {"compute": "2x"}).mid_ns == pytest.approx(truth, rel=0.05)


@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_workers_that_nobody_waits_for_say_how_fast_they_are(microbatches: int, workers: int, tmp_path: Path) -> None:
    """On the second simulator, recorded by ``perfscope run``: four workers that need 70 % of a step."""
    model = Model(blocks=4)
    quick = Job(ranks=2, ranks_per_host=2, noise=0.0, model=model, microbatches=microbatches)
    load_ns = round(0.7 * 4 * step_ns(quick))
    job = replace(
        quick, loader=Loader(workers=4, load_ns=load_ns, jitter=0.02), recording=replace(quick.recording, run=True)
    )
    emulate(job).write(tmp_path)
    found = predict(context_of(tmp_path), {"dataloader.num_workers": str(workers)})
    truth = step_ns(replace(job, loader=replace(job.loader, workers=workers)))
    assert found.mid_ns == pytest.approx(truth, rel=0.05)
    assert found.low_ns * 0.999 <= truth <= found.high_ns * 1.001


def test_steps_slowed_by_others_do_not_slow_down_the_workers(tmp_path: Path) -> None:
    """Steps outside the capture took 1.3 times as long: one worker still needs its own time for a batch."""
    spec = paced(DEVICES, 0.9, 4)
    simulate(spec).write(tmp_path)
    context = context_of(tmp_path)
    loader = DataLoaderMetadata(num_workers=4, fetched_batches=1, fetch_ns=spec.loader.load_ns)
    slowed = replace(
        context,
        runs={rank: RunMetadata(rank=rank, dataloaders=(loader,)) for rank in (0, 1)},
        unprofiled_ns=1.3 * context.result.step_ns,
    )
    found = predict(slowed, {"dataloader.num_workers": "1"})
    assert found.mid_ns == pytest.approx(spec.loader.load_ns, rel=0.02)
    assert found.low_ns > found.measured_ns


@pytest.mark.parametrize(("pace", "holds", "sure"), [(0.97, True, True), (0.8, True, False), (0.5, False, True)])
def test_workers_that_told_their_pace_set_it_or_not(pace: float, holds: bool, sure: bool, tmp_path: Path) -> None:
    """The host waits for three of the batches; whether workers are always busy is theirs to say."""
    spec = paced(replace(DEVICES, steps=13), 1.5, 4)
    simulate(spec).write(tmp_path)
    partial = context_of(tmp_path).result.partials[0]
    loading, steps = partial.loading, partial.steps
    end = loading.end_ns.copy()
    shorter = np.arange(len(end)) % 7 != 3
    end[shorter] = loading.start_ns[shorter] + 100 * US
    seldom = replace(partial, loading=replace(loading, end_ns=end))
    step_ns = float(steps.end_ns[-1] - steps.start_ns[0]) / len(steps.number)
    assert not deliveries(seldom, 4).sure
    told = deliveries(seldom, 4, 4 * pace * step_ns)
    assert (len(told) > 0) is holds
    assert told.sure is sure
    assert not holds or told.batch_ns == pytest.approx(pace * step_ns)


def test_hosts_that_seldom_wait_ahead_of_their_devices_do_not_show_the_pace(tmp_path: Path) -> None:
    """On the second simulator: a host that runs ahead from the start empties the loader, which is quick enough."""
    job = replace(draw(5120).job, age=0)  # where the loop has just begun
    emulate(job).write(tmp_path)
    context = context_of(tmp_path)
    assert all(found.is_hidden for found in context.recorded.deliveries.values() if len(found))
    changed = apply(job, {"compute": "1.5x"})
    assert changed is not None
    truth = step_ns(changed.job)
    found = predict(context, {"compute": "1.5x"})
    assert found.mid_ns == pytest.approx(truth, rel=0.05)
    assert found.high_ns > context.result.step_ns


@pytest.mark.parametrize(("device_ms", "sure"), [(180, False), (240, True)])
def test_workers_too_slow_for_the_recorded_steps_do_not_set_their_pace(device_ms: int, sure: bool) -> None:
    """A host 600 ms ahead waits for three batches in a row, which end 225 ms apart on average, evenly: a lone worker's.
    It would not sustain steps of 180 ms, in which the device waits for none.
    """
    builder = TraceBuilder().launched("gemm", 0, 1 * US, 600 * MS)
    host, device = 10 * MS, 600 * MS
    for step, waited in enumerate((31, 297, 134)):
        begin, host = host, host + waited * MS
        builder.note("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", begin, host)
        builder.launched("gemm", host + 100 * US, device, device + device_ms * MS)
        host += 10 * MS
        builder.step(step, begin, host)
        device += device_ms * MS
    found = deliveries(analyze_rank(builder.build()))
    assert found.batch_ns == pytest.approx(225.5 * MS)
    assert found.sure is sure


def test_taking_batches_may_take_unequally_long() -> None:
    """A step takes a batch in 90 to 440 µs, computes for 4 ms and waits for the device: no workers are waited for. With
    twice the speed steps are 2 ms shorter; that workers are just as quick as the training stays possible.
    """
    builder, host = TraceBuilder(), 0
    for step, taken in enumerate((160, 330, 90, 440, 250, 120, 380, 200)):
        begin, host = host, host + taken * US
        builder.note("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", begin, host)
        builder.launched("gemm", host + 10 * US, host + 20 * US, host + 20 * US + 4 * MS)
        builder.call("cudaDeviceSynchronize", host + 15 * US, host + 25 * US + 4 * MS)
        host += 30 * US + 4 * MS
        builder.step(step, begin, host)
    result = align_job({0: analyze_rank(builder.build())})
    recorded = record_schedules(result)
    assert recorded.deliveries[0].slight
    found = predict(Context(result, recorded, {}, {}), {"compute": "2x"})
    assert found.mid_ns == pytest.approx(result.step_ns - 2 * MS, rel=0.01)
    assert found.high_ns >= result.step_ns


def test_a_wait_of_which_the_device_notices_only_the_end_holds_the_step(tmp_path: Path) -> None:
    """On the second simulator: the host waits 2.3 ms of a step of 5 for a batch, of which its device idles 0.2."""
    job = replace(draw(13030).job, age=0)  # where the loop has just begun
    emulate(job).write(tmp_path)
    context = context_of(tmp_path)
    (held,) = (found for found in context.recorded.deliveries.values() if len(found))
    assert held.longest_ns > 10 * held.stall_ns.max() > 0
    changed = apply(job, {"compute": "1.5x"})
    assert changed is not None
    truth = step_ns(changed.job)
    found = predict(context, {"compute": "1.5x"})
    assert found.mid_ns == pytest.approx(truth, rel=0.05)
    assert found.low_ns <= truth <= found.high_ns


def test_one_wait_of_a_host_ahead_of_its_device_leaves_the_pace_open_and_says_so(tmp_path: Path) -> None:
    """On the second simulator: hosts come out of a pause ahead of their devices and empty loaders that are slow."""
    job = replace(draw(12138).job, age=0)  # where the loop has just begun
    emulate(job).write(tmp_path)
    context = context_of(tmp_path)
    assert all(found.is_hidden and found.batch_ns is None for found in context.recorded.deliveries.values())
    changed = apply(job, {"compute": "1.5x"})
    assert changed is not None
    found = predict(context, {"compute": "1.5x"})
    assert found.low_ns <= step_ns(changed.job) <= found.high_ns
    assert any("loader workers" in words for words in found.assumed)


@pytest.mark.parametrize("workers", [0, 2])
def test_as_many_workers_as_there_are_change_nothing(workers: int, tmp_path: Path) -> None:
    loader = Loader(workers=workers, load_ns=3 * MS)
    job = Job(ranks=2, ranks_per_host=2, item_every=3, model=Model(blocks=3), loader=loader)
    emulate(replace(job, recording=replace(job.recording, run=True))).write(tmp_path)
    found = predict(context_of(tmp_path), {"dataloader.num_workers": str(workers)})
    assert found.mid_ns == pytest.approx(found.measured_ns, rel=0.005)


@pytest.mark.parametrize("run", [True, False], ids=["by run", "a trace alone"])
def test_in_a_recording_of_one_step_a_wait_for_workers_holds_where_training_is_quicker(
    run: bool, tmp_path: Path
) -> None:
    """On the second simulator: one worker that takes 1.6 steps for a batch; one that is quick enough."""
    job = Job(ranks=2, ranks_per_host=2, item_every=1, noise=0.0, model=Model(blocks=4))
    job = replace(job, recording=replace(job.recording, steps=1, run=run))
    for pace, waits in ((1.6, True), (0.5, False)):
        loader = Loader(workers=1, load_ns=round(pace * step_ns(job)), jitter=0.0)
        slow, folder = replace(job, loader=loader), tmp_path / str(pace)
        folder.mkdir()
        emulate(slow).write(folder)
        context = context_of(folder, workers=1)
        assert any(len(found) for found in context.recorded.deliveries.values()) is waits
        for settings in ({"compute": "1.5x"}, *([{"dataloader.num_workers": "8"}] if run and waits else [])):
            changed = apply(slow, settings)
            assert changed is not None
            found, truth = predict(context, settings), step_ns(changed.job)
            assert found.mid_ns == pytest.approx(truth, rel=0.05)
            assert found.low_ns <= truth <= found.high_ns
            assert found.high_ns < 1.3 * found.measured_ns


def test_metadata_shows_workers_where_the_names_of_ranges_do_not(tmp_path: Path) -> None:
    simulate(paced(DEVICES, 1.5, 1)).write(tmp_path)
    partial = context_of(tmp_path).result.partials[0]
    recorded = replace(partial, loading=replace(partial.loading, single_process=None))
    assert not len(deliveries(recorded))
    assert not len(deliveries(recorded, 0))
    assert len(deliveries(recorded, 1)) == len(deliveries(partial)) > 0


def test_a_wait_for_the_last_batch_of_every_step_leaves_open_who_sets_the_pace(tmp_path: Path) -> None:
    """One worker is idle while the optimizer runs and then too slow for four batches in a row."""
    found = asked(paced(replace(DEVICES, microbatches=4), 0.9, 1), tmp_path, "compute", "1.5x")
    context = context_of(tmp_path)
    assert not any(waits.sure for waits in context.recorded.deliveries.values() if len(waits))
    truth = step_time_ns(quicker(paced(replace(DEVICES, microbatches=4), 0.9, 1), 1.5))
    assert found.low_ns <= truth <= found.high_ns


@pytest.mark.parametrize("taken", [0.5, 0.8])
def test_a_pause_costs_no_more_than_known_workers_leave(taken: float, tmp_path: Path) -> None:
    """Nobody waits for the workers: they told what they take, ``taken`` of the step with a pause of a quarter of it."""
    job = Job(ranks=2, ranks_per_host=2, noise=0.0, item_every=1, model=Model(blocks=4, tokens=4096), loader=Loader(2))
    job = replace(job, recording=replace(job.recording, run=True), loader=replace(job.loader, load_ns=1 * MS))
    pause = Cause("pause", step_ns(job) / 3, (1,), how="checkpoint")
    paused = replace(job, causes=(pause,))
    load_ns = round(taken * step_ns(paused) * job.loader.workers)
    paused = replace(paused, loader=replace(job.loader, load_ns=load_ns, jitter=0.02))
    emulation = emulate(paused)
    emulation.write(tmp_path)
    (row,) = measured(tmp_path).stragglers
    truth = emulation.step_ns - step_ns(paused.without(pause))
    assert (row.ranks, row.cause) == ((1,), "host")
    assert row.lost_us * 1e3 == pytest.approx(truth, abs=0.02 * emulation.step_ns)


def test_loading_that_delays_the_first_recorded_step_is_not_there_with_workers(tmp_path: Path) -> None:
    """The step before the recording reads the loss, so devices are idle while the first recorded batch is loaded."""
    loader = Loader(workers=0, load_ns=6 * MS, jitter=0.0)
    model = Model(blocks=4, tokens=16384)
    job = Job(
        strategy="pipeline", ranks=4, stages=2, microbatches=2, item_every=5, noise=0.0, model=model, loader=loader,
        recording=Recording(steps=4),
    )  # fmt: skip
    emulated = emulate(job)
    emulated.write(tmp_path)
    changed = apply(job, {"dataloader.num_workers": "2"})
    assert changed is not None
    truth = step_ns(changed.job)
    assert truth < 0.97 * emulated.step_ns
    assert predict(context_of(tmp_path), {"dataloader.num_workers": "2"}).mid_ns == pytest.approx(truth, rel=0.01)


@pytest.mark.parametrize(("workers", "load_ms", "pause_ms", "seed"), [(2, 60, 200, 6), (1, 20, 100, 7)])
def test_a_pause_is_no_part_of_the_pace_of_busy_workers(
    workers: int, load_ms: int, pause_ms: int, seed: int, tmp_path: Path
) -> None:
    """A lone rank that waits for most batches saves a checkpoint in one of 8 steps: its workers idle meanwhile."""
    job = Job(
        ranks=1, ranks_per_host=1, seed=seed, noise=0.005, model=Model(blocks=4, tokens=4096), age=50,
        loader=Loader(workers=workers, load_ns=load_ms * MS), recording=Recording(steps=8),
        causes=(Cause("pause", pause_ms * MS, (0,), 8, how="checkpoint", offset=1),),
    )  # fmt: skip
    emulate(job).write(tmp_path)
    found = predict(context_of(tmp_path), {"host.pauses": "0"})
    truth_ns = step_ns(job.without(*job.causes))
    assert found.mid_ns == pytest.approx(truth_ns, rel=0.1)
    assert found.low_ns <= truth_ns <= found.high_ns
