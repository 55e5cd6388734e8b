"""``perfscope schema``, and what commands print in JSON, held to it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

from click.testing import CliRunner

from perfscope.cli.main import VERBS, main
from perfscope.cli.schema import SCHEMAS
from tests.schemas import follows


def run(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(each) for each in arguments])
    assert result.exit_code in (0, 3), result.output
    return result.stdout


def test_what_commands_print(samples: Path, summaries: dict[str, Path], tmp_path: Path) -> None:
    for path in summaries.values():
        follows("summary", json.loads(path.read_text(encoding="utf-8")))
    pages = ("--output", tmp_path / "page.html")
    follows("comparison", json.loads(run("compare", summaries["healthy"], summaries["starved"], *pages, "--json", "-")))
    budget = tmp_path / "budget.toml"
    budget.write_text('[step_time]\nmax = "1 ms"\nregression = "1 %"\n[mfu]\nmin = 0.5\noptional = true\n')
    checked = run("check", summaries["starved"], "--budget", budget, "--baseline", summaries["healthy"], "--json", "-")
    follows("check", json.loads(checked))
    follows("whatif", json.loads(run("whatif", samples / "starved", "--set", "dataloader.num_workers=2", "--json")))
    swept = json.loads(run("whatif", samples / "starved", "--sweep", "dataloader.num_workers=1,2", "--json"))
    follows("sweep", swept)
    assert [point["value"] for point in swept["points"]] == ["1", "2"]


JSON_OF_VERBS = {
    "analyze": {"summary"},
    "check": {"check"},
    "compare": {"comparison"},
    "doctor": {"doctor"},
    "watch": {"live"},
    "whatif": {"whatif", "sweep"},
}
"""Verb with an option --json -> the schemas of what it prints; tests hold each to real output."""


def test_every_verb_that_prints_json_has_a_schema() -> None:
    printing = set()
    for verb in VERBS:
        parameters = importlib.import_module(f"perfscope.cli.{verb}").command.params
        if any("--json" in parameter.opts for parameter in parameters):
            printing.add(verb)
    assert printing == set(JSON_OF_VERBS)
    assert set().union(*JSON_OF_VERBS.values()) <= set(SCHEMAS)


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    result = CliRunner().invoke(main, ["schema", "sumary"])
    assert result.exit_code == 2
    assert "'summary'" in result.output
