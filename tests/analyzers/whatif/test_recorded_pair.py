"""One real job recorded with ``DataLoader(num_workers=0)`` and with ``4``: one predicted from the other."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.whatif import context_of

TRACES = Path(__file__).resolve().parents[3].parent / "shared" / "traces"


def test_workers_take_the_loading_out_of_a_real_step() -> None:
    without, with_workers = (TRACES / f"resnet50_workers_{number}" for number in (0, 4))
    if not without.is_dir():
        pytest.skip("the folder of real traces is not here")
    found = predict(context_of(without), {"dataloader.num_workers": "4"})
    start, end = context_of(with_workers).result.windows[0]
    # Two of its six steps are odd: the first waits for the workers' start, another 45 ms for a launch.
    usual_ns = median((end - start).tolist())
    assert found.mid_ns == pytest.approx(usual_ns, rel=0.08)
    assert found.low_ns <= usual_ns <= found.high_ns
