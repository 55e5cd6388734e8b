"""``perfscope whatif`` as a user calls it."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from perfscope.analyzers.analyze import analyze
from perfscope.cli.main import main
from perfscope.reports.page.advice import cards
from perfscope.results.summary import Summary
from tests.generator import JobSpec, ModelSpec, SlowCompute, simulate


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    slow = SlowCompute(ranks=(1,), factor=1.5)
    simulate(JobSpec(ranks=2, steps=5, model=ModelSpec(tokens=2048), end_sync=True, causes=(slow,))).write(folder)
    return folder


def whatif(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["whatif", *(str(argument) for argument in arguments)])
    return result.exit_code, result.output


def test_json_is_as_documented(traces: Path) -> None:
    code, output = whatif(traces, "--set", "rank.1=peers", "--json")
    assert code == 0
    document = json.loads(output)
    assert set(document) >= {"measured_step_us", "replayed_step_us", "predicted_step_us", "error"}
    predicted = document["predicted_step_us"]
    assert predicted["low"] <= predicted["mid"] <= predicted["high"] < document["measured_step_us"]
    assert document["replayed_step_us"] == pytest.approx(document["measured_step_us"], rel=1e-6)


def test_several_settings_are_shown_alone_and_together(traces: Path) -> None:
    code, output = whatif(traces, "--set", "rank.1=peers", "--set", "network.bandwidth=2x")
    assert code == 0
    lines = output.splitlines()
    assert lines[2].startswith("rank.1=peers ")
    assert lines[3].startswith("network.bandwidth=2x ")
    assert lines[4].startswith("rank.1=peers network.bandwidth=2x ")
    assert whatif(traces, "rank.1=peers", "network.bandwidth=2x") == (0, output)


def test_a_setting_that_is_given_twice_with_one_value_counts_once(traces: Path) -> None:
    assert whatif(traces, "rank.1=peers", "--set", "rank.1=peers") == whatif(traces, "rank.1=peers")


def test_a_sweep_takes_words(traces: Path) -> None:
    """As the message says to somebody who gives a setting two values."""
    code, output = whatif(traces, "--sweep", "compute=2x,3x")
    assert code == 0
    assert [line.split()[0] for line in output.splitlines()[2:4]] == ["compute=2x", "compute=3x"]


def test_a_sweep_marks_the_best(traces: Path) -> None:
    code, output = whatif(traces, "--sweep", "network.bandwidth=1..4")
    assert code == 0
    rows = [line for line in output.splitlines()[2:] if not line.startswith("note: ")]
    assert [line.split()[0] for line in rows] == [f"network.bandwidth={factor}" for factor in (1, 2, 4)]
    assert rows[-1].endswith("<- best")
    points = json.loads(whatif(traces, "--sweep", "network.bandwidth=0.5,1", "--json")[1])["points"]
    assert [point["value"] for point in points] == ["0.5", "1"]
    assert points[0]["predicted_step_us"]["mid"] >= points[1]["predicted_step_us"]["mid"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "nothing to change"),
        (("--set", "network.bandwidth"), "write NAME=VALUE"),
        (("network.bandwidth",), "write NAME=VALUE"),
        (("--set", "network.bandwith=2x"), "no such setting (did you mean network.bandwidth?)"),
        (("--set", "xyz=2"), "no such setting; choose from ddp.no_sync"),
        (("--set", "fsdp.prefetch=1"), "no gathers of parameters"),
        (("--sweep", "network.bandwidth=4..1"), "the smaller number of the range first"),
        (("--sweep", "network.bandwidth=a..b"), "range of numbers"),
        (("compute=2x", "--set", "compute=3x"), "compute is set to 2x and 3x"),
        (("compute=2x", "--set", "compute=3x"), "write --sweep compute=2x,3x"),
        (("compute=2x", "--sweep", "compute=1..4"), "compute is both set and swept: leave out --set compute=2x"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(traces: Path, arguments: tuple[str, ...], why: str) -> None:
    code, output = whatif(traces, *arguments)
    assert code == 2
    assert why in output


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    code, output = whatif(tmp_path, "--set", "network.bandwidth=2x")
    assert code == 2
    assert str(tmp_path) in output


def test_the_settings_are_listed() -> None:
    code, output = whatif("--list")
    assert code == 0
    assert "ddp.bucket_cap_mb" in output


@pytest.mark.scale
@pytest.mark.parametrize("sample", ["healthy", "starved", "slow_rank"])
def test_a_cards_command_gives_the_cards_figures(samples: Path, sample: str) -> None:
    assert reproduced(analyze(samples / sample)) is (sample != "healthy")


def test_so_it_does_for_another_capture_than_the_last(tmp_path: Path) -> None:
    spec = JobSpec(ranks=2, steps=5, model=ModelSpec(tokens=2048), end_sync=True)
    slow = SlowCompute(ranks=(1,), factor=1.5)
    for step, causes in ((10, (slow,)), (20, ())):
        simulate(dataclasses.replace(spec, causes=causes)).write(
            tmp_path, file_template=f"rank{{rank}}_step{step}.json"
        )
    assert reproduced(analyze(tmp_path, capture=0))


def reproduced(summary: Summary) -> bool:
    """Check each card's command; was there one?"""
    replayed = [card for card in cards(summary) if card.command]
    for card in replayed:
        code, output = whatif(*shlex.split(card.command)[2:], "--json")
        assert code == 0
        document, predicted = json.loads(output), card.finding.predicted_step_us
        assert predicted is not None
        assert document["predicted_step_us"] == {"low": predicted.low, "mid": predicted.mid, "high": predicted.high}
    return bool(replayed)
