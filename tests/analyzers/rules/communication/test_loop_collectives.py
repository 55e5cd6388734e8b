"""Collectives that a training loop calls for itself: what they cost, and what is said about each kind."""

from __future__ import annotations

import dataclasses

import pytest

import perfscope
from perfscope.analyzers.job.tables.syncs import SyncRow
from perfscope.analyzers.rules.communication import loop_collectives
from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.host import host_syncs
from perfscope.results.findings import Prediction
from tests.analyzers.measured import advised
from tests.analyzers.rules.jobs import STEP_US, breakdown, context, runs
from tests.emulator.emulate import emulate, step_ns
from tests.emulator.spec import US, Job, Model, Network, Recording

BOTH = ("between backward and forward", "between optimizer and forward")


def logging(saves_us: float = 20_000.0, **calls: float) -> RuleContext:
    """Two ranks, which ``calls`` of each kind in a step cost so much."""
    step_us = STEP_US - saves_us
    return context(
        *(breakdown(rank, exposed_comm_transfer=30_000.0) for rank in range(2)), loop_collectives=calls,
        predict=lambda change: (
            Prediction(low=step_us, mid=step_us, high=step_us) if change == {"loop.collectives": "0"} else None
        ),
    )  # fmt: skip


def test_metrics_are_reduced_where_they_are_logged() -> None:
    finding = loop_collectives.evaluate(logging(all_reduce=3))
    assert finding is not None
    assert "(3 all_reduce per step) cost 20% of the step" in finding.title
    assert (finding.rule, finding.whatif) == ("loop-collectives", {"loop.collectives": "0"})
    assert "if step % 50 == 0:\n    torch.distributed.all_reduce(metrics)" in finding.action.how
    assert "barrier" not in finding.action.how
    assert "pickle" not in finding.action.how


@pytest.mark.parametrize(
    ("kind", "first", "said"),
    [
        ("barrier", "Leave out barriers", "Leave out barriers"),
        ("all_gather", "Reduce metrics", "pickle"),
        ("broadcast", "Agree on flags", "torch.distributed.broadcast(flag, 0)"),
    ],
)
def test_each_kind_has_its_remedy(kind: str, first: str, said: str) -> None:
    finding = loop_collectives.evaluate(logging(**{kind: 0.25}))
    assert finding is not None
    assert f"(0.250 {kind} per step)" in finding.title
    assert finding.action.how.startswith(first)
    assert said in finding.action.how


def test_the_trainer_has_an_argument_of_its_own() -> None:
    """It gathers how many tokens each rank's labels have, in every step."""
    recorded = runs(2, transformers={"average_tokens_across_devices": True})
    finding = loop_collectives.evaluate(dataclasses.replace(logging(all_gather=1), runs=recorded))
    assert finding is not None
    assert (finding.action.old, finding.action.new) == ("True", "False")
    assert "TrainingArguments(output_dir, average_tokens_across_devices=False)" in finding.action.how
    other = loop_collectives.evaluate(dataclasses.replace(logging(all_gather=1, all_reduce=1), runs=recorded))
    assert other is not None
    assert other.action.how.startswith("Reduce metrics")


def test_it_says_where_they_are_called() -> None:
    finding = loop_collectives.evaluate(dataclasses.replace(logging(all_gather=12), loop_places=BOTH))
    assert finding is not None
    assert "between backward and forward and between optimizer and forward (12 all_gather per step)" in finding.title
    assert finding.evidence[0].what.startswith("all_gather per step between backward and forward and between")


@pytest.mark.parametrize(
    ("settings", "places", "setting"),
    [
        ({"lightning": {"max_steps": 60}}, ("the forward", *BOTH), "sync_dist of self.log in training_step"),
        ({"lightning": {"max_steps": 60}}, BOTH, "collectives of the training loop"),
        ({"lightning": {"fabric": True}}, ("the forward",), "collectives of the training loop"),
        ({"transformers": {"max_steps": 60}}, ("the forward",), "collectives of the training loop"),
    ],
)
def test_lightning_reduces_what_is_logged_with_sync_dist(
    settings: dict[str, dict[str, object]], places: tuple[str, ...], setting: str
) -> None:
    recorded = runs(2, **settings)
    case = dataclasses.replace(logging(all_reduce=11, barrier=11), runs=recorded, loop_places=places)
    finding = loop_collectives.evaluate(case)
    assert finding is not None
    assert finding.action.setting == setting
    assert ('self.log("loss", loss)' in finding.action.how) == setting.startswith("sync_dist")
    assert ("in the forward" in finding.title) == ("the forward" in places)


def test_it_is_silent_without_any_and_where_they_cost_little() -> None:
    assert loop_collectives.evaluate(logging()) is None
    assert loop_collectives.evaluate(logging(saves_us=4_900.0, all_reduce=3)) is None


def test_it_comes_first_in_a_job_that_does_little_else(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("job")
    network = Network(latency_ns=300 * US)
    emulate(
        Job(metrics=20, network=network, model=Model(blocks=4, tokens=1024), recording=Recording(steps=6))
    ).write(folder)  # fmt: skip
    first = advised(folder).findings[0]
    assert first.rule == loop_collectives.RULE
    assert "20 all_reduce per step" in first.title


def test_reads_of_what_they_bring_go_with_them(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each read leaves the device idle: the gain is that of both, and what the host reads there is no other finding."""
    folder = tmp_path_factory.mktemp("job")
    job = Job(metrics=8, metrics_read=True, model=Model(blocks=4, tokens=1024), recording=Recording(steps=6))
    emulate(job).write(folder)
    summary = perfscope.analyze(folder, workers=1)
    first = summary.findings[0]
    assert (first.rule, first.whatif) == (loop_collectives.RULE, {"loop.collectives": "0", "host.sync": "0"})
    assert "(8 all_reduce per step), with the reads of what they bring, cost" in first.title
    without_us = step_ns(dataclasses.replace(job, metrics=0)) / 1e3
    assert first.predicted_step_us is not None
    assert first.predicted_step_us.mid == pytest.approx(without_us, rel=0.05)
    assert "host-syncs" not in {finding.rule for finding in summary.findings}


def test_other_reads_stay_what_they_are() -> None:
    """Half of what is idle after reads is after the loop's: the other half is advised apart."""
    rows = [
        SyncRow(call="cudaStreamSynchronize", operator="aten::item", inside="", idle_us=10_000.0, delayed_us=10_000.0,
                count_per_step=1.0, ranks=(0, 1), of_loop=of_loop)
        for of_loop in (False, True)
    ]  # fmt: skip
    step = Prediction(low=80_000.0, mid=80_000.0, high=80_000.0)
    case = dataclasses.replace(
        logging(all_reduce=3), syncs=tuple(rows),
        predict=lambda change: step if change == {"loop.collectives": "0", "host.sync": "0.50"} else None,
    )  # fmt: skip
    case = dataclasses.replace(
        case, summary=dataclasses.replace(
            case.summary, time_breakdown=tuple(breakdown(rank, idle_sync=20_000.0) for rank in range(2)),
        ),
    )  # fmt: skip
    finding = loop_collectives.evaluate(case)
    assert finding is not None
    assert finding.whatif == {"loop.collectives": "0", "host.sync": "0.50"}
    others = host_syncs.evaluate(case)
    assert others is not None
    assert "idle for 10% of the step" in others.title
    assert others.whatif == {"host.sync": "0.50"}
    alone = host_syncs.evaluate(dataclasses.replace(case, predict=None))
    assert alone is not None
    assert "idle for 20% of the step" in alone.title  # no finding has the loop's
