"""``fsdp.reduce_dtype`` against the emulated job that reduces gradients in 16 bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perfscope.analyzers.whatif.change import BadSetting, CannotReplay
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.whatif import context_of
from tests.emulator.changes import apply
from tests.emulator.emulate import emulate, step_ns
from tests.emulator.spec import Job, Model, Network

HALF = {"fsdp.reduce_dtype": "bf16"}
EXPOSED = Job(
    strategy="fsdp", ranks=2, ranks_per_host=1, network=Network(between_gbps=20.0),
    model=Model(blocks=4, tokens=2048),
)  # fmt: skip


@pytest.mark.parametrize(
    "job",
    [
        EXPOSED,
        replace(EXPOSED, microbatches=2),
        replace(EXPOSED, version=1, backward_prefetch=False),
        replace(EXPOSED, reshard=False, noise=0.03),
    ],
    ids=["version 2", "two micro-batches", "version 1, late gathers", "parameters kept"],
)
def test_half_the_bytes_of_gradients(job: Job, tmp_path: Path) -> None:
    changed = apply(job, HALF)
    assert changed is not None
    truth = step_ns(changed.job)
    assert truth < 0.9 * step_ns(job)  # else little shows
    emulate(job).write(tmp_path)
    found = predict(context_of(tmp_path, workers=1), HALF)
    assert found.mid_ns == pytest.approx(truth, rel=0.01)
    assert found.low_ns <= truth <= found.high_ns


def test_it_is_refused_where_gradients_have_16_bits_or_are_not_fsdp_s(tmp_path: Path) -> None:
    half, ddp = tmp_path / "half", tmp_path / "ddp"
    half.mkdir()
    ddp.mkdir()
    emulate(replace(EXPOSED, gradient_bytes=2)).write(half)
    with pytest.raises(CannotReplay, match="16 bits already"):
        predict(context_of(half, workers=1), HALF)
    emulate(replace(EXPOSED, strategy="ddp")).write(ddp)
    context = context_of(ddp, workers=1)
    with pytest.raises(CannotReplay, match="no reductions of FSDP's gradients"):
        predict(context, HALF)
    with pytest.raises(BadSetting, match="write bf16 or fp16"):
        predict(context, {"fsdp.reduce_dtype": "int8"})
