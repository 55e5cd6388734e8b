"""What is installed: exactly the packages on the disk, under one name, and light to import."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT_FOLDERS = ("analyzers", "collectors", "reports")
"""Folders of the repository's root that install as subpackages of perfscope."""

BOUND = re.compile(r"([A-Za-z0-9_.-]+)>=([0-9.]+)(?:; .*)?$")
"""A dependency as pyproject.toml has it: a name, its lower bound, and perhaps for which Python."""

HOOK = "perfscope.pth"
"""What looks for the variable PERFSCOPE at every start of Python."""

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
        ".git",
        ".venv",
        "build",
        "dist",
        "*.egg-info",
        "__pycache__",
        "*.so",
        "sample_traces",
        "*-recording*",
        ".*_cache",
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


COMPILED = ("perfscope/analyzers/readers/_scan", "perfscope/collectors/phases/_clock")
"""What is compiled, of the reader and of the collectors, where there is a compiler: paths without the ending."""


def _sources(root: Path) -> set[str]:
    """Every file that belongs in the wheel, by its installed name; what is compiled has no fixed one."""
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
    return {name for name in inside | core if not name.endswith((".c", ".so", ".pyd"))}


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
    compiled = {name for name in installed if name.endswith((".so", ".pyd"))}
    assert {name.partition(".")[0] for name in compiled} == (set(COMPILED) if shutil.which("cc") is not None else set())
    assert installed - compiled == _sources(root) | {HOOK}


def test_without_a_compiler_the_wheel_lacks_the_compiled_parts_alone(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("analyzers", "collectors", "reports", "perfscope"):
        shutil.copytree(
            root / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("*.so", "__pyc*")
        )
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(root / file, tmp_path)
    monkeypatch.setenv("CC", "no-such-compiler")
    with zipfile.ZipFile(_build(tmp_path, "build_wheel", tmp_path)) as archive:
        installed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert installed == _sources(root) | {HOOK}


def test_wheel_puts_one_package_and_its_hook_into_site_packages(wheel: set[str]) -> None:
    assert {name.split("/")[0] for name in wheel if ".dist-info/" not in name} == {"perfscope", HOOK}


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


VERBS = {
    "--help": ("numpy", "msgspec", "perfscope.analyzers", "perfscope.collectors", "perfscope.reports"),
    "run --help": ("numpy", "msgspec", "perfscope.analyzers", "perfscope.reports", "perfscope.results"),
    "doctor --help": ("numpy", "pandas", "plotly", "perfscope.analyzers"),
    "analyze sample_traces/healthy --quiet --output {}": (
        "pandas", "plotly", "narwhals", "torch", "distributed", "fsspec", "pyarrow", "perfscope.collectors",
        "perfscope.analyzers.hang.answer", "perfscope.analyzers.history", "perfscope.analyzers.compare",
        "perfscope.analyzers.merge", "perfscope.analyzers.readers.nsys", "sqlite3",
        "perfscope.reports.markdown", "perfscope.reports.tensorboard",
        "perfscope.reports.terminal", "perfscope.results.anonymous", "perfscope.tune",
        "perfscope.execution.executors", "concurrent", "multiprocessing",
    ),
}  # fmt: skip
"""Arguments of the command -> modules that it must not import: they would cost every user their time."""


@pytest.mark.parametrize("arguments", VERBS)
def test_a_verb_imports_only_what_it_needs(arguments: str, root: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from perfscope.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print('MODULES', *sys.modules)"
    )
    given = arguments.format(tmp_path / "report.html").split()
    environment = {**os.environ, "PERFSCOPE_CACHE": "off"}
    done = subprocess.run(
        [sys.executable, "-c", script, *given], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.rpartition("MODULES")[2].split())
    assert "click" in imported
    unneeded = {name for name in imported for heavy in VERBS[arguments] if f"{name}.".startswith(f"{heavy}.")}
    assert not unneeded


def test_public_names_load_on_first_use() -> None:
    imported = _imported_by("import perfscope; perfscope.analyze")
    assert "perfscope.analyzers.analyze" in imported
    assert "torch" not in imported


def test_the_lowest_versions_are_those_that_are_tried(root: Path) -> None:
    """``constraints-minimums.txt`` has the lower bounds of pyproject.toml, which .ci/package tries."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = project["dependencies"]
    optional = [
        each
        for extra in ("zstd", "cache", "figures", "dask", "mcp", "remote")
        for each in project["optional-dependencies"][extra]
    ]
    promised = {match[1]: match[2] for each in (*needed, *optional) if (match := BOUND.match(each))}
    assert len(promised) == len({*needed, *optional})
    lines = (root / "constraints-minimums.txt").read_text(encoding="utf-8").splitlines()
    tried = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    # psutil, of the sampler's extra: its other package reads NVIDIA's devices only.
    assert {name: _numbers(version) for name, version in tried.items() if name != "psutil"} == {
        name: _numbers(version) for name, version in promised.items()
    }


def _numbers(version: str) -> tuple[int, int, int]:
    first, second, third, *_ = (*map(int, version.split(".")), 0, 0)
    return first, second, third


def test_the_description_has_no_relative_link(root: Path) -> None:
    """PyPI shows the README without the files beside it."""
    code = "import runpy, setuptools\nsetuptools.setup = lambda **given: print(given['long_description'])\n"
    code += "runpy.run_path('setup.py')"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    targets = re.findall(r"\]\(([^)]+)\)", done.stdout)
    assert len(targets) > 10
    assert all(target.startswith("https://") for target in targets), targets
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", done.stdout)
    assert pictures
    for picture in pictures:
        name = picture.removeprefix("https://github.com/perfscope/perfscope/raw/main/")
        assert (root / name).is_file()


def test_the_citation_names_the_version(root: Path) -> None:
    from perfscope import __version__

    citation = yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


@pytest.mark.parametrize("folder", [".github", "containers"])
def test_what_is_committed_for_others_can_be_read(root: Path, folder: str) -> None:
    """Workflows and issue forms are YAML of the right shape, container files end in a known instruction."""
    for path in (root / folder).rglob("*"):
        if path.suffix == ".yml":
            document = yaml.safe_load(path.read_text(encoding="utf-8"))
            if path.parent.name == "workflows":
                assert {"name", "jobs", True} <= set(document), path  # `on` is true in YAML 1.1
                for job in document["jobs"].values():
                    assert all(("uses" in step) != ("run" in step) for step in job["steps"]), path
            elif path.name not in ("config.yml", "dependabot.yml"):
                assert {"name", "description", "body"} <= set(document), path
        elif path.name.endswith("Containerfile"):
            text = path.read_text(encoding="utf-8").replace("\\\n", " ")
            lines = [line for line in text.splitlines() if line and not line.startswith("#")]
            known = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "RUN", "WORKDIR"}
            assert {line.split()[0] for line in lines} <= known, path
            for line in lines:
                if line.startswith("RUN "):
                    subprocess.run(["sh", "-n", "-c", line.removeprefix("RUN ")], check=True)
