"""What any rule's test is advised to type is code: each text is parsed, and where torch is installed, run."""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from perfscope.results.findings import LANGUAGES, Action, Block, blocks

Run = Callable[[str], str | None]


@pytest.fixture(scope="session")
def run_typed(root: Path) -> Iterator[Run]:
    """Runs Python as a training script would and returns the error; each text once. The process starts when needed."""
    started: list[subprocess.Popen[str]] = []

    @cache
    def run(text: str) -> str | None:
        if find_spec("torch") is None:
            return None
        if not started:
            worker = [sys.executable, "-m", "tests.analyzers.rules.typing_worker"]
            started.append(
                subprocess.Popen(
                    worker,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    cwd=root,
                )
            )
        (process,) = started
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(text) + "\n")
        process.stdin.flush()
        answer: str | None = json.loads(process.stdout.readline())
        return answer

    yield run
    for process in started:
        process.communicate()


def check(block: Block, run: Run) -> None:
    """Raise where the block is no code of its language."""
    if block.language == "python":
        ast.parse(block.text)
        assert "…" not in block.text
        error = run(block.text)
        assert error is None, f"{error}\n{block.text}"
    elif block.language == "json":
        assert isinstance(json.loads(block.text), dict)
    elif block.language == "shell":
        words = shlex.split(block.text, comments=True)
        assert words
        assert words[0].startswith("--") or words[0] in ("export", "unset")
    elif block.language == "yaml":
        pytest.importorskip("yaml")
        import yaml

        assert isinstance(yaml.safe_load(block.text), dict)
    else:
        assert "```" not in block.text, f"a fence of none of {LANGUAGES}"


@pytest.fixture(autouse=True)
def what_is_typed(monkeypatch: pytest.MonkeyPatch, run_typed: Run) -> Iterator[None]:
    """After each test: everything that an Action in it asks to type."""
    made: list[str] = []
    original = Action.__init__

    def listening(self: Action, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(self.how)

    monkeypatch.setattr(Action, "__init__", listening)
    yield
    for how in dict.fromkeys(made):
        for block in blocks(how):
            check(block, run_typed)
