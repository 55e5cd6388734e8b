"""``perfscope compare`` as a user types it, on the recordings of this repository and on generated ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from perfscope.cli.main import main
from perfscope.cli.outputs import EXIT_BROKEN


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page goes into the current folder."""
    monkeypatch.chdir(tmp_path)


def _compare(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["compare", *(str(argument) for argument in arguments)])


def test_starved_and_healthy_recordings(samples: Path, tmp_path: Path) -> None:
    page, document, text = tmp_path / "c.html", tmp_path / "c.json", tmp_path / "c.md"
    result = _compare(samples / "starved", samples / "healthy", "-o", page, "--json", document, "--markdown", text)
    assert result.exit_code == 0, result.output
    assert "healthy is 1.44x faster: the step time changed from 431 ms to 298 ms" in result.output
    assert "Each step has 125 ms less data loading." in result.output
    assert "gone  Data loading blocks 29%" in result.output
    found = json.loads(document.read_text())
    step = found["differences"][0]["step"]
    assert found["schema"] == "perfscope.comparison/1"
    assert step["verdict"] == "faster"
    real = [row["name"] for row in found["differences"][0]["categories"] if row["significant"]]
    assert real == ["idle_dataloader"]
    # The recordings' own stopwatch: 125 ms of loading per step are removed.
    (loading,) = [row for row in found["differences"][0]["categories"] if row["name"] == "idle_dataloader"]
    assert loading["delta_us"] == pytest.approx(-125_000, rel=0.05)
    assert "<!DOCTYPE html>" in page.read_text(encoding="utf-8")
    assert text.read_text(encoding="utf-8").startswith("### 🟢 PerfScope")


def test_the_page_is_called_comparison_html_by_default(summaries: dict[str, Path], tmp_path: Path) -> None:
    result = _compare(summaries["healthy"], summaries["healthy"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "comparison.html").exists()
    assert "comparison: comparison.html" in result.output
    assert "Within noise" in result.output


def test_runs_with_other_numbers_of_ranks_show_scaling(summaries: dict[str, Path]) -> None:
    result = _compare(summaries["starved"], summaries["healthy"], summaries["slow_rank"])
    assert result.exit_code == 0, result.output
    assert "3 devices: " in result.output
    assert "the largest loss is waiting for late ranks" in " ".join(result.output.split())


def test_fail_on_slower(summaries: dict[str, Path]) -> None:
    slower = _compare(summaries["healthy"], summaries["starved"], "--fail-on", "slower", "-q")
    faster = _compare(summaries["starved"], summaries["healthy"], "--fail-on", "slower", "-q")
    assert (slower.exit_code, faster.exit_code) == (EXIT_BROKEN, 0)
    assert slower.output.startswith("comparison:")


def test_fail_on_a_new_finding(summaries: dict[str, Path]) -> None:
    new = _compare(summaries["healthy"], summaries["starved"], "--fail-on", "new-finding")
    gone = _compare(summaries["starved"], summaries["healthy"], "--fail-on", "new-finding")
    assert (new.exit_code, gone.exit_code) == (EXIT_BROKEN, 0)


def test_what_is_below_the_noise_option_is_not_significant(summaries: dict[str, Path]) -> None:
    result = _compare(summaries["starved"], summaries["healthy"], "--noise", "40")
    assert "Within noise" in result.output


def test_baselines_widen_the_noise(summaries: dict[str, Path]) -> None:
    result = _compare(summaries["starved"], summaries["healthy"], "--baseline", summaries["slow_rank"], "--json", "-")
    step = json.loads(result.stdout)["differences"][0]["step"]
    assert step["verdict"] == "same"
    assert "2 recordings" in step["floor_from"]


def test_a_dash_prints_and_nothing_else_does(summaries: dict[str, Path]) -> None:
    result = _compare(summaries["starved"], summaries["healthy"], "--markdown", "-")
    assert result.stdout.startswith("### 🟢")
    assert result.stdout.rstrip().endswith("</sub>")


@pytest.mark.parametrize("content", ["", "{}", '{"schema": "perfscope.summary/1"}', "not json"])
def test_what_is_no_recording_is_refused_by_name(summaries: dict[str, Path], tmp_path: Path, content: str) -> None:
    odd = tmp_path / "odd.json"
    odd.write_text(content)
    result = _compare(summaries["healthy"], odd)
    assert result.exit_code == 2
    assert "odd.json" in result.output


def test_one_recording_is_a_usage_error(summaries: dict[str, Path]) -> None:
    result = _compare(summaries["healthy"])
    assert result.exit_code == 2
    assert "CANDIDATE" in result.output


def test_a_page_that_cannot_be_written_says_so(summaries: dict[str, Path], tmp_path: Path) -> None:
    for option in ("--output", "--json", "--markdown"):
        target = tmp_path / "missing" / "file"
        result = _compare(summaries["healthy"], summaries["healthy"], option, target)
        assert result.exit_code == 1
        assert option in result.output
        assert "Traceback" not in result.output


def test_analyze_writes_markdown(samples: Path, tmp_path: Path) -> None:
    page, text = tmp_path / "r.html", tmp_path / "r.md"
    arguments = ["analyze", str(samples / "starved"), "-q", "-o", str(page), "--markdown", str(text)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert text.read_text(encoding="utf-8").startswith("### PerfScope: Data loading blocks")
