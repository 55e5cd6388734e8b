"""``activations.recompute`` where forwards that run again send something, against the job simulated without them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.whatif import context_of
from tests.analyzers.rules.jobs import QUICK
from tests.generator import ModelSpec, NetworkSpec, simulate, step_time_ns
from tests.generator.spec import JobSpec

NOTHING_AGAIN = {"activations.recompute": "0"}
TENSOR = replace(QUICK, tensor=2, network=NetworkSpec(busbw_gbps=60.0), model=ModelSpec(tokens=2048))


@pytest.mark.parametrize("recompute", ["reentrant", "non_reentrant"])
@pytest.mark.parametrize(
    "job",
    [TENSOR, replace(TENSOR, ranks=2), replace(QUICK, strategy="fsdp")],
    ids=["tensor and data", "tensor", "gathers of FSDP stay"],
)
def test_a_forward_that_does_not_run_again_sends_nothing(job: JobSpec, recompute: str, tmp_path: Path) -> None:
    simulate(replace(job, recompute=recompute)).write(tmp_path)
    found = predict(context_of(tmp_path), NOTHING_AGAIN)
    truth_ns = step_time_ns(job)
    assert found.mid_ns == pytest.approx(truth_ns, rel=0.02)
    assert found.low_ns <= truth_ns <= found.high_ns


def test_a_part_of_them_sends_a_part_and_other_changes_go_together_with_it(tmp_path: Path) -> None:
    simulate(replace(TENSOR, recompute="reentrant")).write(tmp_path)
    context = context_of(tmp_path)
    half = predict(context, {"activations.recompute": "0.5"})
    none = predict(context, NOTHING_AGAIN)
    assert half.measured_ns - half.mid_ns == pytest.approx((none.measured_ns - none.mid_ns) / 2, rel=0.15)
    both = predict(context, {**NOTHING_AGAIN, "rank.1": "peers"})
    assert both.mid_ns == pytest.approx(none.mid_ns, rel=0.01)
