"""``ddp.no_sync`` and ``fsdp.no_sync`` on traces of the second simulator, with what is reduced recorded and without."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.whatif.change import CannotReplay
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.schedules import extra_work
from perfscope.analyzers.whatif.schedules.recorded import editable_schedules
from perfscope.analyzers.whatif.schedules.steps import StepOps
from perfscope.analyzers.whatif.whatif import context_of
from tests.emulator.changes import apply
from tests.emulator.emulate import emulate, step_ns
from tests.emulator.spec import MS, Job, Loader, Model, Network, Recording
from tests.traces import TraceBuilder

ONCE = Job(
    ranks=2, ranks_per_host=1, microbatches=3, noise=0.01, item_every=0, model=Model(blocks=4, tokens=2048),
    recording=Recording(steps=4),
)  # fmt: skip


@pytest.mark.parametrize("metadata", ["kernel", "none"])
def test_each_of_three_micro_batches_reduces(tmp_path: Path, metadata: str) -> None:
    job = replace(ONCE, no_sync=False, recording=Recording(steps=4, metadata=metadata))
    emulate(job).write(tmp_path)
    found = predict(context_of(tmp_path), {"ddp.no_sync": "true"})
    truth = step_ns(ONCE)
    assert truth < 0.95 * step_ns(job)
    assert found.mid_ns == pytest.approx(truth, rel=0.02)
    assert found.low_ns <= truth <= found.high_ns


def test_one_bucket_of_each_of_two_micro_batches_that_take_unequally_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first bucket is issued after half of a step's work, now a little earlier, now later; and in one step of eight
    so much later that both could be of the last micro-batch.
    """
    once = replace(ONCE, microbatches=2, noise=0.3, bucket_mb=400, one_bucket_limit=True, recording=Recording(steps=8))
    job = replace(once, no_sync=False)
    emulate(job).write(tmp_path)
    truth = step_ns(once)
    assert truth < 0.8 * step_ns(job)
    context = context_of(tmp_path)
    assert predict(context, {"ddp.no_sync": "true"}).mid_ns == pytest.approx(truth, rel=0.02)
    shown, odd = StepOps.in_every_part, int(context.result.steps[3])
    monkeypatch.setattr(StepOps, "in_every_part", lambda ops, *asked: ops.step != odd and shown(ops, *asked))
    assert predict(context, {"ddp.no_sync": "true"}).mid_ns == pytest.approx(truth, rel=0.02)


def test_backward_passes_without_steps_may_be_steps(tmp_path: Path) -> None:
    emulate(replace(ONCE, no_sync=False)).write(tmp_path)
    for path in tmp_path.iterdir():
        document = json.loads(path.read_bytes())
        kept = [e for e in document["traceEvents"] if not e.get("name", "").startswith(("ProfilerStep#", "Optimizer."))]
        for number, each in enumerate(kept):  # no kernels that repeat show steps either
            each["name"] += f"_{number}" * (each.get("cat") == "kernel")
        path.write_text(json.dumps({**document, "traceEvents": kept}))
    with pytest.raises(CannotReplay, match="no steps were found"):
        predict(context_of(tmp_path), {"ddp.no_sync": "true"})


LAUNCHES = Job(ranks=2, noise=0.0, model=Model(blocks=4, tokens=512, width=512), loader=Loader(load_ns=1 * MS))
"""Hosts set the pace, and copying each gradient into its bucket is much of what they do in a backward."""


def test_where_no_copies_are_recorded_nothing_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(LAUNCHES).write(tmp_path)
    context = context_of(tmp_path).beside_hosts
    schedules = editable_schedules(context.result, context.recorded, with_hosts=context.with_hosts)
    nothing = replace(context.result.partials[0].bucket_copies, host=Intervals.empty(), device=Intervals.empty())
    before = [(op.own_ns, op.lag_ns) for op in schedules.ops[0]]
    monkeypatch.setattr(extra_work, "_shares", None)
    extra_work.leave_out(schedules, context.result, 0, nothing)
    assert [(op.own_ns, op.lag_ns) for op in schedules.ops[0]] == before


def test_a_host_does_not_copy_what_is_not_reduced(tmp_path: Path) -> None:
    for settings, job in (
        ({"ddp.no_sync": "true"}, replace(LAUNCHES, microbatches=3, no_sync=False)),
        ({"batch.accumulation": "2"}, LAUNCHES),
    ):
        folder = tmp_path / next(iter(settings))
        folder.mkdir()
        emulate(job).write(folder)
        changed = apply(job, settings)
        assert changed is not None
        truth = step_ns(changed.job) / changed.batches
        assert predict(context_of(folder), settings).mid_ns == pytest.approx(truth, rel=0.02)


def test_accumulating_in_three_steps_of_hosts_that_are_ahead(tmp_path: Path) -> None:
    """They are ahead of their devices in every second batch too, after the step that has reduced."""
    network = Network(gbps=15.0)
    model = Model(blocks=4, tokens=1024, width=512)
    job = Job(ranks=2, noise=0.0, model=model, network=network, item_every=5, recording=Recording(steps=3))
    emulate(job).write(tmp_path)
    found = predict(context_of(tmp_path), {"batch.accumulation": "2"})
    changed = apply(replace(job, item_every=0), {"batch.accumulation": "2"})
    assert changed is not None
    assert found.mid_ns == pytest.approx(step_ns(changed.job) / 2, rel=0.05)


def test_copies_are_what_the_reducer_marks() -> None:
    """Two gradients are copied into a bucket, one in each step, and the first one back."""
    builder = TraceBuilder().step(1, 0, 1_000).step(2, 1_000, 2_000).launched("gemm", 10, 20, 100)
    for name, begin in (
        ("torch::distributed::reducer::mul_out", 200),
        ("torch.distributed.ddp.reducer::copy_bucket_to_grad", 400),
        ("torch::distributed::reducer::mul_out", 1_200),
    ):
        builder.op(name, begin, begin + 30).launched("copy", begin + 10, begin + 40, begin + 50)
    copies = analyze_rank(builder.launched("gemm", 1_900, 1_910, 1_950).build()).bucket_copies
    assert copies.count.tolist() == [2, 1]
    assert (copies.host.start_ns.tolist(), copies.host.end_ns.tolist()) == ([200, 400, 1_200], [230, 430, 1_230])
    assert (copies.device.start_ns.tolist(), copies.device.end_ns.tolist()) == ([240, 440, 1_240], [250, 450, 1_250])


@pytest.mark.parametrize("metadata", ["kernel", "none"])
def test_only_the_last_one_reduces(tmp_path: Path, metadata: str) -> None:
    emulate(replace(ONCE, recording=Recording(steps=4, metadata=metadata))).write(tmp_path)
    with pytest.raises(CannotReplay, match="already reduced once per step"):
        predict(context_of(tmp_path), {"ddp.no_sync": "true"})


@pytest.mark.parametrize(
    ("name", "clears"),
    [("Optimizer.zero_grad#SGD.zero_grad", True), ("Optimizer.step#SAM.step", True), ("Optimizer.profile", False)],
)
def test_gradients_that_are_cleared_in_between_do_not_accumulate(tmp_path: Path, name: str, clears: bool) -> None:
    """As in sharpness-aware minimization, whose second pass is at other parameters: each pass has to reduce."""
    job = replace(ONCE, no_sync=False, recording=Recording(steps=4))
    emulate(job).write(tmp_path)
    for path in tmp_path.iterdir():
        _with_range_after_first_backward(path, name)
    for setting in ("ddp.no_sync", "batch.accumulation"):
        context, settings = context_of(tmp_path), {setting: "true" if setting == "ddp.no_sync" else "2"}
        if clears:
            with pytest.raises(CannotReplay, match="none accumulate"):
                predict(context, settings)
        elif setting == "ddp.no_sync":
            assert predict(context, settings).mid_ns < 0.95 * predict(context, {}).mid_ns


def _with_range_after_first_backward(path: Path, name: str) -> None:
    """Add a range of 1 µs to each step, before the second forward."""
    data = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    events = data["traceEvents"]
    steps = [event for event in events if event.get("name", "").startswith("ProfilerStep#")]
    forwards = [event for event in events if event.get("name") == "DistributedDataParallel.forward"]
    for step in steps:
        inside = [each for each in forwards if step["ts"] <= each["ts"] < step["ts"] + step["dur"]]
        second = sorted(inside, key=lambda event: event["ts"])[1:2]
        events += [{**each, "name": name, "ts": each["ts"] - 1.5, "dur": 1.0} for each in second]
    text = json.dumps(data).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


SHARDED = Job(
    strategy="fsdp", ranks=2, ranks_per_host=1, microbatches=3, noise=0.0, network=Network(gbps=20.0),
    model=Model(blocks=4, tokens=2048), recording=Recording(steps=4),
)  # fmt: skip


@pytest.mark.parametrize(
    "job",
    [
        SHARDED,
        replace(SHARDED, version=2, microbatches=2, reshard=False),
        replace(SHARDED, backward_prefetch=False, item_every=2),
        replace(SHARDED, noise=0.01, forward_prefetch=True),
        replace(SHARDED, recording=replace(SHARDED.recording, metadata="none")),
    ],
    ids=["FSDP1", "FSDP2, parameters kept", "gathered late", "gathered early", "sizes not recorded"],
)
def test_fsdp_reduces_after_the_last_micro_batch(job: Job, tmp_path: Path) -> None:
    emulated = emulate(job)
    emulated.write(tmp_path)
    changed = apply(job, {"fsdp.no_sync": "true"})
    assert changed is not None
    truth = step_ns(changed.job)
    assert truth < 0.95 * emulated.step_ns
    found = predict(context_of(tmp_path), {"fsdp.no_sync": "true"})
    # Without sizes it is not known what adding them up takes.
    assert found.mid_ns == pytest.approx(truth, rel=0.02 if job.recording.metadata != "none" else 0.05)
    assert found.low_ns <= truth <= found.high_ns


@pytest.mark.parametrize("job", [replace(SHARDED, microbatches=1), replace(SHARDED, scatters_once=True)])
def test_fsdp_that_reduces_once_is_refused(job: Job, tmp_path: Path) -> None:
    emulate(job).write(tmp_path)
    with pytest.raises(CannotReplay, match="already reduced once per step"):
        predict(context_of(tmp_path), {"fsdp.no_sync": "true"})


def test_only_fsdp_has_reductions_of_fsdp(tmp_path: Path) -> None:
    emulate(replace(ONCE, no_sync=False)).write(tmp_path)
    with pytest.raises(CannotReplay, match="no reductions of FSDP's gradients"):
        predict(context_of(tmp_path), {"fsdp.no_sync": "true"})
