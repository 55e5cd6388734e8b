"""The verdict on the terminal."""

from __future__ import annotations

import dataclasses

import pytest

from perfscope.reports.terminal import verdict
from perfscope.summary import ActionRow, Note, Verdict
from tests.reports.examples import EXAMPLES, broken, gpu, healthy, large, straggler


def _account_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("  rank ")]


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("width", [60, 100])
def test_every_example_fits_its_width_and_hides_nothing_behind_none(name: str, width: int) -> None:
    summary = EXAMPLES[name]()
    text = verdict(summary, width)
    typed = {line.strip() for finding in summary.findings for line in finding.action.how.splitlines()}
    assert all(len(line) <= width for line in text.splitlines() if line.strip() not in typed)
    assert "None" not in text
    assert "nan" not in text
    assert summary.verdict.headline in " ".join(text.split())


def test_each_rank_up_to_eight_has_one_line() -> None:
    lines = _account_lines(verdict(gpu()))
    assert len(lines) == 8
    assert lines[0] == "  rank 0    412 ms  compute 72%, wait 3%, transfer 19%, copy 1%, sync 2%, launch 2%"


def test_many_ranks_are_represented_by_the_extremes() -> None:
    text = verdict(large())
    assert len(_account_lines(text)) < 8
    assert "rank 517" in "".join(_account_lines(text))
    assert "makes others wait, most compute" in " ".join(text.split())


def test_many_equal_ranks_are_called_alike() -> None:
    summary = healthy()
    rows = tuple(dataclasses.replace(summary.accounting[0], rank=rank) for rank in range(20))
    text = verdict(dataclasses.replace(summary, accounting=rows))
    assert len(_account_lines(text)) == 1
    assert "all ranks are alike" in text


def test_what_to_type_stands_unbroken_and_indented_as_written() -> None:
    lines = verdict(gpu(), width=40).splitlines()
    at = lines.index("     for block in model.layers:")
    assert lines[at + 1] == "         fully_shard(block, mesh=mesh, reshard_after_forward=False)"


def test_a_sentence_of_advice_is_broken_at_the_width() -> None:
    summary = straggler()
    action = dataclasses.replace(summary.findings[0].action, how=f"{'Look at its clocks and its work. ' * 8}".strip())
    told = dataclasses.replace(
        summary, findings=(dataclasses.replace(summary.findings[0], action=action), *summary.findings[1:])
    )
    assert all(len(line) <= 60 for line in verdict(told, 60).splitlines() if "Look at its clocks" in line)
    assert " ".join(action.how.split()) in " ".join(verdict(told, 60).split())


def test_a_value_that_is_not_known_is_not_called_now() -> None:
    summary = gpu()
    action = ActionRow(setting="torch.compile(mode=…)", old=None, new='"reduce-overhead"', how="torch.compile(model)")
    told = dataclasses.replace(summary, findings=(dataclasses.replace(summary.findings[0], action=action),))
    assert '   torch.compile(mode=…): "reduce-overhead"' in verdict(told).splitlines()


def test_damage_and_how_the_job_ended_stand_on_the_terminal() -> None:
    summary = gpu()
    note = Note(about="reading", text="Rank 1 (rank1.json.gz): the file ends early: steps up to the cut were read.")
    job = dataclasses.replace(summary.job, exit_code=1)
    text = " ".join(verdict(dataclasses.replace(summary, notes=(note,), job=job)).split())
    assert "rank1.json.gz): the file ends early" in text
    assert "ended with exit code 1; what it left behind was analyzed" in text


def test_a_bound_is_called_a_bound_and_a_prediction_carries_its_error() -> None:
    text = " ".join(verdict(straggler()).split())
    assert "At most 3.4% more steps a second. This is a bound, not a prediction." in text
    assert "66.2 ms a step (between 65.0 ms and 71.0 ms) instead of 126 ms, that is 91% more steps a second" in text
    assert "Replaying the unchanged step is off by 0.9%" in text


def test_failures_and_missing_ranks_are_named() -> None:
    text = " ".join(verdict(broken()).split())
    assert "rank 1: perfscope-recording/rank-00001.capture-0.trace.json.gz: the gzip stream ends early" in text
    assert "1 rank of 4 is missing from the recording: 3." in text


def test_control_characters_do_not_reach_the_terminal() -> None:
    summary = straggler()
    action = ActionRow(setting="\x1b[2J", old=None, new=None, how="rm\x07 -rf\x1b]0;x")
    summary = dataclasses.replace(
        summary,
        verdict=Verdict(headline="\x1b[31mred", healthy=False, first_action="\x9b31m"),
        findings=(dataclasses.replace(summary.findings[0], action=action),),
    )
    text = verdict(summary)
    assert not any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in text.replace("\n", ""))
