"""``ddp.find_unused_parameters=false`` on jobs of the emulator whose DDP searches the graph after each forward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import perfscope
from perfscope.analyzers.rules.communication import unused_parameters
from perfscope.analyzers.rules.host import launch_bound
from perfscope.analyzers.whatif.change import CannotReplay
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.whatif import context_of
from tests.emulator import MS, US, Cpu, Job, Model, Recording, emulate, step_ns
from tests.emulator.changes import apply

SEARCHES = Job(
    ranks=2, search_ns=4 * MS, noise=0.0, cpu=Cpu(python_ns=10 * US, operator_ns=10 * US), model=Model(blocks=4),
    item_every=1, recording=Recording(steps=4),
)  # fmt: skip
AHEAD = replace(SEARCHES, search_ns=MS, item_every=0, cpu=Cpu(), model=Model(blocks=4, tokens=8192))


@pytest.mark.parametrize("job", [SEARCHES, replace(SEARCHES, recording=Recording(steps=6, run=True)), AHEAD])
def test_the_step_without_the_search(job: Job, tmp_path: Path) -> None:
    """Where the host is ahead of its device, the search costs nothing."""
    emulated = emulate(job)
    emulated.write(tmp_path)
    truth = step_ns(replace(job, search_ns=0)) / emulated.step_ns
    assert (truth < 0.85) is (job is not AHEAD)
    found = predict(context_of(tmp_path), unused_parameters.NO_SEARCH)
    assert found.mid_ns / found.measured_ns == pytest.approx(truth, rel=0.02)
    assert found.low_ns / found.measured_ns <= truth <= found.high_ns / found.measured_ns


def test_faster_launches_leave_the_search_as_it_is(tmp_path: Path) -> None:
    job = replace(
        SEARCHES, item_every=0, model=Model(blocks=4, tokens=512), cpu=Cpu(python_ns=40 * US, operator_ns=40 * US)
    )
    emulated = emulate(job)
    emulated.write(tmp_path)
    summary = perfscope.analyze(tmp_path, workers=1)
    findings = {each.rule: each for each in summary.findings}
    searching, launching = findings[unused_parameters.RULE], findings[launch_bound.RULE]
    assert searching.whatif == unused_parameters.NO_SEARCH
    for finding, change in ((searching, unused_parameters.NO_SEARCH), (launching, {"host.launch": "0"})):
        quick = apply(job, change)
        assert quick is not None
        assert finding.predicted_step_us is not None
        truth = step_ns(quick.job) / emulated.step_ns * summary.job.step_time_us
        assert finding.predicted_step_us.mid == pytest.approx(truth, rel=0.05)


def test_where_nothing_is_searched_there_is_nothing_to_leave_out(tmp_path: Path) -> None:
    emulate(replace(SEARCHES, search_ns=0)).write(tmp_path)
    with pytest.raises(CannotReplay, match="no search of DistributedDataParallel's"):
        predict(context_of(tmp_path), unused_parameters.NO_SEARCH)
