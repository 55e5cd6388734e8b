"""Results as files, or on standard output where the path is ``-``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import click

from perfscope.errors import PerfscopeError

EXIT_BROKEN: Final = 3
"""A budget that does not hold, a comparison that fails on what it was told to: 2 is unusable input, 1 a defect."""

FILE: Final = click.Path(path_type=Path, allow_dash=True)


def write(path: Path, text: str, option: str) -> None:
    """Write ``text`` where ``option`` said. Raises PerfscopeError naming the file."""
    if str(path) == "-":
        click.echo(text, nl=False)
        return
    try:
        path.write_text(text, encoding="utf-8", errors="replace", newline="\n")
    except OSError as error:
        raise PerfscopeError(
            f"{path}: cannot be written ({error.strerror}); choose another place with {option}"
        ) from error


def write_json(path: Path, document: dict[str, Any], option: str) -> None:
    """Write a document as JSON."""
    write(path, json.dumps(document, indent=1, allow_nan=False) + "\n", option)
