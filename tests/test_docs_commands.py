"""Every command of the documentation exists, with the options and values that it is shown with."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from perfscope.cli.main import VERBS

FENCED = re.compile(r"^ *```[a-z]*\n(.*?)^ *```", flags=re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]*)`")
COMMAND = re.compile(r"(?:^|(?<=[\s$('\"]))perfscope +(?P<rest>[a-z-][^\n]*)", flags=re.MULTILINE)
PLACEHOLDER = re.compile(r"[A-Z][A-Z=,._-]*$|.*(?:…|\.\.\.|\[options\])|\$")
"""A value that the reader replaces: ``FOLDER``, ``NAME=VALUE``, ``…``, ``$budget``."""


def _documents() -> list[str]:
    root = Path(__file__).parent.parent
    found = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("sample_traces/**/*.md")]
    return sorted(str(path.relative_to(root)) for path in found if path.name != "CHANGELOG.md")


def _commands(text: str) -> Iterator[list[str]]:
    """The words of each command, from the verb up to the end of the line or what the shell reads itself."""
    blocks = [block.replace("\\\n", " ") for block in FENCED.findall(text)]
    inline = INLINE.findall(FENCED.sub("", text))
    uncommented = [re.sub(r"(?:^|\s)#.*", "", part, flags=re.MULTILINE) for part in (*blocks, *inline)]
    for match in (match for part in uncommented for match in COMMAND.finditer(part)):
        try:
            words = list(shlex.shlex(match["rest"], posix=True, punctuation_chars=True))
        except ValueError:  # a quote that the part before the command opens: bash -c '…'
            words = match["rest"].replace("'", " ").replace('"', " ").split()
        end = next((place for place, word in enumerate(words) if set(word) <= set("();<>|&")), len(words))
        yield words[:end]


def _wrong(words: list[str]) -> str:
    """Why click would refuse the command; empty where it would take it."""
    verb, *arguments = words
    if verb.startswith("-"):
        return "" if verb in ("-h", "--help", "-V", "--version") else "no such option"
    if verb not in VERBS:
        return "no such command"
    command = importlib.import_module(f"perfscope.cli.{verb}").command
    context = click.Context(command, info_name=verb)
    try:
        given, _, _ = command.make_parser(context).parse_args(args=list(arguments))
        for parameter in command.params:
            values = given.get(parameter.name)
            if isinstance(parameter, click.Option) and isinstance(
                parameter.type, (click.Choice, click.IntRange, click.FloatRange)
            ):
                for value in values if isinstance(values, list) else [values]:
                    if isinstance(value, str) and not PLACEHOLDER.match(value):
                        parameter.type.convert(value, parameter, context)
    except click.UsageError as error:
        # Mentions: "`perfscope compare` says", "as `perfscope analyze --json` writes it".
        mention = not arguments or (arguments[-1].startswith("--") and "requires an argument" in error.format_message())
        return "" if mention else error.format_message()
    return ""


@pytest.mark.parametrize("document", _documents())
def test_its_commands_are_understood(root: Path, document: str) -> None:
    text = (root / document).read_text(encoding="utf-8")
    refused = {" ".join(words): why for words in _commands(text) if words and (why := _wrong(words))}
    assert refused == {}


def test_commands_are_found_and_wrong_ones_refused() -> None:
    text = """
Run `perfscope analyze traces --json -` or `perfscope check`.

```shell
$ srun perfscope run --activ 3 -- torchrun train.py  # comment
perfscope compare a b \\
    --fail-on slow | tee out
perfscope nothing
docker run image bash -c 'perfscope run --wait no -- python train.py'
```
"""
    found = list(_commands(text))
    assert [words[0] for words in found] == ["run", "compare", "nothing", "run", "analyze", "check"]
    wrong = [bool(_wrong(words)) for words in found]
    assert wrong == [True, True, True, True, False, False]


def test_there_are_many() -> None:
    root = Path(__file__).parent.parent
    assert sum(1 for name in _documents() for _ in _commands((root / name).read_text(encoding="utf-8"))) > 200
