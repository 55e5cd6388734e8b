"""Shells complete commands, options and files: asked as the shells' own scripts ask, and by the shells themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from perfscope.cli.main import VERBS, main


def _script(shell: str) -> str:
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0, result.output
    return result.output


def _completed(*words: str) -> list[str]:
    """What bash is given for the last word: ``type,value`` each."""
    asking = {"_PERFSCOPE_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    result = CliRunner().invoke(main, prog_name="perfscope", env=asking)
    return result.output.splitlines()


def test_commands_and_options_of_the_program() -> None:
    assert _completed("perfscope", "") == [f"plain,{verb}" for verb in VERBS]
    assert _completed("perfscope", "wh") == ["plain,whatif"]
    assert {"plain,--version", "plain,--help"} <= set(_completed("perfscope", "--"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("analyze", "--op"), ["plain,--open"]),
        (("check", "folder", "--fail-on", "h"), ["plain,high"]),
        (("analyze", "sam"), ["file,sam"]),
        (("compare", "a", "b"), ["file,b"]),
        (("run", "--", "python", "tr"), ["file,tr"]),
        (("no-such-verb", "an"), ["plain,analyze"]),
    ],
)
def test_what_a_command_takes(words: tuple[str, ...], expected: list[str]) -> None:
    assert _completed("perfscope", *words) == expected


def test_completing_a_command_does_not_import_the_analysis() -> None:
    code = "import sys, perfscope.cli.analyze as a; print(*(name for name in sys.modules if name.count('.') < 2))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"pandas", "numpy", "perfscope.analyzers"} & set(done.stdout.split())


@pytest.fixture
def command(tmp_path: Path) -> dict[str, str]:
    """The environment of a shell in which ``perfscope`` is this one."""
    program = tmp_path / "bin" / "perfscope"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m perfscope "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    roots = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(roots)}


def _in_shell(shell: str, text: str, environment: dict[str, str]) -> str:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"no {shell} on this machine")
    flags = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    done = subprocess.run([found, *flags, "-c", text], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_bash_completes(command: dict[str, str]) -> None:
    text = f"""{_script("bash")}
COMP_WORDS=(perfscope analyze --js); COMP_CWORD=2
$(complete -p perfscope | sed 's/.*-F \\([^ ]*\\).*/\\1/') perfscope
echo "${{COMPREPLY[@]}}"
"""
    assert _in_shell("bash", text, command) == "--json\n"


def test_fish_completes(command: dict[str, str]) -> None:
    text = f"{_script('fish')}\ncomplete --do-complete 'perfscope analyze --js'"
    assert _in_shell("fish", text, command).startswith("--json\t")


def test_zsh_defines_a_completion_for_the_command(command: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "perfscope.zsh"
    script.write_text(_script("zsh"), encoding="utf-8")
    text = f"autoload -Uz compinit && compinit -D && source {script} && echo $_comps[perfscope]"
    assert _in_shell("zsh", text, command) == "_perfscope_completion\n"
