"""FSDP that reduces gradients in fp32 while it gathers parameters in 16 bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

import perfscope
from perfscope.analyzers.rules.communication import fsdp_reduce_dtype
from perfscope.analyzers.rules.context import RuleContext
from perfscope.results.findings import Prediction
from perfscope.results.rows import CollectiveRow
from tests.analyzers.rules.jobs import MIB, STEP_US, breakdown, changed, context, runs
from tests.emulator.emulate import emulate, step_ns
from tests.emulator.spec import Job, Model, Network


def sharded(gathered: str = "bfloat16", reduced: str = "float32", saves_us: float = 10_000.0) -> RuleContext:
    """Steps of 100 ms with 20 ms of exposed transfer."""
    rows = tuple(
        CollectiveRow(
            group="0", ranks=(0, 1), kind=kind, dtype=dtype, bytes=40 * MIB, count=160, transfer_us=900.0, wait_us=0.0,
            algbw_gbps=1.0, busbw_gbps=1.0, last_arriver={},
        )
        for kind, dtype in (("all_gather", gathered), ("reduce_scatter", reduced))
    )  # fmt: skip

    def predict(change: Mapping[str, str]) -> Prediction:
        step_us = STEP_US - saves_us * ("fsdp.reduce_dtype" in change)
        return Prediction(low=step_us, mid=step_us, high=step_us)

    ranks = [breakdown(rank, exposed_comm_transfer=20_000.0) for rank in (0, 1)]
    return changed(context(*ranks, collectives=rows, strategy="fsdp"), predict=predict)


@pytest.mark.parametrize(
    ("version", "typed"),
    [
        (1, "mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)"),
        (2, "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)"),
    ],
)
def test_the_type_of_the_parameters_is_advised_as_each_version_writes_it(version: int, typed: str) -> None:
    finding = fsdp_reduce_dtype.evaluate(changed(sharded(), runs=runs(2, fsdp={"version": version})))
    assert finding is not None
    assert finding.whatif == {"fsdp.reduce_dtype": "bf16"}
    assert typed in finding.action.how
    assert "Precision" in (finding.action.costs or "")


@pytest.mark.parametrize(
    "case",
    [
        sharded(gathered="float32"),  # mixed precision as a whole is another rule's
        sharded(reduced="bfloat16"),
        sharded(saves_us=4_000.0),
        changed(sharded(), strategy="zero3"),
    ],
    ids=["all in fp32", "all in bf16", "little to save", "DeepSpeed"],
)
def test_silent(case: RuleContext) -> None:
    assert fsdp_reduce_dtype.evaluate(case) is None


def test_what_is_promised_comes_true_in_the_emulated_job(tmp_path: Path) -> None:
    job = Job(
        strategy="fsdp", ranks=2, ranks_per_host=1, network=Network(between_gbps=20.0),
        model=Model(blocks=4, tokens=2048),
    )  # fmt: skip
    emulate(job).write(tmp_path)
    (finding,) = (one for one in perfscope.analyze(tmp_path).findings if one.rule == fsdp_reduce_dtype.RULE)
    assert finding.predicted_step_us is not None
    truth = step_ns(replace(job, gradient_bytes=2)) / 1e3
    assert finding.predicted_step_us.mid == pytest.approx(truth, rel=0.01)
