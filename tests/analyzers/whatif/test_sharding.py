"""FSDP made worse or better by hand in the simulator, and predicted from the recording of the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from perfscope.analyzers.whatif.ask import context_of
from perfscope.analyzers.whatif.change import BadSetting, CannotReplay, Context
from perfscope.analyzers.whatif.predict import predict
from tests.analyzers.whatif.fsdp_variants import gathers_late, keeps_parameters, waits_for_reductions
from tests.generator import JobSpec, ModelSpec, NetworkSpec, simulate

SPEC = JobSpec(
    ranks=4, strategy="fsdp", model=ModelSpec(layers=8, tokens=4096), end_sync=True,
    network=NetworkSpec(busbw_gbps=60.0, alpha_ns=50_000),
)  # fmt: skip


def recorded(folder: Path, spec: JobSpec, change: Callable[[pytest.MonkeyPatch], None] | None = None) -> Context:
    with pytest.MonkeyPatch.context() as patch:
        if change is not None:
            change(patch)
        simulate(spec).write(folder)
    return context_of(folder)


def truth(spec: JobSpec, change: Callable[[pytest.MonkeyPatch], None] | None = None) -> float:
    with pytest.MonkeyPatch.context() as patch:
        if change is not None:
            change(patch)
        return simulate(spec).truth.step_time_ns


def test_gathering_one_layer_ahead(tmp_path: Path) -> None:
    found = predict(recorded(tmp_path, SPEC, gathers_late), {"fsdp.prefetch": "1"})
    assert found.mid_ns == pytest.approx(truth(SPEC), rel=0.05)
    assert found.mid_ns < 0.9 * found.measured_ns


def test_keeping_parameters_for_the_backward(tmp_path: Path) -> None:
    spec = replace(SPEC, network=NetworkSpec(busbw_gbps=20.0, alpha_ns=50_000))
    found = predict(recorded(tmp_path, spec), {"fsdp.reshard_after_forward": "false"})
    assert found.mid_ns == pytest.approx(truth(spec, keeps_parameters), rel=0.05)
    assert found.mid_ns < 0.95 * found.measured_ns


def test_reducing_beside_the_backward(tmp_path: Path) -> None:
    found = predict(recorded(tmp_path, SPEC, waits_for_reductions), {"zero.overlap_comm": "true"})
    assert found.mid_ns == pytest.approx(truth(SPEC), rel=0.05)
    assert found.mid_ns < 0.95 * found.measured_ns


def test_accumulation_reduces_once_for_several_batches(tmp_path: Path) -> None:
    spec = replace(SPEC, strategy="ddp", network=NetworkSpec(busbw_gbps=20.0, alpha_ns=50_000))
    context = recorded(tmp_path, spec)
    of_four = truth(replace(spec, microbatches=4)) / 4
    found = predict(context, {"batch.accumulation": "4"})
    # The simulated job's optimizer steps once in four batches, the replayed one's each time.
    assert found.mid_ns == pytest.approx(of_four, rel=0.06)
    assert found.mid_ns < 0.9 * found.measured_ns
    with pytest.raises(CannotReplay, match="only 8 steps"):
        predict(context, {"batch.accumulation": "9"})


@pytest.mark.parametrize(
    ("setting", "value", "why"),
    [
        ("fsdp.prefetch", "1", "gathers of parameters"),
        ("fsdp.reshard_after_forward", "false", "not gathered twice"),
        ("fsdp.reshard_after_forward", "true", "not made"),
        ("zero.overlap_comm", "true", "nothing waits"),
        ("zero.overlap_comm", "false", "not recorded"),
    ],
)
def test_what_cannot_be_replayed_is_refused(tmp_path: Path, setting: str, value: str, why: str) -> None:
    context = recorded(tmp_path, replace(SPEC, strategy="ddp", steps=3))
    with pytest.raises(CannotReplay, match=why):
        predict(context, {setting: value})


@pytest.mark.parametrize(
    ("setting", "value"),
    [("fsdp.prefetch", "0"), ("fsdp.prefetch", "9"), ("zero.overlap_comm", "1"), ("batch.accumulation", "1")],
)
def test_values_that_make_no_sense(tmp_path: Path, setting: str, value: str) -> None:
    context = recorded(tmp_path, replace(SPEC, steps=3))
    with pytest.raises(BadSetting, match=setting):
        predict(context, {setting: value})
