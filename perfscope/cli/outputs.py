"""Results as files, or on standard output where the path is ``-``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click

from perfscope.errors import PerfscopeError
from perfscope.recording.whole import write_text

EXIT_BROKEN: Final = 3
"""A budget that does not hold, or a comparison that fails its condition. 2 is unusable input, 1 a defect."""

FILE: Final = click.Path(path_type=Path, allow_dash=True)


def check(path: Path | None, option: str) -> None:
    """Check that ``path`` can be written, before the work whose result goes there. None and ``-`` always can.

    Raises PerfscopeError naming the file, the reason, and ``option``, which takes another path.
    """
    if path is None or str(path) == "-":
        return
    if path.is_dir():
        why = "it is a folder"
    elif not path.parent.is_dir():
        why = f"there is no folder {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "permission denied"
    else:
        return
    raise PerfscopeError(f"{path}: cannot be written ({why}); choose another place with {option}")


@contextmanager
def named(path: Path, option: str) -> Iterator[None]:
    """Where ``path`` cannot be written, raises PerfscopeError naming it and ``option``, which takes another."""
    try:
        yield
    except OSError as error:
        raise PerfscopeError(
            f"{path}: cannot be written ({error.strerror}); choose another place with {option}"
        ) from error


def write(path: Path, text: str, option: str) -> None:
    """Write ``text`` to the path of ``option``, whole or not at all. Raises PerfscopeError naming the file."""
    if str(path) == "-":
        click.echo(text, nl=False)
        return
    with named(path, option):
        write_text(path, text)


def write_json(path: Path, document: dict[str, Any], option: str) -> None:
    """Write a document as JSON."""
    write(path, json.dumps(document, indent=1, allow_nan=False) + "\n", option)


def open_page(page: Path) -> None:
    """Open a page in the user's browser; where there is none, say so."""
    import webbrowser

    if not webbrowser.open(page.resolve().as_uri()):
        click.echo(f"perfscope: no browser to open the page in; open {page.resolve()}", err=True)
