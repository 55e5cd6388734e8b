"""Mixed precision: single-precision matrix kernels on devices that have tensor cores for half of it."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from perfscope.analyzers.rank.work.tables import SINGLE_OR_TF32
from perfscope.analyzers.rules.compute import mixed_precision
from tests.analyzers.rules.jobs import QUICK, STEP_US, Analyzed, analyze, breakdown, context, kernel, runs
from tests.generator import ModelSpec, step_time_ns

V100 = "Tesla V100-SXM2-16GB"


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    """float32 at 8 TFLOP/s on a V100, which has no TF32."""
    spec = replace(QUICK, model=ModelSpec(tokens=256, element_bytes=4, flops_per_ns=8_000.0), device_name=V100)
    with mock.patch("tests.generator.training.GEMM", "volta_sgemm_128x64_nn"):
        return analyze(spec, tmp_path_factory.mktemp("single"))


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    return analyze(QUICK, tmp_path_factory.mktemp("half"))


def by_hand(dtype: str, us: float = 40_000.0, device: str = "NVIDIA A100-SXM4-80GB", **others):
    kernels = (
        kernel("gemm", us, dtype=dtype, operator="aten::mm", operator_class="matrix"),
        kernel("add", STEP_US - us, operator_class="elementwise"),
    )
    return context(breakdown(0), kernels=kernels, devices=(device,), **others)


def test_single_precision_fires_with_amdahl_s_law_as_ceiling(single):
    (finding,) = [found for found in single.summary.findings if found.rule == mixed_precision.RULE]
    step = single.summary.job.step_time_us
    matrix = sum(row.us_per_step for row in single.summary.kernels if row.operator_class == "matrix")
    saved = matrix * (1 - 15.7 / 125.0)
    assert finding.ceiling == pytest.approx(step / (step - saved) - 1, rel=0.01)
    assert finding.obtained == "bounded"
    assert (finding.action.old, finding.action.new) == ("float32", "float16")
    assert "torch.autocast" in finding.action.how
    assert "GradScaler" in finding.action.how


def test_matrix_products_at_the_other_peak_s_pace_gain_no_more_than_the_ceiling(single):
    """And not much less: most of this step is matrix products."""
    (finding,) = [found for found in single.summary.findings if found.rule == mixed_precision.RULE]
    model = ModelSpec(tokens=256, element_bytes=4, flops_per_ns=8_000.0 * 125.0 / 15.7)
    fixed_us = step_time_ns(replace(QUICK, model=model, device_name=V100)) / 1e3
    gain = single.summary.job.step_time_us / fixed_us - 1
    assert 0.5 * finding.ceiling < gain <= finding.ceiling


def test_bf16_is_silent(half):
    assert mixed_precision.RULE not in half.rules


@pytest.mark.parametrize(("dtype", "share"), [("float32", 1 - 19.5 / 312), ("tf32", 0.5)])
def test_the_ratio_of_the_peaks(dtype, share):
    finding = mixed_precision.evaluate(by_hand(dtype))
    assert finding is not None
    assert finding.ceiling == pytest.approx(1 / (1 - 0.4 * share) - 1)
    assert finding.action.new == "bfloat16"


def test_tf32_is_offered_where_it_is_not_used_yet():
    assert 'set_float32_matmul_precision("high")' in mixed_precision.evaluate(by_hand("float32")).action.how
    assert "set_float32_matmul_precision" not in mixed_precision.evaluate(by_hand("tf32")).action.how


def test_a_name_that_leaves_tf32_open_is_settled_by_the_run_or_not_at_all():
    assert mixed_precision.evaluate(by_hand(SINGLE_OR_TF32)) is None
    recorded = runs(1, precision={"float32_matmul_precision": "highest"})
    assert (found := mixed_precision.evaluate(by_hand(SINGLE_OR_TF32, runs=recorded))) is not None
    assert found.action.old == "float32"
    recorded = runs(1, precision={"float32_matmul_precision": "high"})
    assert (found := mixed_precision.evaluate(by_hand(SINGLE_OR_TF32, runs=recorded))) is not None
    assert found.action.old == "tf32"


@pytest.mark.parametrize("device", [V100, "Tesla V100-DGXS-32GB"])
def test_a_device_without_tf32_leaves_nothing_open(device):
    finding = mixed_precision.evaluate(by_hand(SINGLE_OR_TF32, device=device))
    assert finding is not None
    assert (finding.action.old, finding.action.new) == ("float32", "float16")
    assert finding.ceiling == pytest.approx(1 / (1 - 0.4 * (1 - 15.7 / 125.0)) - 1)


def test_little_of_the_step_and_unknown_devices_are_silent():
    assert mixed_precision.evaluate(by_hand("float32", us=5_000.0)) is None
    assert mixed_precision.evaluate(by_hand("float32", device="NVIDIA A7000")) is None
    assert mixed_precision.evaluate(by_hand("float64")) is None


@pytest.mark.parametrize(
    ("settings", "typed"),
    [
        ({"transformers": {"bf16": False}}, "--bf16 True"),
        ({"lightning": {"precision": "32-true"}}, 'Trainer(precision="bf16-mixed")'),
        ({"lightning": {"fabric": True}}, 'fabric = Fabric(precision="bf16-mixed")'),
        ({"accelerate": {"mixed_precision": "no"}}, "mixed_precision: bf16"),
        ({"deepspeed": {"engine": "DeepSpeedEngine"}}, '"bf16": {"enabled": true}'),
        ({"megatron": {"bf16": False}}, "--bf16"),
        ({"fsdp": {"version": 2}}, "MixedPrecisionPolicy(param_dtype=torch.bfloat16"),
    ],
)
def test_the_framework_s_own_words(settings, typed):
    finding = mixed_precision.evaluate(by_hand("float32", runs=runs(1, **settings)))
    assert finding is not None
    assert typed in finding.action.how


def test_products_outside_of_autocast_are_named():
    finding = mixed_precision.evaluate(by_hand("float32", runs=runs(1, amp={"dtype": "bfloat16"})))
    assert finding is not None
    assert "Autocast is already on, but these products run outside it (aten::mm)" in finding.action.how
