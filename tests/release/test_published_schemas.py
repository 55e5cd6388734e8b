"""The schemas in docs/schemas are those of the code."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from perfscope.cli.main import main
from perfscope.cli.schema import SCHEMAS


def run(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(each) for each in arguments])
    assert result.exit_code in (0, 3), result.output
    return result.stdout


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_published_schema_is_the_codes(root: Path, name: str) -> None:
    published = (root / "docs" / "schemas" / f"{name}.json").read_text(encoding="utf-8")
    assert published == run("schema", name), "write it again: python -m perfscope schema --output docs/schemas"


def test_all_of_them_are_published_and_listed(root: Path, tmp_path: Path) -> None:
    names = {path.stem for path in (root / "docs" / "schemas").glob("*.json")}
    assert names == set(SCHEMAS)
    listed = (root / "docs" / "schemas" / "README.md").read_text(encoding="utf-8")
    assert all(f"| [{name}]({name}.json) |" in listed for name in SCHEMAS)
    assert [line.split()[0] for line in run("schema").splitlines()] == list(SCHEMAS)
    run("schema", "--output", tmp_path / "new")
    assert {path.stem for path in (tmp_path / "new").iterdir()} == names
