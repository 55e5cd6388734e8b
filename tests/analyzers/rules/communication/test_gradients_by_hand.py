"""Gradients reduced one by one after the backward: jobs of the emulator, read as a user would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from perfscope.analyzers.rules import unprofiled
from perfscope.analyzers.rules.communication import gradients_by_hand
from perfscope.results.findings import Finding, Predict, Prediction
from perfscope.results.summary import Summary
from tests.analyzers.measured import advised
from tests.analyzers.rules.jobs import changed, read
from tests.emulator.emulate import emulate, step_ns
from tests.emulator.model import parameters
from tests.emulator.spec import Job, Model, Network, Recording

LOOP = Job(strategy="manual", model=Model(blocks=4), recording=Recording(steps=4))
SLOW = replace(LOOP, network=Network(gbps=15.0))

Analyzed = Callable[[Job], Summary]


@pytest.fixture(scope="module")
def analyzed(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    made: dict[Job, Summary] = {}

    def analyze(job: Job) -> Summary:
        if job not in made:
            folder: Path = tmp_path_factory.mktemp("job")
            emulate(job).write(folder)
            made[job] = advised(folder)
        return made[job]

    return analyze


def found(summary: Summary) -> Finding | None:
    return next((finding for finding in summary.findings if finding.rule == gradients_by_hand.RULE), None)


@pytest.mark.parametrize("job", [LOOP, SLOW], ids=["fast links", "slow links"])
def test_it_fires_with_the_step_that_ddp_would_have(analyzed: Analyzed, job: Job) -> None:
    finding = found(analyzed(job))
    assert finding is not None
    assert (finding.obtained, finding.whatif) == ("replayed", {"gradients.reduce": "ddp"})
    assert finding.predicted_step_us is not None
    assert finding.predicted_step_us.mid == pytest.approx(step_ns(replace(job, strategy="ddp")) / 1e3, rel=0.05)
    (count,) = [one.value for one in finding.evidence if one.what == "all-reduces per step"]
    assert count == job.model.blocks * len(parameters(job))
    assert "DistributedDataParallel(model" in finding.action.how
    assert "_flatten_dense_tensors" in finding.action.how


def test_both_ways_are_of_the_step_without_the_profiler(tmp_path: Path) -> None:
    """Of 100 ms with the profiler DDP takes 60 and one all-reduce 70; of 50 without it they take 20 and 26."""
    emulate(LOOP).write(tmp_path)
    case = changed(
        read(tmp_path).context, step_time_us=100e3, unprofiled_step_us=50e3, predict=_takes(ddp=60e3, flat=70e3),
        predict_unprofiled=_takes(ddp=20e3, flat=26e3),
    )  # fmt: skip
    (finding,) = unprofiled((gradients_by_hand.evaluate(case),), case)
    assert finding.predicted_step_us is not None
    assert finding.predicted_step_us.mid == 20e3
    assert "reduce once (predicted: 26.0 ms per step)" in finding.action.how
    # What is quicker without the profiler is advised, whatever it is with it.
    case = changed(case, predict_unprofiled=_takes(ddp=26e3, flat=20e3))
    finding = gradients_by_hand.evaluate(case)
    assert finding is not None
    assert finding.whatif == {"gradients.reduce": "flat"}
    assert finding.action.how.startswith("Reduce all gradients at once, in place of the loop")
    assert "Or let DDP overlap the backward (predicted: 26.0 ms per step)" in finding.action.how


def _takes(**step_us: float) -> Predict:
    def predict(settings: Mapping[str, str]) -> Prediction:
        mid = step_us[settings["gradients.reduce"]]
        return Prediction(low=mid, mid=mid, high=mid)

    return predict


def test_what_the_backward_waits_for_follows_no_backward(analyzed: Analyzed) -> None:
    """Hooks of the backward reduce each gradient: there is no loop to take out, and nothing to reduce at once."""
    job = replace(SLOW, in_hooks=True)
    summary = analyzed(job)
    reduced = sum(row.count for row in summary.collectives if row.kind == "all_reduce") / len(summary.job.steps)
    assert reduced == job.model.blocks * len(parameters(job))  # as many as a loop reduces
    assert found(summary) is None


def test_only_those_after_the_backward_count(tmp_path: Path) -> None:
    """Of 24 all-reduces per step 16, and then 20, are in the backward: a loop has 8, and then too few."""
    emulate(LOOP).write(tmp_path)
    case = changed(read(tmp_path).context, predict=_takes(ddp=1.0, flat=2.0))
    assert LOOP.model.blocks * len(parameters(LOOP)) == 24
    some = gradients_by_hand.evaluate(changed(case, reduced_in_backward=16.0))
    assert some is not None
    assert some.title.startswith("8 all-reduces of single gradients follow the backward")
    assert gradients_by_hand.evaluate(changed(case, reduced_in_backward=20.0)) is None


def test_a_wrapper_that_shards_is_not_replaced(tmp_path: Path) -> None:
    """As many bytes of parameters are gathered in the same group: the optimizer's states are sharded."""
    emulate(LOOP).write(tmp_path)
    case = changed(read(tmp_path).context, predict=_takes(ddp=1.0, flat=2.0))
    assert gradients_by_hand.evaluate(case) is not None
    reduced = [row for row in case.summary.collectives if row.kind == "all_reduce"]
    gathered = [replace(row, kind="all_gather") for row in reduced]
    case = replace(case, summary=replace(case.summary, collectives=(*case.summary.collectives, *gathered)))
    assert gradients_by_hand.evaluate(case) is None


def test_parameters_that_are_averaged_are_no_gradients(analyzed: Analyzed) -> None:
    """Local SGD: DistributedDataParallel would train another way, and reduce more often."""
    summary = analyzed(replace(LOOP, averages=True))
    assert summary.job.strategies == ("data",)
    about = {"gradients-by-hand", "late-gradients", "gradient-compression", "batch-size", "ddp-bucket-size"}
    assert not about & {finding.rule for finding in summary.findings}


def test_it_is_the_first_advice_where_it_costs_most(analyzed: Analyzed) -> None:
    assert analyzed(replace(LOOP, network=Network(latency_ns=120_000))).findings[0].rule == gradients_by_hand.RULE


@pytest.mark.parametrize(
    "job",
    [
        replace(SLOW, strategy="ddp"),
        replace(SLOW, strategy="flat"),
        replace(SLOW, strategy="fsdp"),
        replace(SLOW, strategy="tensor", tensor=2),
        replace(SLOW, model=Model(blocks=1)),
        replace(LOOP, model=Model(tokens=32_768, width=512)),
    ],
    ids=["ddp", "flat", "fsdp", "tensor", "few", "little of the step"],
)
def test_it_is_silent_elsewhere(analyzed: Analyzed, job: Job) -> None:
    assert found(analyzed(job)) is None


@pytest.mark.parametrize(
    "recording",
    [Recording(steps=4, metadata="none"), Recording(steps=4, missing=(2,))],
    ids=["no sizes", "rank missing"],
)
def test_without_sizes_or_ranks_it_is_bounded(analyzed: Analyzed, recording: Recording) -> None:
    finding = found(analyzed(replace(SLOW, recording=recording)))
    assert finding is not None
    assert (finding.obtained, finding.confidence, finding.whatif) == ("bounded", "low", {})
    gain = step_ns(SLOW) / step_ns(replace(SLOW, strategy="ddp")) - 1
    assert finding.ceiling is not None
    assert finding.ceiling >= gain


RETURNED = replace(SLOW, returned=True)


def test_gradients_reduced_to_one_rank_and_broadcast_back_are_data_parallel(analyzed: Analyzed) -> None:
    summary = analyzed(RETURNED)
    assert summary.job.strategies == ("data",)
    finding = found(summary)
    assert finding is not None
    assert finding.title.startswith(
        "24 reductions of single gradients to one rank, and as many broadcasts back, follow"
    )
    assert finding.predicted_step_us is not None
    assert finding.whatif == {"gradients.reduce": "ddp"}
    ddp = replace(RETURNED, returned=False, strategy="ddp")
    assert finding.predicted_step_us.mid == pytest.approx(step_ns(ddp) / 1e3, rel=0.05)
    assert "take the loop of reduce and broadcast calls out" in finding.action.how
    assert "all_reduce calls" not in finding.action.how
    sent = {one.what: one.value for one in finding.evidence}
    assert sent["reductions with broadcasts back per step"] == 24
    assert sent["gradient bytes per step"] == 4 * RETURNED.model.blocks * sum(parameters(RETURNED))


def test_they_are_bounded_without_all_ranks(analyzed: Analyzed) -> None:
    finding = found(analyzed(replace(RETURNED, recording=Recording(steps=4, missing=(2,)))))
    assert finding is not None
    assert (finding.obtained, finding.confidence, finding.whatif) == ("bounded", "low", {})
    gain = step_ns(RETURNED) / step_ns(replace(RETURNED, returned=False, strategy="ddp")) - 1
    assert finding.ceiling is not None
    assert finding.ceiling >= gain


def test_few_of_them_are_no_loop_over_parameters(tmp_path: Path) -> None:
    emulate(RETURNED).write(tmp_path)
    case = changed(read(tmp_path).context, predict=_takes(ddp=1.0, flat=2.0))
    assert gradients_by_hand.evaluate(changed(case, returned=4.0)) is not None
    assert gradients_by_hand.evaluate(changed(case, returned=3.0)) is None
