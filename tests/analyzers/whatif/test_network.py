"""What-ifs of the network, against the emulated job run again with the change."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from perfscope.analyzers.whatif.change import CannotReplay
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.schedules.recorded import editable_schedules
from perfscope.analyzers.whatif.whatif import context_of
from tests.analyzers.measured import advised
from tests.emulator import MS, US, Cause, Job, Loader, Model, Network, Recording, emulate, step_ns
from tests.emulator.changes import apply
from tests.generator import JobSpec, ModelSpec, NetworkSpec, cpu_job, simulate, step_time_ns

JOB = Job(
    model=Model(blocks=3, tokens=2048),
    network=Network(gbps=25.0, latency_ns=40_000),
    loader=Loader(load_ns=1 * MS),
    recording=Recording(steps=4),
)
STRATEGIES = {
    "ddp": JOB,
    "ddp in two turns": replace(JOB, microbatches=2, no_sync=False),
    "by hand": replace(JOB, strategy="manual"),
    "fsdp": replace(JOB, strategy="fsdp"),
    "two hosts": replace(JOB, ranks_per_host=2, network=replace(JOB.network, between_gbps=12.0)),
    "without rank 2": replace(JOB, recording=Recording(steps=4, missing=(2,))),
}


@pytest.mark.parametrize("job", STRATEGIES.values(), ids=STRATEGIES)
def test_a_better_network_never_makes_the_step_longer(job: Job, tmp_path: Path) -> None:
    emulate(job).write(tmp_path)
    context = context_of(tmp_path, workers=1)
    for setting, values in (("network.bandwidth", (0.5, 0.8, 1, 1.5, 4)), ("network.latency", (8, 2, 1, 0.5, 0.1))):
        found = [predict(context, {setting: f"{value}x"}) for value in values]
        steps = [one.mid_ns for one in found]
        assert steps == sorted(steps, reverse=True)
        assert found[2].mid_ns == pytest.approx(found[2].measured_ns, rel=1e-6)


def _missed(job: Job, folder: Path, settings: dict[str, str]) -> float:
    """Relative error of the predicted step, whose range holds the truth."""
    emulate(job).write(folder)
    found = predict(context_of(folder, workers=1), settings)
    changed = apply(job, settings)
    assert changed is not None
    truth = step_ns(changed.job)
    assert found.low_ns < truth < found.high_ns
    return found.mid_ns / truth - 1


@pytest.mark.parametrize("settings", [{"network.bandwidth": "2x"}, {"network.bandwidth": "0.5x"}, {"compute": "1.5x"}])
def test_ranks_that_are_missing_gain_as_the_others(settings: dict[str, str], tmp_path: Path) -> None:
    job = STRATEGIES["without rank 2"]
    assert abs(_missed(job, tmp_path, settings)) < 0.03


def test_of_a_late_rank_that_is_missing_only_the_transfer_gets_quicker(tmp_path: Path) -> None:
    """Rank 2 computes 1.3 times as long: the others' collectives seem to take much longer than their transfers."""
    job = replace(STRATEGIES["without rank 2"], causes=(Cause("slow compute", 1.3, (2,)),))
    assert abs(_missed(job, tmp_path, {"network.bandwidth": "2x"})) < 0.05


ONE_SIZE = replace(JOB, strategy="fsdp", gradient_bytes=2)
"""Every gather and every reduction moves as many bytes."""


def test_what_depends_on_a_latency_that_does_not_show_is_refused(tmp_path: Path) -> None:
    emulate(replace(ONE_SIZE, model=replace(JOB.model, width=512))).write(tmp_path)
    with pytest.raises(CannotReplay, match=r"cannot be separated.* the step may take anything from .* to .* ms"):
        predict(context_of(tmp_path, workers=1), {"network.latency": "4x"})


@pytest.mark.parametrize(
    "network",
    [Network(latency_ns=400 * US, gbps=40.0), Network(latency_ns=15 * US, gbps=3.0)],
    ids=["latency", "bytes"],
)
def test_small_transfers_may_be_nearly_all_latency_or_nearly_all_bytes(network: Network, tmp_path: Path) -> None:
    """1.5 MB in 430 us, of one size: a slow network or a slow link. The bounds hold for both."""
    job = replace(ONE_SIZE, network=network, model=replace(JOB.model, width=256))
    emulate(job).write(tmp_path)
    context = context_of(tmp_path, workers=1)
    for settings in ({"network.latency": "0.25x"}, {"network.latency": "4x"}, {"network.bandwidth": "4x"}):
        with pytest.raises(CannotReplay, match=r"for \d+% of each transfer: the step may take anything") as refused:
            predict(context, settings)
        ((least_ms, most_ms),) = re.findall(r"from ([\d.]+) to ([\d.]+) ms", str(refused.value))
        changed = apply(job, settings)
        assert changed is not None
        assert 0.99 * float(least_ms) <= step_ns(changed.job) / 1e6 <= 1.01 * float(most_ms)


def test_what_hardly_depends_on_it_is_predicted(tmp_path: Path) -> None:
    assert (
        abs(_missed(replace(ONE_SIZE, network=replace(JOB.network, gbps=8.0)), tmp_path, {"network.bandwidth": "2x"}))
        < 0.03
    )


def test_short_transfers_over_a_fast_link_are_not_taken_for_a_slow_one(tmp_path: Path) -> None:
    """160 GB/s and 15 us: 46 us for 5 MB, which without latency would be 105 GB/s."""
    network = replace(JOB.network, gbps=160.0, latency_ns=15_000)
    emulate(replace(ONE_SIZE, network=network, model=replace(JOB.model, width=512))).write(tmp_path)
    found = predict(context_of(tmp_path, workers=1), {"network.bandwidth": "2x"})
    assert any("20 µs of latency are assumed" in words for words in found.assumed)


@pytest.mark.parametrize("value", ["flat", "ddp"])
def test_a_host_that_no_loop_delays_runs_ahead(value: str, tmp_path: Path) -> None:
    """The loop over 18 gradients keeps the host of a small model busy for longer than the devices send."""
    job = replace(JOB, strategy="manual", model=Model(blocks=3, tokens=1024, width=512), network=Network(gbps=50.0))
    assert abs(_missed(job, tmp_path, {"gradients.reduce": value})) < 0.05


@pytest.mark.parametrize(
    "recording",
    [JOB.recording, replace(JOB.recording, metadata="none", shapes=False)],
    ids=["sizes", "kernels' names alone"],
)
def test_gradients_in_16_bits_are_cast_and_copied_back(recording: Recording, tmp_path: Path) -> None:
    job = replace(JOB, network=Network(gbps=10.0), recording=recording)
    assert abs(_missed(job, tmp_path, {"ddp.comm_dtype": "bf16"})) < 0.03


@pytest.mark.parametrize(("microbatches", "gbps"), [(1, 60.0), (2, 45.0)])
def test_casts_of_buckets_whose_sizes_the_trace_does_not_hold_follow_from_the_model(
    microbatches: int, gbps: float, tmp_path: Path
) -> None:
    """They take a fifth as long as the transfers."""
    recording = replace(JOB.recording, metadata="none", shapes=False, run=True)
    job = replace(
        JOB, microbatches=microbatches, no_sync=False, network=Network(gbps=gbps, latency_ns=12 * US),
        recording=recording,
    )  # fmt: skip
    assert abs(_missed(job, tmp_path, {"ddp.comm_dtype": "bf16"})) < 0.02


@pytest.mark.parametrize("seed", range(4))
def test_two_large_sizes_of_transfers_that_vary_say_little_of_latency(seed: int, tmp_path: Path) -> None:
    """Buckets of 16 and 32 MiB, each up to a third longer than the network needs: the line through their medians meets
    zero bytes at up to 78 us, and true are 12.
    """
    network = Network(latency_ns=12 * US, gbps=40.0, jitter=0.1)
    model = Model(blocks=4, tokens=2048)
    loader = Loader(load_ns=1 * MS)
    job = Job(seed=seed, ranks=2, noise=0.0, model=model, network=network, loader=loader, recording=Recording(steps=5))
    assert abs(_missed(job, tmp_path, {"network.latency": "4x"})) < 0.03


def test_what_a_slow_network_would_not_take_for_the_bytes_is_latency(tmp_path: Path) -> None:
    """37 kB in 5 ms on busy hosts, of one size: 6 buckets in a row, and one would take 6 ms instead of 30."""
    small = ModelSpec(layers=6, tokens=512, width=96, hidden=96)
    slow = NetworkSpec(alpha_ns=5_000 * US, busbw_gbps=1.0)
    spec = JobSpec(
        ranks=2, steps=5, model=small, network=slow, end_sync=True, bucket_bytes=30_000, first_bucket_bytes=30_000
    )
    simulate(spec).write(tmp_path)
    found = predict(context_of(tmp_path, workers=1), {"ddp.bucket_cap_mb": "1"})
    truth = step_time_ns(replace(spec, bucket_bytes=1 << 20, first_bucket_bytes=1 << 20))
    assert not found.assumed
    assert found.low_ns <= truth <= found.high_ns
    assert found.mid_ns == pytest.approx(truth, abs=2e6)
    (first, *_) = advised(tmp_path).findings
    assert first.title.startswith("DDP's gradient buckets are too small")


SHARED_LINK = JobSpec(
    ranks=2,
    steps=5,
    model=ModelSpec(layers=4, tokens=512, width=896, hidden=896),
    network=NetworkSpec(alpha_ns=300 * US, busbw_gbps=0.03),
    end_sync=True,
    bucket_bytes=3_000_000,
    first_bucket_bytes=3_000_000,
)
"""3.2 MB in 107 ms, all buckets of one size: a link of 1 Gbit/s that four jobs share."""


@pytest.mark.parametrize(
    ("asked", "changed"),
    [
        ({"network.bandwidth": "4x"}, replace(SHARED_LINK, network=NetworkSpec(alpha_ns=300 * US, busbw_gbps=0.12))),
        ({"network.bandwidth": "0.5x"}, replace(SHARED_LINK, network=NetworkSpec(alpha_ns=300 * US, busbw_gbps=0.015))),
        ({"ddp.bucket_cap_mb": "25"}, replace(SHARED_LINK, bucket_bytes=25 << 20, first_bucket_bytes=25 << 20)),
        ({"ddp.bucket_cap_mb": "1"}, replace(SHARED_LINK, bucket_bytes=1 << 20, first_bucket_bytes=1 << 20)),
    ],
    ids=lambda value: " ".join(map("=".join, value.items())) if isinstance(value, dict) else "",
)
def test_large_buckets_of_one_size_are_slow_for_their_bytes(
    asked: dict[str, str], changed: JobSpec, tmp_path: Path
) -> None:
    simulate(SHARED_LINK).write(tmp_path)
    found = predict(context_of(tmp_path, workers=1), asked)
    truth = step_time_ns(changed)
    assert found.low_ns <= truth <= found.high_ns
    assert found.mid_ns == pytest.approx(truth, rel=0.03)


def test_large_buckets_of_one_size_on_a_slow_link_are_not_called_too_small(tmp_path: Path) -> None:
    simulate(SHARED_LINK).write(tmp_path)
    assert "ddp-buckets" not in [finding.rule for finding in advised(tmp_path).findings]


@pytest.mark.parametrize("on_devices", [True, False])
def test_threads_that_are_slow_to_send_are_slow_to_begin_as_well(on_devices: bool, tmp_path: Path) -> None:
    """Each all-reduce takes six times what the cost model says. One of twenty times the size pays its start once:
    on CPUs six times the usual one, on devices, whose network is slow, as long as ever.
    """
    simulate(JobSpec(ranks=2, steps=6) if on_devices else cpu_job(ranks=2, steps=6)).write(tmp_path)
    context = context_of(tmp_path)
    ops = [op for op in editable_schedules(context.result, context.recorded).issued() if op.collective.bytes]
    model = context.model_of(ops[0].collective.group, ops[0].collective.kind)
    assert model is not None
    sizes = [op.collective.bytes or 0 for op in ops]
    for op, size in zip(ops, sizes, strict=True):
        op.transfer_ns = 6 * (model.alpha_ns + model.slope * size)
    (found,) = context.transfers_among_ns(ops, [20 * sizes[0]])
    of_bytes = model.slope * 20 * sizes[0]
    if on_devices:
        usual = model.slope * sum(sizes)
        assert found == pytest.approx(model.alpha_ns + of_bytes * (6 * usual + 5 * model.alpha_ns * len(ops)) / usual)
    else:
        assert found == pytest.approx(6 * (model.alpha_ns + of_bytes))
