"""``perfscope check`` as a user and a pipeline type it, and what it reports about budgets with errors."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner, Result

from perfscope.analyzers.compare.budget_file import NUMBERS, read_budget
from perfscope.cli.main import main
from perfscope.cli.outputs import EXIT_BROKEN
from perfscope.errors import UnusableInput
from perfscope.results.budget import Budget
from perfscope.results.categories import CATEGORIES


def _check(traces: Path, folder: Path, budget: str | None, *options: object) -> Result:
    arguments = ["check", str(traces), *(str(option) for option in options)]
    if budget is not None:
        path = folder / "budget.toml"
        path.write_text(budget, encoding="utf-8")
        arguments += ["--budget", str(path)]
    return CliRunner().invoke(main, arguments)


GENEROUS = """
fail_on = "high"
[step_time]
max = "330 ms"
[dataloader]
max = "5 %"
[exposed_communication]
max = 0.2
"""


def test_a_recording_within_its_budget(samples: Path, tmp_path: Path) -> None:
    result = _check(samples / "healthy", tmp_path, GENEROUS)
    assert result.exit_code == 0, result.output
    assert "4 checks passed" in result.output


def test_a_recording_that_exceeds_its_budget(summaries: dict[str, Path], tmp_path: Path) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("junit", "markdown", "json")}
    options = [part for name, path in files.items() for part in (f"--{name}", path)]
    result = _check(summaries["starved"], tmp_path, GENEROUS, *options)
    assert result.exit_code == EXIT_BROKEN
    assert "FAILED    step_time at most: 431 ms (limit 330 ms)" in result.output
    assert "3 of 4 checks failed" in result.output
    suite = ET.fromstring(files["junit"].read_bytes())[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("4", "3", "0")
    document = json.loads(files["json"].read_text())
    assert (document["schema"], document["passed"]) == ("perfscope.check/1", False)
    by_name = {row["name"]: row["status"] for row in document["rows"]}
    assert by_name == {
        "step_time at most": "failed",
        "dataloader at most": "failed",
        "exposed_communication at most": "passed",
        "finding dataloader-workers": "failed",
    }
    assert files["markdown"].read_text(encoding="utf-8").startswith("### ❌")


@pytest.mark.parametrize(
    ("budget", "code"),
    [
        ('[step_time]\nregression = "3 %"', EXIT_BROKEN),
        ('[step_time]\nregression = "50 %"', 0),
        ('[step_time]\nregression = "100 ms"', EXIT_BROKEN),
        ('[step_time]\nregression = "140 ms"', 0),
        ('[dataloader]\nregression = "10 points"', EXIT_BROKEN),
        ('[dataloader]\nregression = "30 points"', 0),
        ('[idle_dataloader]\nregression = "10 %"', EXIT_BROKEN),
        ('[exposed_communication]\nregression = "100 %"', 0),
        ('[samples_per_second]\nregression = "5 %"', EXIT_BROKEN),
        ('[compute]\nregression = "1 %"', 0),
    ],
)
def test_regressions_from_a_baseline(summaries: dict[str, Path], tmp_path: Path, budget: str, code: int) -> None:
    result = _check(summaries["starved"], tmp_path, budget, "--baseline", summaries["healthy"])
    assert result.exit_code == code, result.output


def test_getting_better_is_no_regression(summaries: dict[str, Path], tmp_path: Path) -> None:
    budget = '[step_time]\nregression = "0 %"\n[samples_per_second]\nregression = "0 %"'
    result = _check(summaries["healthy"], tmp_path, budget, "--baseline", summaries["starved"])
    assert result.exit_code == 0, result.output
    assert "no worse than the baseline" in result.output


def test_a_regression_within_noise_passes(summaries: dict[str, Path], tmp_path: Path) -> None:
    budget = '[step_time]\nregression = "3 %"'
    baselines = ["--baseline", summaries["healthy"], "--baseline", summaries["slow_rank"]]
    result = _check(summaries["starved"], tmp_path, budget, *baselines)
    assert result.exit_code == 0, result.output
    assert "record more steps to be sure" in result.output


@pytest.mark.parametrize(
    ("budget", "code"),
    [
        ('[exposed_communication]\nmax = "25 ms"', 0),  # 19 ms per step
        ('[exposed_communication]\nmax = "15 ms"', EXIT_BROKEN),
        ('[straggler_cost]\nmax = "5 %"', 0),
        ('[compute]\nmin = "60 %"', 0),
        ('[compute]\nmin = "70 %"', EXIT_BROKEN),
        ("[samples_per_second]\nmin = 70", 0),
        ('[samples_per_second]\nmin = "100 /s"', EXIT_BROKEN),
        ("[tokens_per_second]\nper_step = 4096\nmin = 9000", 0),  # 4096 every 431 ms
        ("[tokens_per_second]\nper_step = 4096\nmin = 10000", EXIT_BROKEN),
    ],
)
def test_absolute_limits(summaries: dict[str, Path], tmp_path: Path, budget: str, code: int) -> None:
    result = _check(summaries["starved"], tmp_path, budget)
    assert result.exit_code == code, result.output


def test_what_is_not_known_fails(summaries: dict[str, Path], tmp_path: Path) -> None:
    unknown = _check(summaries["healthy"], tmp_path, "[mfu]\nmin = 0.3")
    assert unknown.exit_code == EXIT_BROKEN
    assert "optional = true" in unknown.output
    optional = _check(summaries["healthy"], tmp_path, "[mfu]\nmin = 0.3\noptional = true")
    assert optional.exit_code == 0
    assert "skipped" in optional.output


def test_findings_count_from_the_severity_given_but_for_those_ignored(
    summaries: dict[str, Path], tmp_path: Path
) -> None:
    assert _check(summaries["starved"], tmp_path, None, "--fail-on", "high").exit_code == EXIT_BROKEN
    assert _check(summaries["healthy"], tmp_path, None, "--fail-on", "medium").exit_code == 0
    ignored = 'fail_on = "high"\nignore = ["dataloader-workers"]'
    assert _check(summaries["starved"], tmp_path, ignored).exit_code == 0
    assert _check(summaries["starved"], tmp_path, GENEROUS, "--fail-on", "none", "-q").output == ""


def test_a_dash_prints(summaries: dict[str, Path], tmp_path: Path) -> None:
    result = _check(summaries["starved"], tmp_path, GENEROUS, "--json", "-")
    assert json.loads(result.stdout)["passed"] is False


def test_nothing_to_check_is_refused(summaries: dict[str, Path], tmp_path: Path) -> None:
    result = _check(summaries["healthy"], tmp_path, None)
    assert result.exit_code == 2
    assert "--budget" in result.output


def test_a_regression_needs_a_baseline(summaries: dict[str, Path], tmp_path: Path) -> None:
    result = _check(summaries["healthy"], tmp_path, '[step_time]\nregression = "3 %"')
    assert result.exit_code == 2
    assert "--baseline" in result.output
    assert "budget.toml" in result.output


def test_an_unusable_recording_is_2(tmp_path: Path) -> None:
    assert _check(tmp_path / "nothing", tmp_path, GENEROUS).exit_code == 2


def _read(folder: Path, text: str, name: str = "budget.toml") -> Budget:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return read_budget(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "limits nothing"),
        ("[step_tim]\nmax = '4 ms'", "[step_tim]: no such number (did you mean step_time?); choose from step_time"),
        ("step_time = '4 ms'", 'max = "420 ms"'),
        ("[step_time]\nmaximum = '4 ms'", "no such key (did you mean max?); choose from max"),
        ("[step_time]\noptional = true", "has no limit"),
        ("[step_time]\nmax = 400", 'give the unit, such as "420 ms"'),
        ("[step_time]\nmax = '400'", "the unit is missing"),
        ("[step_time]\nmax = '400 lightyears'", "no unit 'lightyears'"),
        ("[step_time]\nmax = 'fast'", "a number and its unit"),
        ("[step_time]\nmax = '70 GiB'", '"420 ms"'),
        ("[step_time]\nmax = true", "a number and its unit"),
        ("[mfu]\nmin = 35", 'in percent write "35 %"'),
        ("[mfu]\nmin = '3 ms'", '"15 %"'),
        ("[mfu]\nmin = '50 %'\nmax = '40 %'", "max is below min"),
        ("[step_time]\nregression = 3", '"5 %"'),
        ("[step_time]\nregression = '3 GiB'", "of the baseline"),
        ("[step_time]\nmax = '4 ms'\noptional = 1", "true or false"),
        ("[step_time]\nmax = '4 ms'\nper_step = 1", "only for tokens_per_second"),
        ("[tokens_per_second]\nmin = 5", "number of tokens per step"),
        ("fail_on = 'severe'", "one of high"),
        ("fail_on = 'high'\nignore = 'rule'", "list of rules"),
        ("[step_time\n", "not TOML"),
    ],
)
def test_mistakes_name_the_file_the_key_and_the_remedy(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UnusableInput) as raised:
        _read(tmp_path, text)
    assert str(raised.value).startswith(str(tmp_path / "budget.toml"))
    assert message in str(raised.value)


def test_a_missing_budget_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match=r"none\.toml: the budget cannot be read"):
        read_budget(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.json", b"[" * 100_000, "the budget is not JSON in UTF-8, or nested too deep"),
        ("a.json", b'{"step_time": ', "the budget is not whole JSON"),
        ("a.toml", b"a = " + b"[" * 100_000, "the budget is "),
        ("a.toml", b"\xff\xfe\x00", "the budget is not text in UTF-8"),
        ("a.toml", b"#" * (1 << 20) + b"#", "the budget is larger than 1 MiB"),
    ],
)
def test_a_damaged_budget_is_refused_with_its_name(tmp_path: Path, name: str, data: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UnusableInput, match=rf"{name}: {says}.*docs/check.md"):
        read_budget(tmp_path / name)


def test_json_is_read_too(tmp_path: Path) -> None:
    toml = _read(tmp_path, '[step_time]\nmax = "1.5 s"\n[memory_peak]\nmax = "70 GiB"')
    as_json = _read(tmp_path, '{"step_time": {"max": "1.5 s"}, "memory_peak": {"max": "70 GiB"}}', "budget.json")
    assert toml.limits == as_json.limits
    assert [limit.at_most.value for limit in toml.limits if limit.at_most] == [1.5e6, 70 * 2**30]
    with pytest.raises(UnusableInput, match="not whole JSON"):
        _read(tmp_path, "[", "budget.json")
    with pytest.raises(UnusableInput, match="no tables"):
        _read(tmp_path, "[]", "budget.json")


def test_every_number_can_be_limited_and_is_documented(root: Path, tmp_path: Path) -> None:
    text = (root / "docs" / "check.md").read_text(encoding="utf-8")
    examples = {"us": '"5 ms"', "share": '"5 %"', "bytes": '"5 GiB"', "per_second": "5"}
    for name, metric in NUMBERS.items():
        more = "\nper_step = 4096" if name == "tokens_per_second" else ""
        assert _read(tmp_path, f"[{name}]\nmax = {examples[metric.unit]}{more}").limits[0].metric == name
        assert f"`{name}`" in text or name in CATEGORIES


def test_the_documented_budget_is_valid(root: Path, tmp_path: Path) -> None:
    text = (root / "docs" / "check.md").read_text(encoding="utf-8")
    block = text.split("```toml\n")[1].split("```")[0]
    budget = _read(tmp_path, block)
    assert {limit.metric for limit in budget.limits} >= {"step_time", "mfu", "memory_peak"}
