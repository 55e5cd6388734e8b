"""``ddp.no_sync`` on traces of the second simulator, with the sizes of what is reduced and without."""

from __future__ import annotations

import gzip
import json
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
