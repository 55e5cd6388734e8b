"""``perfscope doctor`` on the command line."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from perfscope.cli.main import main
from perfscope.collectors.doctor.check import Level, Probe
from tests.schemas import follows

WORKS = Probe(name="torch", state=Level.OK, text="torch 2.4.1")
NOTED = Probe(name="cores", state=Level.NOTE, text="few", remedy="ask for more")
BROKEN = Probe(name="output", state=Level.BROKEN, text="cannot be written", remedy="choose another")


@pytest.mark.parametrize(
    ("checks", "code", "last"),
    [([WORKS, NOTED], 0, "recordings work here"), ([BROKEN, WORKS], 1, "recordings do not work here")],
)
def test_exit_code_and_advice(monkeypatch: pytest.MonkeyPatch, checks: list[Probe], code: int, last: str) -> None:
    monkeypatch.setattr("perfscope.cli.doctor.examine", lambda _: iter(checks))
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == code
    assert done.output.splitlines()[-1] == last
    for check in checks:
        assert f"{check.state.value:<7} {check.name}: {check.text}\n" in done.output
        assert not check.remedy or f"→ {check.remedy}\n" in done.output


def test_it_looks_at_what_it_is_pointed_to(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("perfscope.cli.doctor.examine", lambda surroundings: seen.append(surroundings) or iter(()))
    CliRunner().invoke(main, ["doctor", "--python", "/opt/python", "--output", "/shared/rec"])
    assert (seen[0].python, str(seen[0].output)) == ("/opt/python", "/shared/rec")


def test_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfscope.cli.doctor.examine", lambda _: iter([NOTED, BROKEN]))
    done = CliRunner().invoke(main, ["doctor", "--json", "--output", "/shared/rec"])
    assert done.exit_code == 1
    document = json.loads(done.stdout)
    follows("doctor", document)
    assert (document["works"], document["output"]) == (False, "/shared/rec")
    assert document["checks"][0] == {"name": "cores", "state": "note", "text": "few", "remedy": "ask for more"}
