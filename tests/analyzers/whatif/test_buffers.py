"""``ddp.broadcast_buffers=false`` on jobs of the emulator that send buffers before each forward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import perfscope
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.rules.communication import ddp_buffers
from perfscope.analyzers.whatif.change import CannotReplay
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.whatif import context_of
from tests.emulator.emulate import emulate, step_ns
from tests.emulator.spec import Job, Model, Network, Recording
from tests.traces import TraceBuilder

CHANGE = {"ddp.broadcast_buffers": "false"}
SENDS = Job(
    ranks=2, buffers_mb=100.0, noise=0.0, network=Network(gbps=30.0), model=Model(blocks=4, tokens=2048), item_every=1,
    recording=Recording(steps=4),
)  # fmt: skip


@pytest.mark.parametrize("job", [SENDS, replace(SENDS, item_every=0, recording=Recording(steps=8, run=True))])
def test_a_forward_that_waits_for_no_buffers(job: Job, tmp_path: Path) -> None:
    emulated = emulate(job)
    emulated.write(tmp_path)
    truth = step_ns(replace(job, buffers_mb=0.0)) / emulated.step_ns
    assert truth < 0.85
    found = predict(context_of(tmp_path), CHANGE)
    assert found.mid_ns / found.measured_ns == pytest.approx(truth, rel=0.03)
    assert found.low_ns / found.measured_ns <= truth <= found.high_ns / found.measured_ns
    (finding,) = [each for each in perfscope.analyze(tmp_path, workers=1).findings if each.rule == ddp_buffers.RULE]
    assert finding.whatif == CHANGE
    assert "DistributedDataParallel(model, broadcast_buffers=False)" in finding.action.how


@pytest.mark.parametrize("job", [replace(SENDS, buffers_mb=0.0), replace(SENDS, buffers_mb=0.0, strategy="fsdp")])
def test_without_buffers_there_is_nothing_to_leave_out(job: Job, tmp_path: Path) -> None:
    emulate(job).write(tmp_path)
    with pytest.raises(CannotReplay, match="no broadcasts of DistributedDataParallel's buffers"):
        predict(context_of(tmp_path), CHANGE)


def test_copies_end_where_the_model_begins() -> None:
    """Two buffers go into one tensor and come back; the linear layer's own view is of the model, as is what follows."""
    builder = TraceBuilder().step(1, 0, 1_000).note("DistributedDataParallel.forward", 100, 900)
    builder.op("aten::flatten_dense_tensors", 110, 150).op("c10d::broadcast_", 160, 200)
    builder.op("aten::copy_", 300, 320).op("aten::slice", 322, 324).op("aten::copy_", 330, 350)
    builder.op("aten::linear", 400, 500).op("aten::copy_", 600, 650)
    copies = analyze_rank(builder.build()).buffer_copies
    assert (copies.host.start_ns.tolist(), copies.host.end_ns.tolist()) == ([100], [400])
    assert copies.count.tolist() == [1]
