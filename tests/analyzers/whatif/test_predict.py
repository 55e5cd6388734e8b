"""Predictions from one recording against the same job simulated with the change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from perfscope.analyzers.whatif import predict as predicting
from perfscope.analyzers.whatif.change import BadSetting, CannotReplay, Context
from perfscope.analyzers.whatif.ddp import gradient_rounds
from perfscope.analyzers.whatif.predict import Predictor, predict, setting_named
from perfscope.analyzers.whatif.schedules.recorded import editable_schedules
from perfscope.analyzers.whatif.whatif import context_of, sweep, whatif
from tests.generator import (
    MIB,
    MS,
    US,
    HostSpec,
    HostSync,
    JobSpec,
    LoaderSpec,
    ModelSpec,
    NetworkSpec,
    ReduceEachMicrobatch,
    SlowCompute,
    cpu_job,
    simulate,
    step_time_ns,
)  # fmt: skip

DEEP = ModelSpec(layers=12, tokens=2048)
SLOW_NETWORK = NetworkSpec(busbw_gbps=40.0, alpha_ns=100_000)
DDP = JobSpec(ranks=4, steps=4, model=DEEP, network=SLOW_NETWORK, end_sync=True)
STRAGGLING = replace(DDP, causes=(SlowCompute(ranks=(2,), factor=1.4),))
CPUS = cpu_job(ranks=2, steps=6)
ACCUMULATING = replace(DDP, microbatches=4)
LOADING = JobSpec(ranks=2, steps=4, model=DEEP, loader=LoaderSpec(workers=0, load_ns=8 * MS), end_sync=True)
FSDP = replace(DDP, strategy="fsdp")
LAUNCH_BOUND = JobSpec(
    ranks=4, tensor=2, steps=4, model=ModelSpec(layers=12, tokens=1024, width=512, hidden=1024),
    network=NetworkSpec(busbw_gbps=217.0, alpha_ns=13 * US), clip_norm=True,
)  # fmt: skip
HOST_BOUND = JobSpec(
    ranks=2, steps=4, end_sync=True, causes=(HostSync(),), host=HostSpec(operator_ns=10 * US, latency_ns=5 * US),
    model=ModelSpec(layers=8, tokens=1024, width=512, hidden=1024), network=NetworkSpec(busbw_gbps=35.0),
)  # fmt: skip
FREE = replace(HOST_BOUND, end_sync=False, causes=())
AHEAD = replace(HOST_BOUND, strategy="fsdp", end_sync=False, causes=(), model=replace(HOST_BOUND.model, tokens=3072))
SMALL = JobSpec(
    ranks=2, steps=4, end_sync=True, model=ModelSpec(layers=16, tokens=1024, width=512, hidden=1024),
    network=NetworkSpec(busbw_gbps=79.0, alpha_ns=126 * US),
)  # fmt: skip


def network(bandwidth: float = 1.0, latency: float = 1.0) -> NetworkSpec:
    return NetworkSpec(busbw_gbps=SLOW_NETWORK.busbw_gbps * bandwidth, alpha_ns=round(SLOW_NETWORK.alpha_ns * latency))


def quicker(factor: float, model: ModelSpec = DEEP) -> ModelSpec:
    return replace(
        model,
        flops_per_ns=model.flops_per_ns * factor,
        small_kernel_ns=round(model.small_kernel_ns / factor),
        optimizer_kernel_ns=round(model.optimizer_kernel_ns / factor),
    )


def bucketed(spec: JobSpec, size: int) -> JobSpec:
    """With ``bucket_cap_mb`` set to ``size``, which since torch 2.5 is the first bucket's limit as well."""
    return replace(spec, bucket_bytes=size * MIB, first_bucket_bytes=size * MIB)


def test_what_delayed_one_bucket_does_not_delay_each_new_one(tmp_path: Path) -> None:
    """The first bucket of each step began 17 ms after it could have; new ones begin as soon as the others did."""
    simulate(bucketed(DDP, 10)).write(tmp_path)
    context = context_of(tmp_path)
    schedules = editable_schedules(context.result, context.recorded)
    usual = {bucket.gap_ns for one in gradient_rounds(schedules) for bucket in one.buckets[1:]}
    for one in gradient_rounds(schedules):
        one.buckets[0].gap_ns = 17 * MS
    setting = setting_named("ddp.bucket_cap_mb")
    setting.apply(schedules, context, setting.name, "25")
    found = {bucket.gap_ns for one in gradient_rounds(schedules) for bucket in one.buckets}
    assert max(found) <= max(usual)


def test_the_buckets_that_were_recorded_change_nothing(tmp_path: Path) -> None:
    simulate(bucketed(DDP, 10)).write(tmp_path)
    found = predict(context_of(tmp_path), {"ddp.bucket_cap_mb": "10"})
    assert found.mid_ns == pytest.approx(found.measured_ns, rel=1e-4)


@dataclass(frozen=True)
class Question:
    """A recorded job, the settings asked about, and the job that they make of it."""

    recorded: JobSpec
    settings: dict[str, str]
    changed: JobSpec
    within: float = 0.05


QUESTIONS = {
    "nothing": Question(DDP, {}, DDP, within=1e-4),
    "twice the bandwidth": Question(DDP, {"network.bandwidth": "2x"}, replace(DDP, network=network(2.0))),
    "half the bandwidth": Question(DDP, {"network.bandwidth": "0.5x"}, replace(DDP, network=network(0.5))),
    "four times the latency": Question(DDP, {"network.latency": "4x"}, replace(DDP, network=network(latency=4.0))),
    "quicker computation": Question(DDP, {"compute": "1.2x"}, replace(DDP, model=quicker(1.2))),
    "launches for nothing": Question(
        DDP, {"host.launch": "0"}, replace(DDP, host=HostSpec(operator_ns=0, launch_ns=0, event_ns=0))
    ),
    "a rank at its peers' pace": Question(STRAGGLING, {"rank.2": "peers"}, DDP, within=0.01),
    # 1.4 times the work of the three others, spread over all four.
    "work spread evenly": Question(
        STRAGGLING, {"ranks.work": "even"}, replace(DDP, causes=(SlowCompute(factor=1.1),)), within=0.01
    ),
    "work spread evenly over two": Question(
        replace(CPUS, causes=(SlowCompute(ranks=(1,), factor=2.0),)),
        {"ranks.work": "even"},
        replace(CPUS, causes=(SlowCompute(factor=1.5),)),
        within=0.01,
    ),
    "a rank that is not slow": Question(STRAGGLING, {"rank.1": "peers"}, STRAGGLING, within=0.01),
    "a rank at its peers' pace on a quicker network": Question(
        STRAGGLING, {"rank.2": "peers", "network.bandwidth": "2x"}, replace(DDP, network=network(2.0))
    ),
    **{
        # Parameters are 8 MiB, which only the recorded buckets show: buckets of 10 hold two of them.
        f"buckets of {size} MiB": Question(DDP, {"ddp.bucket_cap_mb": str(size)}, bucketed(DDP, size), within=0.01)
        for size in (5, 10, 25, 50, 100, 200)
    },
    "larger buckets on a quicker network": Question(
        DDP, {"ddp.bucket_cap_mb": "50", "network.bandwidth": "2x"}, bucketed(replace(DDP, network=network(2.0)), 50)
    ),
    "one bucket split": Question(
        replace(DDP, bucket_bytes=2000 * MIB, first_bucket_bytes=2000 * MIB),
        {"ddp.bucket_cap_mb": "50"},
        bucketed(DDP, 50),
    ),
    "no_sync": Question(replace(ACCUMULATING, causes=(ReduceEachMicrobatch(),)), {"ddp.no_sync": "true"}, ACCUMULATING),
    **{
        f"buckets of {size} MiB in each of four backwards": Question(
            replace(ACCUMULATING, causes=(ReduceEachMicrobatch(),)),
            {"ddp.bucket_cap_mb": str(size)},
            bucketed(replace(ACCUMULATING, causes=(ReduceEachMicrobatch(),)), size),
        )
        for size in (10, 100)
    },
    **{
        f"{workers} workers": Question(
            LOADING,
            {"dataloader.num_workers": str(workers)},
            replace(LOADING, loader=LoaderSpec(workers=workers, load_ns=8 * MS)),
        )
        for workers in (0, 1, 2, 4)
    },
    # What the network no longer hides is the host's own work.
    "a quarter of the latency where launches take as long": Question(
        LAUNCH_BOUND,
        {"network.latency": "0.25x"},
        replace(LAUNCH_BOUND, network=replace(LAUNCH_BOUND.network, alpha_ns=round(13 * US / 4))),
    ),
    # The calls themselves stay: the job without them also saves what they cost the host.
    "a host that no longer waits runs ahead": Question(HOST_BOUND, {"host.sync": "0"}, FREE),
    "a host that no longer waits, and a quick device": Question(
        HOST_BOUND, {"host.sync": "0", "compute": "2x"}, replace(FREE, model=quicker(2.0, FREE.model))
    ),
    **{
        f"{name} on a device {factor} times as quick": Question(
            spec, {"compute": f"{factor}x"}, replace(spec, model=quicker(factor, spec.model)), within=0.01
        )
        for factor in (0.5, 2.0)
        for name, spec in (("syncs", HOST_BOUND), ("launches", FREE), ("a host hardly ahead", AHEAD))
    },
    "syncs without launches": Question(
        HOST_BOUND,
        {"host.launch": "0"},
        replace(HOST_BOUND, host=replace(HOST_BOUND.host, operator_ns=0, launch_ns=0, event_ns=0)),
        within=0.02,
    ),
}


class Recordings:
    """Every recorded job once, made when it is first asked for: a process that runs few of the tests makes few."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Context] = {}

    def of(self, job: JobSpec) -> Context:
        key = repr(job)
        if key not in self._made:
            place = self._folder / str(len(self._made))
            simulate(job).write(place)
            self._made[key] = context_of(place, workers=1)
        return self._made[key]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    return Recordings(tmp_path_factory.mktemp("recordings"))


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_prediction_comes_true(recordings: Recordings, name: str) -> None:
    question = QUESTIONS[name]
    found = predict(recordings.of(question.recorded), question.settings)
    truth = step_time_ns(question.changed)
    assert found.error == pytest.approx(0.0, abs=1e-6)
    assert found.mid_ns == pytest.approx(truth, rel=question.within)
    assert found.low_ns <= found.mid_ns <= found.high_ns
    assert 0.999 * found.low_ns <= truth <= 1.001 * found.high_ns


@pytest.mark.parametrize("name", QUESTIONS)
def test_whether_a_change_may_save_a_share_is_what_its_prediction_says(recordings: Recordings, name: str) -> None:
    question = QUESTIONS[name]
    context = recordings.of(question.recorded)
    prediction = Predictor(context)(question.settings)
    assert prediction is not None
    saved = 1 - 1e3 * prediction.mid / context.result.step_ns
    rules = Predictor(context)
    assert rules.may_save(question.settings, saved)
    assert not rules.may_save(question.settings, saved + 0.001)
    assert rules(question.settings) == prediction


def test_a_change_that_cannot_be_replayed_may_save_anything_and_has_no_prediction(
    recordings: Recordings,
) -> None:
    rules, change = Predictor(recordings.of(DDP)), {"rank.99": "peers"}
    assert rules.may_save(change, 0.9)
    assert rules(change) is None


def test_what_is_not_worth_its_change_costs_one_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(replace(FSDP, steps=4, network=replace(SLOW_NETWORK, alpha_ns=15 * US, busbw_gbps=5.0))).write(tmp_path)
    replays = 0
    real = predicting._replay_changed

    def counted(*arguments: Any) -> Any:
        nonlocal replays
        replays += 1
        return real(*arguments)

    monkeypatch.setattr(predicting, "_replay_changed", counted)
    rules, change = Predictor(context_of(tmp_path)), {"network.bandwidth": "2x"}
    assert not rules.may_save(change, 0.9)
    assert replays == 1
    assert rules(change) is not None
    assert replays == 3


@pytest.mark.parametrize("batches", [2, 4])
def test_accumulating_where_the_optimizer_is_much_of_a_step(tmp_path: Path, batches: int) -> None:
    simulate(SMALL).write(tmp_path)
    found = whatif(tmp_path, {"batch.accumulation": str(batches)})
    truth = step_time_ns(replace(SMALL, microbatches=batches)) / batches
    assert found.mid_ns == pytest.approx(truth, rel=0.05)


@pytest.mark.parametrize("alpha_ns", [15 * US, 200 * US])
def test_an_unknown_latency_is_assumed_and_the_range_holds_it(tmp_path: Path, alpha_ns: int) -> None:
    spec = replace(FSDP, steps=4, network=replace(SLOW_NETWORK, alpha_ns=alpha_ns, busbw_gbps=5.0))
    simulate(spec).write(tmp_path)
    found = whatif(tmp_path, {"network.bandwidth": "2x"})
    truth = step_time_ns(replace(spec, network=replace(spec.network, busbw_gbps=10.0)))
    assert found.low_ns <= truth <= found.high_ns
    assert found.assumed
    assert "one size of all_gather and reduce_scatter" in found.assumed[0]


def test_the_latency_of_one_group_is_that_of_others_on_the_same_links(tmp_path: Path) -> None:
    """The norm's all-reduce of a few bytes is all latency; tensor parallel ones have one size."""
    spec = replace(DDP, steps=4, tensor=2, clip_norm=True, network=replace(SLOW_NETWORK, alpha_ns=150 * US))
    simulate(spec).write(tmp_path)
    found = whatif(tmp_path, {"network.bandwidth": "4x"})
    truth = step_time_ns(replace(spec, network=replace(spec.network, busbw_gbps=160.0)))
    assert found.mid_ns == pytest.approx(truth, rel=0.02)
    assert not found.assumed


def test_the_best_bucket_is_ranked_first(recordings: Recordings) -> None:
    sizes = ("5", "25", "50", "100", "200")
    found = sweep(recordings.of(DDP), {}, "ddp.bucket_cap_mb", sizes)
    truths = [step_time_ns(bucketed(DDP, int(size))) for size in sizes]
    best = min(zip(found, truths, strict=True), key=lambda pair: pair[0].mid_ns)
    assert best[1] <= 1.02 * min(truths)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"rank.9": "peers"}, "not in the recording"),
        ({"ddp.no_sync": "true"}, "already reduced once per step"),
        ({"ddp.comm_dtype": "bf16"}, "16 bits"),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_the_reason(
    recordings: Recordings, settings: dict[str, str], why: str
) -> None:
    with pytest.raises(CannotReplay, match=why):
        predict(recordings.of(DDP), settings)


@pytest.mark.parametrize(
    "settings",
    [{"network.bandwith": "2x"}, {"network.bandwidth": "-1x"}, {"ddp.bucket_cap_mb": "big"}, {"rank.2": "fast"},
     {"dataloader.num_workers": "-1"}, {"zero.stage": "4"}, {"ranks.work": "mine"},
     {"rank.1": "peers", "ranks.work": "even"}],
)  # fmt: skip
def test_settings_that_make_no_sense_are_named(recordings: Recordings, settings: dict[str, str]) -> None:
    with pytest.raises(BadSetting, match=next(iter(settings)).split(".")[0]):
        predict(recordings.of(DDP), settings)


def test_from_a_folder(tmp_path: Path) -> None:
    simulate(DDP).write(tmp_path)
    assert whatif(tmp_path, {"network.bandwidth": "2x"}).mid_ns < whatif(tmp_path, {}).mid_ns
