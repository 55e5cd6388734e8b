"""What is installed: exactly the packages on the disk, under one name, and light to import."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT_FOLDERS = ("analyzers", "collectors", "reports")
"""Folders of the repository's root that install as subpackages of perfscope."""

HEAVY = ("click", "isal", "jinja2", "msgspec", "numpy", "pandas", "torch")


@pytest.fixture(scope="module")
def config(root: Path) -> dict[str, Any]:
    """``[tool.setuptools]``."""
    document = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    setuptools: dict[str, Any] = document["tool"]["setuptools"]
    return setuptools


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in a wheel built from the sdist, so that the sdist is known to be complete too."""
    work = tmp_path_factory.mktemp("wheel")
    unwanted = shutil.ignore_patterns(
        ".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", "sample_traces", "*-recording*", ".*_cache"
    )
    shutil.copytree(root, work / "tree", symlinks=True, ignore=unwanted)
    sdist = _build(work / "tree", "build_sdist", work)
    safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from 3.11.4 on
    shutil.unpack_archive(sdist, work / "unpacked", **safely)
    (unpacked,) = (work / "unpacked").iterdir()
    with zipfile.ZipFile(_build(unpacked, "build_wheel", work)) as archive:
        return set(archive.namelist())


def _build(tree: Path, hook: str, into: Path) -> Path:
    """Call a hook of the build backend as pip would, without the network that an isolated environment needs."""
    script = f"import setuptools.build_meta as backend; print(backend.{hook}({str(into)!r}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return into / done.stdout.splitlines()[-1]


def _packages_on_disk(root: Path) -> set[str]:
    tops = {folder: f"perfscope.{folder}" for folder in ROOT_FOLDERS} | {"perfscope": "perfscope"}
    # os.walk does not follow the links, so nothing is met twice.
    return {
        ".".join((name, *Path(path).relative_to(root / top).parts))
        for top, name in tops.items()
        for path, _, files in os.walk(root / top)
        if any(file.endswith(".py") for file in files)
    }


def _sources(root: Path) -> set[str]:
    """Every file that belongs in the wheel, by its installed name."""
    inside = {
        f"perfscope/{path.relative_to(root)}"
        for folder in ROOT_FOLDERS
        for path in (root / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    core = {
        str((Path(where) / file).relative_to(root))
        for where, _, files in os.walk(root / "perfscope")
        for file in files
        if "__pycache__" not in Path(where).parts
    }
    return inside | core


def test_package_list_is_what_is_on_the_disk(root: Path, config: dict[str, Any]) -> None:
    assert set(config["packages"]) == _packages_on_disk(root)


def test_every_package_has_its_folder(root: Path, config: dict[str, Any]) -> None:
    def folder(package: str) -> str:
        below = package.removeprefix("perfscope.")
        return below.replace(".", "/") if below.split(".")[0] in ROOT_FOLDERS else package.replace(".", "/")

    mapped = config["package-dir"]
    assert mapped == {top: folder(top) for top in ("perfscope", *(f"perfscope.{name}" for name in ROOT_FOLDERS))}
    for package in config["packages"]:
        assert (root / folder(package) / "__init__.py").is_file()


@pytest.mark.parametrize("folder", ROOT_FOLDERS)
def test_links_are_relative_and_lead_to_the_root_folders(root: Path, folder: str) -> None:
    link = root / "perfscope" / folder
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{folder}"
    assert (link / "__init__.py").samefile(root / folder / "__init__.py")


def test_wheel_holds_every_source_file_and_nothing_else(root: Path, wheel: set[str]) -> None:
    installed = {name for name in wheel if ".dist-info/" not in name}
    assert installed == _sources(root)


def test_wheel_puts_one_name_into_site_packages(wheel: set[str]) -> None:
    assert {name.split("/")[0] for name in wheel if ".dist-info/" not in name} == {"perfscope"}


def test_wheel_is_typed_and_licensed(wheel: set[str]) -> None:
    assert "perfscope/py.typed" in wheel
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel)


def _imported_by(statement: str) -> set[str]:
    script = f"import sys; before = set(sys.modules); {statement}; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_measure_of_lightness_sees_what_is_heavy() -> None:
    assert "numpy" in _imported_by("import perfscope.trace.trace")


def test_importing_the_package_imports_nothing_heavy() -> None:
    """Collectors import it inside a user's training job."""
    imported = _imported_by(
        "import perfscope, perfscope.recording.paths, perfscope.recording.metadata, perfscope.recording.vocabulary"
    )
    assert not imported & set(HEAVY)
    assert not {name for name in imported if name.startswith(("perfscope.analyzers", "perfscope.collectors"))}


def test_running_a_command_starts_without_the_analyzers() -> None:
    imported = _imported_by("import perfscope.cli.run")
    assert not imported & (set(HEAVY) - {"click"})
    assert not {name for name in imported if name.startswith(("perfscope.analyzers", "perfscope.reports"))}


def test_public_names_load_on_first_use() -> None:
    imported = _imported_by("import perfscope; perfscope.analyze")
    assert "perfscope.analyzers.analyze" in imported
    assert "torch" not in imported
