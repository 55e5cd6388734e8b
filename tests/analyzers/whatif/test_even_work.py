"""``ranks.work=even`` against the same job with even work: what is no work of a rank stays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.whatif import context_of
from tests.emulator.emulate import emulate, step_ns
from tests.emulator.spec import MS, Cause, Job, Model, Recording

JOB = Job(ranks=4, imbalance=0.15, model=Model(blocks=6, tokens=4096))
SLOW = Cause("slow compute", 1.3, (2,))


@pytest.mark.parametrize("shapes", [True, False])
@pytest.mark.parametrize("causes", [(), (SLOW,)], ids=["alike", "slow device"])
def test_a_slow_device_takes_longer_for_as_much_work(causes: tuple[Cause, ...], tmp_path: Path, *, shapes: bool):
    """By its FLOPs, or by what its optimizer takes, rank 2 is as slow as it is made, however many tokens it has."""
    job = replace(JOB, causes=causes, recording=Recording(shapes=shapes))
    emulate(job).write(tmp_path)
    found = predict(context_of(tmp_path), {"ranks.work": "even"})
    assert found.mid_ns == pytest.approx(step_ns(replace(job, evened=True)), rel=0.01)


def test_pauses_of_hosts_are_no_work(tmp_path: Path) -> None:
    """Rank 1 writes 15 ms of a log in every second step: that is left when all have as many tokens."""
    pause = Cause("pause", 15 * MS, (1,), every=2, how="log")
    job = replace(JOB, item_every=1, causes=(pause,))
    emulate(job).write(tmp_path)
    found = predict(context_of(tmp_path), {"ranks.work": "even"})
    cost_ns = step_ns(replace(job, evened=True)) - step_ns(replace(job, evened=True, causes=()))
    assert cost_ns > 0.2 * found.measured_ns
    assert found.mid_ns == pytest.approx(step_ns(replace(job, evened=True)), rel=0.02)
