"""``ddp.no_sync`` on traces of the second simulator, with the sizes of what is reduced and without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perfscope.analyzers.whatif.change import CannotReplay
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.whatif import context_of
from tests.emulator.emulate import emulate
from tests.emulator.spec import Job, Model, Recording

ONCE = Job(ranks=2, ranks_per_host=1, microbatches=3, noise=0.01, item_every=0, model=Model(blocks=4, tokens=2048))


@pytest.mark.parametrize("metadata", ["kernel", "none"])
def test_each_of_three_micro_batches_reduces(tmp_path: Path, metadata: str) -> None:
    job = replace(ONCE, no_sync=False, recording=Recording(steps=4, metadata=metadata))
    emulate(job).write(tmp_path)
    found = predict(context_of(tmp_path), {"ddp.no_sync": "true"})
    truth = emulate(ONCE).step_ns
    assert truth < 0.95 * emulate(job).step_ns
    # The copies into buckets and back that go with the reductions stay in the prediction.
    assert found.mid_ns == pytest.approx(truth, rel=0.08)
    assert found.low_ns <= truth <= found.high_ns


@pytest.mark.parametrize("metadata", ["kernel", "none"])
def test_only_the_last_one_reduces(tmp_path: Path, metadata: str) -> None:
    emulate(replace(ONCE, recording=Recording(steps=4, metadata=metadata))).write(tmp_path)
    with pytest.raises(CannotReplay, match="already reduced once per step"):
        predict(context_of(tmp_path), {"ddp.no_sync": "true"})
