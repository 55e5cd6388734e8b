"""``perfscope analyze --price``: on the terminal and in the JSON, by option and by environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from perfscope.cli.main import main


def run(samples: Path, folder: Path, *options: str, env: dict[str, str] | None = None) -> Result:
    places = ["--output", str(folder / "out.html"), "--json", str(folder / "out.json")]
    return CliRunner().invoke(main, ["analyze", str(samples / "starved"), *places, *options], env=env)


def test_the_price_is_printed_and_written(samples, tmp_path):
    result = run(samples, tmp_path, "--price", "2.50", "--currency", "EUR")
    assert result.exit_code == 0, result.output
    assert "Savings, at 2.50 EUR per device-hour:" in result.output
    assert "finding 1 saves" in result.output
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["cost"]["per_day"] == pytest.approx(2 * 2.5 * 24)
    assert document["cost"]["savings"][0]["rule"] == document["findings"][0]["rule"]


def test_the_environment_may_give_it(samples, tmp_path):
    result = run(samples, tmp_path, env={"PERFSCOPE_PRICE": "3", "PERFSCOPE_CURRENCY": "CHF"})
    assert "at 3.00 CHF per device-hour" in result.output


def test_without_a_price_there_is_no_word_of_money(samples, tmp_path):
    result = run(samples, tmp_path, env={"PERFSCOPE_PRICE": ""})
    assert result.exit_code == 0, result.output
    assert "device-hour" not in result.output
    assert json.loads((tmp_path / "out.json").read_text())["cost"] is None


@pytest.mark.parametrize("wrong", ["-1", "0", "2,50", "nan", "inf"])
def test_what_is_no_price_is_refused_in_words(samples, tmp_path, wrong):
    result = run(samples, tmp_path, "--price", wrong)
    assert result.exit_code == 2
    assert f"'--price': must be a number above 0, not '{wrong}'" in result.output
