"""The verdict on the terminal."""

from __future__ import annotations

import dataclasses
import re

import click
import pytest

from perfscope.reports.paint import Paint
from perfscope.reports.terminal import cost_lines, verdict
from perfscope.results.findings import Action, Prediction
from perfscope.results.notes import note
from perfscope.results.prices import Price, priced
from perfscope.results.rows import Plan, Verdict
from perfscope.results.summary import Summary
from tests.reports.examples import EXAMPLES, broken, gpu, healthy, large, starved, straggler


def _breakdown_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("  rank ")]


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("width", [60, 100])
def test_every_example_fits_its_width_and_hides_nothing_behind_none(name: str, width: int) -> None:
    summary = EXAMPLES[name]()
    text = verdict(summary, Paint(width=width))
    typed = {line.strip() for finding in summary.findings for line in finding.action.how.splitlines()}
    assert all(len(line) <= width for line in text.splitlines() if line.strip() not in typed)
    assert "None" not in text
    assert "nan" not in text
    assert summary.verdict.headline in " ".join(text.split())


def test_each_rank_up_to_eight_has_one_line() -> None:
    lines = _breakdown_lines(verdict(gpu()))
    assert len(lines) == 8
    assert lines[0] == "  rank 0    412 ms  compute 72%, wait 3%, transfer 19%, copy 1%, sync 2%, launch 2%"


def test_many_ranks_are_represented_by_the_extremes() -> None:
    text = verdict(large())
    assert len(_breakdown_lines(text)) < 8
    assert "rank 517" in "".join(_breakdown_lines(text))
    assert "straggler, most compute" in " ".join(text.split())


def test_many_equal_ranks_are_called_alike() -> None:
    summary = healthy()
    rows = tuple(dataclasses.replace(summary.time_breakdown[0], rank=rank) for rank in range(20))
    text = verdict(dataclasses.replace(summary, time_breakdown=rows))
    assert len(_breakdown_lines(text)) == 1
    assert "all ranks are similar" in text


def test_what_to_type_stands_unbroken_and_indented_as_written() -> None:
    lines = verdict(gpu(), Paint(width=40)).splitlines()
    at = lines.index("       for block in model.layers:")
    assert lines[at + 1] == "           fully_shard(block, mesh=mesh, reshard_after_forward=False)"


def test_a_sentence_of_advice_is_broken_at_the_width() -> None:
    summary = straggler()
    action = dataclasses.replace(summary.findings[0].action, how=f"{'Look at its clocks and its work. ' * 8}".strip())
    changed = dataclasses.replace(
        summary, findings=(dataclasses.replace(summary.findings[0], action=action), *summary.findings[1:])
    )
    assert all(
        len(line) <= 60 for line in verdict(changed, Paint(width=60)).splitlines() if "Look at its clocks" in line
    )
    assert " ".join(action.how.split()) in " ".join(verdict(changed, Paint(width=60)).split())


def test_what_the_advice_costs_stands_below_it_wrapped_as_the_rest() -> None:
    summary = straggler()
    action = dataclasses.replace(
        summary.findings[0].action, how="Use more workers:", costs="Each worker delivers all samples, so they repeat."
    )
    changed = dataclasses.replace(summary, findings=(dataclasses.replace(summary.findings[0], action=action),))
    lines = verdict(changed, Paint(width=40)).splitlines()
    at = lines.index("     Use more workers:")
    assert lines[at + 1 : at + 3] == ["     Costs: Each worker delivers all", "     samples, so they repeat."]
    free = dataclasses.replace(summary.findings[0], action=dataclasses.replace(action, costs=None))
    assert "Costs" not in verdict(dataclasses.replace(summary, findings=(free,)))


def test_a_value_that_is_not_known_is_not_called_now() -> None:
    summary = gpu()
    action = Action(setting="torch.compile(mode=…)", old=None, new='"reduce-overhead"', how="torch.compile(model)")
    changed = dataclasses.replace(summary, findings=(dataclasses.replace(summary.findings[0], action=action),))
    assert '   torch.compile(mode=…): "reduce-overhead"' in verdict(changed).splitlines()


def test_damage_and_how_the_job_ended_stand_on_the_terminal() -> None:
    summary = gpu()
    problems = ["the file ends early: steps up to the cut were read"]
    damaged = note("reading", "reading", (1,), rank=1, source="rank1.json.gz", problems=problems)
    job = dataclasses.replace(summary.job, exit_code=1)
    text = " ".join(verdict(dataclasses.replace(summary, notes=(damaged,), job=job)).split())
    assert "rank1.json.gz): the file ends early" in text
    assert "ended with exit code 1. What it recorded until then was analyzed" in text


def test_a_bound_is_called_a_bound_and_a_prediction_says_how_such_ones_did() -> None:
    text = " ".join(verdict(straggler()).split())
    assert "At most 1.03x faster: a bound, not a prediction." in text
    assert "Predicted speedup: 1.8x. 66.2 ms per step (65.0 ms to 71.0 ms) instead of 119 ms" in text
    assert "Predictions of rank.N so far: within 5% of the true step time in" in text
    assert "Replay error" not in text, "how well the unchanged step replays is no accuracy"


def test_failures_and_missing_ranks_are_named() -> None:
    text = " ".join(verdict(broken()).split())
    assert "rank 1: perfscope-recording/rank-00001.capture-0.trace.json.gz: the gzip stream ends early" in text
    assert "Not recorded: 1 of 4 ranks (3)." in text


def test_control_characters_do_not_reach_the_terminal() -> None:
    summary = straggler()
    action = Action(setting="\x1b[2J", old=None, new=None, how="rm\x07 -rf\x1b]0;x")
    summary = dataclasses.replace(
        summary,
        verdict=Verdict(headline="\x1b[31mred", healthy=False, first_action="\x9b31m"),
        findings=(dataclasses.replace(summary.findings[0], action=action),),
    )
    text = verdict(summary)
    assert not any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in text.replace("\n", ""))


def with_price(**changes: object) -> Summary:
    summary = dataclasses.replace(starved(), **changes)
    job = dataclasses.replace(summary.job, world_size=8, step_time_us=360_000.0, unprofiled_step_us=None)
    return priced(dataclasses.replace(summary, job=job), Price(per_device_hour=2.5, currency="EUR"))


def finding(**changes: object):
    return dataclasses.replace(starved().findings[0], **changes)


def test_the_price_comes_first_and_nothing_where_nothing_is_saved():
    first, *_ = cost_lines(with_price())
    assert first == "Savings, at 2.50 EUR per device-hour:"
    assert cost_lines(with_price(findings=(), plan=None)) == []


def test_a_ceiling_saves_at_most():
    bounded = finding(predicted_step_us=None, ceiling=0.25)
    assert cost_lines(with_price(findings=(bounded,)))[1] == "  finding 1 saves at most 96.0 EUR per day"


def test_a_prediction_has_its_range_and_a_plan_says_that_savings_overlap():
    times = Prediction(low=180_000.0, mid=270_000.0, high=360_000.0)
    lines = cost_lines(
        with_price(findings=(finding(predicted_step_us=times),), plan=Plan(whatif={}, predicted_step_us=times))
    )
    assert lines[1] == "  finding 1 saves 120 EUR per day (0 to 240)"
    assert lines[2] == "  all replayed changes together save 120 EUR per day (0 to 240); savings overlap"


def test_the_terminal_has_it_only_with_a_price():
    assert "EUR per day" in verdict(with_price())
    assert "per day" not in verdict(starved())


@pytest.mark.parametrize("name", EXAMPLES)
def test_colours_and_bars_change_no_word(name: str) -> None:
    summary = EXAMPLES[name]()
    shown = verdict(summary, Paint(coloured=True, width=200))
    assert "\x1b[" in shown
    words = re.sub(r"[█■]", " ", click.unstyle(shown)).split()
    assert words == verdict(summary, Paint(width=200)).split()


def test_a_bar_has_a_cell_for_each_twentieth_of_the_step() -> None:
    (line,) = [
        line for line in verdict(gpu(), Paint(coloured=True, width=120)).splitlines() if line.startswith("  rank 0")
    ]
    assert click.unstyle(line).count("█") == 20


def test_a_recording_without_steps_is_not_spoken_of_per_step() -> None:
    marked = straggler()
    summary = dataclasses.replace(marked, job=dataclasses.replace(marked.job, steps=()), history=None)
    text = " ".join(verdict(summary).split())
    assert "Time breakdown per rank:" in text
    assert "Predicted speedup: 1.8x. 66.2 ms (65.0 ms to 71.0 ms) instead of 119 ms, by replay of the recording" in text


def test_little_compute_is_shown() -> None:
    summary = healthy()
    row = summary.time_breakdown[0]
    for part, shown in ((0.007, "compute 1%"), (0.0004, "compute <1%")):
        compute = part * row.step_time_us
        idle = dataclasses.replace(row, compute_us=compute, idle_host_us=row.idle_host_us + row.compute_us - compute)
        assert shown in verdict(dataclasses.replace(summary, time_breakdown=(idle,)))
