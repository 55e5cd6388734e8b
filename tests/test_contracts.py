"""The import contracts hold, cover every module, and can be broken; mypy sees the linked folders."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

COLLECTORS_MAY_IMPORT = {
    "_version",
    "collectors",
    "errors",
    "frozen",
    "grouping",
    "recording",
    "redact",
    "text",
    "typed",
}
"""Of ``perfscope``, inside the user's job."""


@pytest.fixture(scope="module")
def contracts(root: Path) -> dict[str, dict[str, Any]]:
    """The contracts of pyproject.toml by id."""
    document = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    return {contract["id"]: contract for contract in document["tool"]["importlinter"]["contracts"]}


@pytest.fixture(scope="module")
def tops(root: Path) -> set[str]:
    """Modules and packages directly in ``perfscope``."""
    return {
        path.stem
        for path in (root / "perfscope").iterdir()
        if (path.suffix == ".py" and path.stem != "__init__") or (path / "__init__.py").is_file()
    }


@pytest.fixture
def tree(root: Path, tmp_path: Path) -> Path:
    """A copy of the sources in which contracts may be broken."""
    for name in ("perfscope", "analyzers", "collectors", "reports"):
        shutil.copytree(root / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", tmp_path)
    return tmp_path


def _lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    script = "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports_command as run; run()"
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-c", script, "--no-cache"],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_room_of_the_core_has_its_layer(contracts: dict[str, dict[str, Any]], tops: set[str]) -> None:
    layers = {name.strip() for layer in contracts["direction"]["layers"] for name in layer.split("|")}
    # Collectors stand beside the layers: a contract of their own lists what they may import.
    assert layers == {f"perfscope.{name}" for name in tops - {"collectors"}}


def test_integrations_use_the_public_api_alone(root: Path) -> None:
    """``import perfscope`` and no more of it, as anybody could write them; type checking apart."""
    for path in (root / "perfscope" / "integrations").glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            assert not (isinstance(node, ast.ImportFrom) and str(node.module).startswith("perfscope")), path
            for name in node.names if isinstance(node, ast.Import) else ():
                assert not name.name.startswith("perfscope."), path


def test_collectors_may_not_import_anything_else(contracts: dict[str, dict[str, Any]], tops: set[str]) -> None:
    forbidden = {name for name in contracts["collection"]["forbidden_modules"] if name.startswith("perfscope")}
    assert forbidden == {f"perfscope.{name}" for name in tops - COLLECTORS_MAY_IMPORT}


def test_contracts_hold(tree: Path) -> None:
    done = _lint_imports(tree)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("folder", "statement", "broken"),
    [
        ("collectors", "import numpy", "perfscope.collectors is not allowed to import numpy"),
        (
            "collectors",
            "import perfscope.trace",
            "perfscope.collectors is not allowed to import perfscope.trace",
        ),
        ("analyzers", "import perfscope.reports", "perfscope.analyzers is not allowed to import perfscope.reports"),
        ("analyzers", "import torch", "perfscope.analyzers is not allowed to import torch"),
        ("reports", "import perfscope.cli", "perfscope.reports is not allowed to import perfscope.cli"),
    ],
)
def test_a_wrong_import_in_a_root_folder_is_seen(tree: Path, folder: str, statement: str, broken: str) -> None:
    (tree / folder / "planted.py").write_text(statement + "\n", encoding="utf-8")
    done = _lint_imports(tree)
    assert done.returncode != 0
    assert broken in done.stdout


def test_mypy_does_not_skip_the_root_folders(root: Path) -> None:
    """With the package mapping alone it silently would."""
    modulefinder = pytest.importorskip("mypy.modulefinder")
    options = pytest.importorskip("mypy.options").Options()
    finder = modulefinder.FindModuleCache(modulefinder.SearchPaths((str(root),), (), (), ()), None, options)
    found = {source.module for source in finder.find_modules_recursive("perfscope")}
    expected = {
        ".".join(("perfscope", *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
        for folder in ("analyzers", "collectors", "reports")
        for path in (root / folder).rglob("*.py")
    }
    assert len(expected) >= 5
    assert expected <= found
