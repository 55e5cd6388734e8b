"""Templates are compiled once, as modules are; what else is made of installed files is made once, too."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import jinja2
import pytest

from perfscope.reports import html


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of this module and its templates, where Python keeps what it compiles."""
    shutil.copytree(Path(html.__file__).with_name("templates"), tmp_path / "templates")
    shutil.rmtree(tmp_path / "templates" / "__pycache__", ignore_errors=True)
    module = tmp_path / "html.py"
    shutil.copy(html.__file__, module)
    monkeypatch.setattr(html, "__file__", str(module))
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    html.environment.cache_clear()
    yield tmp_path
    html.environment.cache_clear()


def compiled(monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a new process would compile a template to get the definitions' one."""
    times = 0
    real = jinja2.Environment.compile

    def counted(*arguments: object, **options: object) -> object:
        nonlocal times
        times += 1
        return real(*arguments, **options)  # type: ignore[call-overload]  # whatever it is called with

    monkeypatch.setattr(jinja2.Environment, "compile", counted)
    html.environment.cache_clear()
    html.environment().get_template("definitions.html")
    monkeypatch.setattr(jinja2.Environment, "compile", real)
    return times


def test_a_template_is_compiled_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [compiled(monkeypatch) for _ in range(3)] == [1, 0, 0]
    assert len(list((folder / "templates" / "__pycache__").iterdir())) == 1


def test_it_is_compiled_again_when_what_it_was_made_by_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled(monkeypatch) == 1
    with (folder / "html.py").open("a", encoding="utf-8") as module:
        module.write("# another filter\n")
    assert [compiled(monkeypatch) for _ in range(2)] == [1, 0]


@pytest.mark.parametrize("damage", [0, 5, 40, -1])
def test_damaged_code_is_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch, damage: int) -> None:
    assert compiled(monkeypatch) == 1
    (kept,) = (folder / "templates" / "__pycache__").iterdir()
    kept.write_bytes(kept.read_bytes()[:damage])
    assert [compiled(monkeypatch) for _ in range(2)] == [1, 0]


def test_nothing_is_written_where_python_keeps_no_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    assert [compiled(monkeypatch) for _ in range(2)] == [1, 1]
    assert not (folder / "templates" / "__pycache__").exists()


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "templates" / "__pycache__").write_text("a file where the folder would be")
    assert [compiled(monkeypatch) for _ in range(2)] == [1, 1]


def made(source: Path) -> tuple[str, bool]:
    """What is kept of a file, and whether it was made just now."""
    times = 0

    def make() -> str:
        nonlocal times
        times += 1
        return source.read_text()[::-1]

    return html.kept(source, make), times == 1


def test_what_is_made_of_a_file_is_made_once(folder: Path) -> None:
    script = folder / "script.js"
    script.write_text("abc")
    assert [made(script) for _ in range(2)] == [("cba", True), ("cba", False)]
    script.write_text("abcd")
    assert [made(script) for _ in range(2)] == [("dcba", True), ("dcba", False)]


@pytest.mark.parametrize("content", [b"", b"\xff", b"3", b"cut"])
def test_what_is_damaged_is_made_again(folder: Path, content: bytes) -> None:
    script = folder / "script.js"
    script.write_text("abc")
    made(script)
    (kept,) = (folder / "templates" / "__pycache__").iterdir()
    kept.write_bytes(kept.read_bytes()[:-1] if content == b"cut" else content)
    assert [made(script) for _ in range(2)] == [("cba", True), ("cba", False)]


def test_what_cannot_be_kept_is_made_each_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = folder / "script.js"
    script.write_text("abc")
    (folder / "templates" / "__pycache__").write_text("a file where the folder would be")
    assert [made(script) for _ in range(2)] == [("cba", True)] * 2
    (folder / "templates" / "__pycache__").unlink()
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    assert [made(script) for _ in range(2)] == [("cba", True)] * 2
    assert not (folder / "templates" / "__pycache__").exists()
