"""Ranges of predictions hold what the emulated job takes when it is run with the change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perfscope.analyzers.job.aligned import align_job
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.rank.work.gradients import ReducedGradients
from perfscope.analyzers.replay.schedules import record_schedules
from perfscope.analyzers.whatif.change import Context
from perfscope.analyzers.whatif.predict import WhatIfAnswer, predict
from perfscope.analyzers.whatif.whatif import context_of
from tests.emulator import MS, US, Cause, Job, Loader, Model, Recording, emulate, step_ns
from tests.emulator.changes import apply
from tests.emulator.draw import draw
from tests.traces import TraceBuilder

SMALL = Job(ranks=2, model=Model(blocks=2, tokens=4096), loader=Loader(load_ns=2 * MS), noise=0.02)


def _asked(job: Job, folder: Path, settings: dict[str, str]) -> tuple[WhatIfAnswer, float]:
    """(prediction, the step with the change)."""
    emulate(job).write(folder)
    changed = apply(job, settings)
    assert changed is not None
    return predict(context_of(folder, workers=1), settings), step_ns(changed.job)


def test_a_change_without_effect_has_the_range_of_a_few_steps(tmp_path: Path) -> None:
    job = replace(SMALL, recording=Recording(steps=2))
    found, truth = _asked(job, tmp_path, {"host.launch": "0"})
    assert found.mid_ns == pytest.approx(found.measured_ns, rel=0.005)
    assert found.low_ns < truth < found.high_ns
    # 1 %, and twice the standard error of two steps whose deviation is at least that of a job that was not seen.
    assert 0.03 * found.mid_ns < found.high_ns - found.low_ns < 0.15 * found.mid_ns


def test_more_steps_are_surer(tmp_path: Path) -> None:
    widths = []
    for steps in (1, 6):
        folder = tmp_path / str(steps)
        folder.mkdir()
        found, _ = _asked(replace(SMALL, recording=Recording(steps=steps)), folder, {"host.launch": "0"})
        widths.append((found.high_ns - found.low_ns) / found.mid_ns)
    assert widths[0] > 1.3 * widths[1]


def test_a_rank_that_is_missing_may_have_been_the_last(tmp_path: Path) -> None:
    """The missing rank is the slower one: what it would gain of faster computation is not known."""
    job = replace(SMALL, ranks=3, imbalance=0.2, recording=Recording(steps=4, missing=(1,)))
    found, truth = _asked(job, tmp_path, {"compute": "1.5x"})
    assert found.low_ns < truth < found.high_ns


def test_a_stage_that_is_missing_works_as_fast_as_its_replica(tmp_path: Path) -> None:
    """Others wait for it, but those of the other replica wait as long for a rank that is there."""
    recording = Recording(steps=4, missing=(2,))
    model = Model(blocks=4, tokens=16384)
    job = Job(strategy="pipeline", stages=2, microbatches=8, model=model, noise=0.0, recording=recording)
    found, truth = _asked(job, tmp_path, {"compute": "2x"})
    assert found.mid_ns == pytest.approx(truth, rel=0.02)
    assert found.low_ns < truth < found.high_ns


def test_a_rank_that_is_missing_waited_for_the_slow_one_too(tmp_path: Path) -> None:
    slow = Cause("slow host", 4.0, (1,))
    recording = Recording(steps=4, missing=(3,))
    job = Job(strategy="tensor", tensor=2, model=Model(blocks=2), causes=(slow,), item_every=1, recording=recording)
    found, truth = _asked(job, tmp_path, {"rank.1": "peers"})
    assert found.mid_ns == pytest.approx(truth, rel=0.05)
    assert found.low_ns < truth < found.high_ns


def test_a_slow_host_takes_as_long_for_batches_of_more_workers(tmp_path: Path) -> None:
    slow = Cause("slow host", 4.0, (1,))
    model = Model(blocks=2, tokens=512, width=512)
    job = replace(SMALL, model=model, causes=(slow,), item_every=1, recording=Recording(steps=4, run=True))
    for workers in ("2", "8"):
        folder = tmp_path / workers
        folder.mkdir()
        found, truth = _asked(job, folder, {"dataloader.num_workers": workers})
        assert truth == pytest.approx(step_ns(job), rel=0.001)
        assert found.mid_ns == pytest.approx(truth, rel=0.02)


def test_launches_that_wait_for_a_full_queue_are_no_work_of_the_host(tmp_path: Path) -> None:
    """The device is so far behind that its host waits in launches: with faster computation it does not."""
    model = Model(blocks=4, tokens=32768, width=512, small_kernels=6)
    job = replace(SMALL, ranks=1, model=model, noise=0.0, warmup=8, recording=Recording(steps=4))
    found, truth = _asked(job, tmp_path, {"compute": "1.5x"})
    waits = [call for call in emulate(job).ranks[0].calls if call.launches and call.end_ns - call.start_ns > 50 * US]
    assert len(waits) > 100  # else the case is not what it is about
    assert found.mid_ns == pytest.approx(truth, rel=0.05)
    assert found.low_ns < truth < found.high_ns


def test_a_slower_device_that_waits_for_its_host_may_cost_nothing(tmp_path: Path) -> None:
    job = replace(SMALL, model=Model(blocks=2, tokens=512, width=512), noise=0.01)
    found, truth = _asked(job, tmp_path, {"compute": "0.8x"})
    assert truth < 1.03 * step_ns(job)
    assert found.low_ns < truth < found.high_ns


def test_where_a_lone_step_begins_is_in_the_range(tmp_path: Path) -> None:
    """The step before ended with a wait for its device, which then idles while the batch is loaded; or did not."""
    loader = Loader(workers=0, load_ns=4 * MS)
    job = replace(SMALL, ranks=1, model=Model(blocks=4, tokens=8192), loader=loader, recording=Recording(steps=1))
    for item_every in (0, 5):
        folder = tmp_path / str(item_every)
        folder.mkdir()
        found, truth = _asked(replace(job, item_every=item_every), folder, {"compute": "1.5x"})
        assert found.low_ns < truth < found.high_ns


def test_steps_that_vary_more_with_the_change_are_less_sure(tmp_path: Path) -> None:
    """Another rank waits for the slow one, and hides how unevenly the others go."""
    slow = Cause("slow compute", 2.0, ranks=(1,))
    job = replace(SMALL, ranks=3, model=Model(blocks=4, tokens=4096), imbalance=0.15, causes=(slow,))
    found, truth = _asked(job, tmp_path, {"rank.1": "peers"})
    assert found.low_ns < truth < found.high_ns


def test_what_taking_a_batch_from_a_worker_costs_is_not_known_before_there_are_workers(tmp_path: Path) -> None:
    """Here it is more than loading, of a step of 1.2 ms."""
    loader = Loader(workers=0, load_ns=50 * US, fetch_ns=180 * US)
    job = replace(SMALL, model=Model(blocks=1, tokens=512), loader=loader, item_every=1, noise=0.0)
    found, truth = _asked(job, tmp_path, {"dataloader.num_workers": "2"})
    assert truth > 1.05 * found.measured_ns
    assert found.low_ns < truth < found.high_ns


def test_rare_pauses_do_not_make_the_other_steps_unsure(tmp_path: Path) -> None:
    """A pause of some 20 steps in every fourth: without it steps are as long as those without one are."""
    pause = Cause("pause", 400 * MS, ranks=(1,), every=4, how="log")
    job = replace(SMALL, model=Model(blocks=4, tokens=8192), causes=(pause,), recording=Recording(steps=8))
    found, truth = _asked(job, tmp_path, {"rank.1": "peers"})
    assert found.measured_ns > 3 * truth
    assert 0.5 * truth < found.low_ns < truth < found.high_ns


def test_buckets_that_each_hold_one_parameter_are_divided_by_no_limit(tmp_path: Path) -> None:
    """Their sizes alone do not show that; more buckets would make the launches of this step longer."""
    job = replace(SMALL, model=Model(blocks=4, tokens=512), bucket_mb=10, noise=0.0)
    found, truth = _asked(job, tmp_path, {"ddp.bucket_cap_mb": "5"})
    assert truth == pytest.approx(step_ns(job), rel=0.001)
    assert found.mid_ns > 1.05 * truth
    assert found.low_ns < truth


def _in_the_long_run_ns(job: Job, settings: dict[str, str]) -> float:
    """What a step takes with the change on the mean of 60 steps from the first recorded one on."""
    changed = apply(job, settings)
    assert changed is not None
    recording = replace(job.recording, steps=60, kept=False)
    return step_ns(replace(changed.job, recording=recording))


def test_a_lone_step_that_loads_its_batch_itself_shows_little_of_what_batches_take(tmp_path: Path) -> None:
    """Loading is most of the step, and batches take unequally long: this one took longer than usual."""
    loader = Loader(workers=0, load_ns=6 * MS, jitter=0.2)
    job = replace(SMALL, ranks=1, seed=1, loader=loader, noise=0.0, recording=Recording(steps=1))
    found, _ = _asked(job, tmp_path, {"host.launch": "0"})
    usual = _in_the_long_run_ns(job, {"host.launch": "0"})
    assert abs(found.mid_ns / usual - 1) > 0.07
    assert found.low_ns < usual < found.high_ns


def test_a_lone_pause_does_not_show_how_often_there_are_pauses(tmp_path: Path) -> None:
    """One in four recorded steps, of each three in the long run, or of eight."""
    for every in (3, 8):
        pause = Cause("pause", 3 * MS, ranks=(1,), every=every, how="log")
        job = replace(SMALL, causes=(pause,), noise=0.0, item_every=1, recording=Recording(steps=4))
        folder = tmp_path / str(every)
        folder.mkdir()
        found, _ = _asked(job, folder, {"host.launch": "0"})
        usual = _in_the_long_run_ns(job, {"host.launch": "0"})
        assert abs(found.mid_ns / usual - 1) > 0.02
        assert found.low_ns < usual < found.high_ns


def test_a_lone_wait_for_loader_workers_may_be_a_rare_one(tmp_path: Path) -> None:
    """Workers are a few percent too slow: four steps hold one long wait, and in the long run waits are fewer. None of
    them would leave what the other three steps take, which is the least of the range.
    """
    loader = Loader(workers=4, load_ns=round(1.03 * 4 * 6.65 * MS), jitter=0.1)
    job = replace(SMALL, seed=10, loader=loader, noise=0.0, item_every=1, age=400, recording=Recording(steps=4))
    found, _ = _asked(job, tmp_path, {"network.latency": "0.5x"})
    usual = _in_the_long_run_ns(job, {"network.latency": "0.5x"})
    assert found.mid_ns > 1.1 * usual
    assert 6.2 * MS < found.low_ns < usual < found.high_ns


def test_workers_that_are_asked_show_a_pace_that_no_recorded_step_waits_for(tmp_path: Path) -> None:
    """The same, where four steps live on batches that were ready: the workers' own times tell of the waits to come."""
    loader = Loader(workers=4, load_ns=round(1.05 * 4 * 6.65 * MS), jitter=0.1)
    recording = Recording(steps=4, run=True)
    job = replace(SMALL, seed=0, loader=loader, noise=0.0, item_every=1, age=400, recording=recording)
    found, _ = _asked(job, tmp_path, {"network.latency": "0.5x"})
    usual = _in_the_long_run_ns(job, {"network.latency": "0.5x"})
    assert found.mid_ns < 0.95 * usual
    assert found.low_ns < usual < found.high_ns


def test_equal_parameters_that_buckets_suggest_may_be_several_smaller_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buckets of 4, 28 and 16 MiB might hold parameters of 4, and hold some of 3 and 1: more buckets are filled, and
    each takes a slow host a third of a millisecond. Autograd's functions tell how many there are, where they are
    recorded.
    """
    slow = Cause("slow host", 4.5, (0,))
    model = Model(blocks=4, tokens=4096, width=512)
    job = replace(SMALL, model=model, causes=(slow,), item_every=1, noise=0.0)
    found, truth = _asked(job, tmp_path, {"ddp.bucket_cap_mb": "5"})
    assert found.mid_ns == pytest.approx(truth, rel=0.01)
    monkeypatch.setattr(ReducedGradients, "in_buckets", lambda *_: ())
    found = predict(context_of(tmp_path), {"ddp.bucket_cap_mb": "5"})
    assert found.mid_ns < 0.97 * truth
    assert found.low_ns < truth < found.high_ns


def test_no_step_is_shorter_than_what_its_device_computes() -> None:
    """Steps of 1 ms launch ten kernels of 12 µs, 100 µs apart, in operators: without these the device has 120 µs of
    work. Kernels alone may be a tenth shorter than beside communication.
    """
    builder = TraceBuilder()
    for step in range(4):
        begin = step * MS
        builder.step(step, begin, begin + MS)
        for number in range(10):
            at = begin + number * 100 * US
            builder.op("aten::mul", at, at + 95 * US)
            builder.launched("mul", at + 80 * US, at + 85 * US, at + 97 * US)
    result = align_job({0: analyze_rank(builder.build())})
    found = predict(Context(result, record_schedules(result), {}, {}), {"host.launch": "0"})
    assert 0.85 * 120 * US <= found.low_ns <= 120 * US <= found.mid_ns


def _of_two_workers(batch_ms: float, age: int) -> Job:
    """A device that works 23.4 ms per step, four steps, and two workers that deliver a batch so often."""
    model, loader = (
        Model(blocks=8, tokens=4096, width=1024),
        Loader(workers=2, load_ns=round(2 * batch_ms * MS), jitter=0.0),
    )
    job = replace(SMALL, ranks=1, item_every=0, noise=0.0, model=model, loader=loader, warmup=6 if age else 2, age=age)
    return replace(job, recording=Recording(steps=4))


@pytest.mark.parametrize("batch_ms", [27.0, 40.0])
def test_two_waits_show_workers_whose_batches_alone_hold_the_host(tmp_path: Path, batch_ms: float) -> None:
    """The host is never blocked by its device, and gets no further ahead of it."""
    job = _of_two_workers(batch_ms, age=400)
    found, _ = _asked(job, tmp_path, {"compute": "1.5x"})
    truth = step_ns(replace(job, recording=Recording(steps=30)))  # as long with faster computation
    assert truth == pytest.approx(batch_ms * MS, rel=0.02)
    assert found.mid_ns == pytest.approx(truth, rel=0.02)


@pytest.mark.parametrize("batch_ms", [6.0, 9.0])
def test_a_host_that_gets_ahead_waits_for_workers_that_are_quick_enough(tmp_path: Path, batch_ms: float) -> None:
    """It takes batches sooner than the device needs them, as long as its lead grows."""
    found, truth = _asked(_of_two_workers(batch_ms, age=0), tmp_path, {"compute": "1.5x"})
    assert truth < 16 * MS
    assert found.mid_ns == pytest.approx(truth, rel=0.02)


def test_short_waits_for_every_batch_are_for_a_worker_that_takes_the_whole_step(tmp_path: Path) -> None:
    """One worker, 2.4 ms for a batch by its own watch; the training waits 0.8 ms for each, and works 1.6."""
    drawn = draw(22231).job
    assert drawn.loader.workers == 1
    for settings in ({"dataloader.num_workers": "2"}, {"compute": "0.8x"}):
        folder = tmp_path / next(iter(settings))
        folder.mkdir()
        found, truth = _asked(drawn, folder, settings)
        assert found.mid_ns == pytest.approx(truth, rel=0.03)


@pytest.mark.parametrize("compute", ["1x", "1.01x", "1.5x"])
def test_a_batch_that_comes_late_by_itself_is_late_whatever_the_training_does(compute: str) -> None:
    """A device works 20 ms per step, and its host, which is ahead of it, waits 3 ms for two batches of nine and 200 ms
    for another, for which the device waits, too.
    """
    waits_ms = (0.1, 3, 200, 0.1, 0.1, 0.1, 3, 0.1, 0.1)

    def steps(work_ns: int) -> tuple[TraceBuilder, int]:
        builder, at, done = TraceBuilder(), 0, 60 * MS
        first = 0
        for step, wait_ms in enumerate(waits_ms):
            begin = at
            at += round(wait_ms * MS)
            builder.note("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", begin, at)
            for _ in range(4):
                builder.op("aten::mm", at, at + 200 * US)
                starts = max(at + 160 * US, done)
                done = starts + work_ns
                builder.launched("mm", at + 150 * US, starts, done)
                at += 250 * US
            builder.step(step, begin, at)
            first = first or done
        return builder, (done - first) // (len(waits_ms) - 1)

    builder, measured_ns = steps(5 * MS)
    times = float(compute.removesuffix("x"))
    _, truth_ns = steps(round(5 * MS / times))
    result = align_job({0: analyze_rank(builder.build())})
    recorded = record_schedules(result)
    assert recorded.hidden_loading == {0}
    found = predict(Context(result, recorded, {}, {}), {"compute": compute})
    saved_ns = measured_ns - truth_ns
    assert found.mid_ns == pytest.approx(found.measured_ns - saved_ns, rel=0.05)
    assert found.low_ns <= found.measured_ns - saved_ns <= found.high_ns
