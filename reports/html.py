"""Self-contained HTML files: templates, style sheets and scripts put together.

Such a file loads nothing. Its content security policy allows only the scripts whose hashes it names: even a name from
a trace that slipped past the escaping could not run or fetch anything.
"""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import jinja2
from jinja2.bccache import Bucket

from perfscope._version import __version__
from perfscope.recording.whole import write_parts, write_text
from perfscope.reports.figures.colours import variables
from perfscope.text import ABSENT, of_recording

_NUMBER_AND_UNIT: Final = re.compile(r"(\d) (%|[mµ]?s\b|[KMGT]?i?B\b|[MGT]B/s|TFLOP)")


def assembled(
    template: str,
    values: dict[str, Any],
    *,
    styles: tuple[str, ...],
    scripts: tuple[str, ...],
    sources: tuple[str, ...] = (),
) -> Iterator[str]:
    """The parts of a self-contained page, in order: ``styles`` and ``scripts`` are names in ``assets``.

    Scripts from ``sources`` may run besides, those that the page's own scripts make.
    """
    texts = tuple(_asset(name) for name in scripts)
    return (
        environment()
        .get_template(template)
        .generate(**values, style=_style(*styles), scripts=texts, policy=_policy(texts, sources))
    )


def save(parts: Iterable[str], path: Path) -> None:
    """Write a page, whole or not at all. Raises OSError when the folder cannot be written.

    The whole page is never in memory: as one text with any letter outside Latin-1, Python gives each letter two bytes.
    """
    write_parts(path, parts)


def kept(source: Path, make: Callable[[], str]) -> str:
    """What ``make`` makes of a file, in ASCII, kept as templates' code is until the file has another size or time."""
    status = source.stat()
    target = _folder_of_code() / f"{source.name}.made"
    with suppress(OSError, UnicodeDecodeError):
        head, _, text = target.read_text(encoding="ascii").partition("\n")
        if head == f"{status.st_size} {status.st_mtime_ns} {len(text)}":
            return text
    text = make()
    if not sys.dont_write_bytecode:
        with suppress(OSError):
            target.parent.mkdir(exist_ok=True)
            write_text(target, f"{status.st_size} {status.st_mtime_ns} {len(text)}\n{text}")
    return text


def _folder_of_code() -> Path:
    """Beside the templates, as Python keeps modules' code."""
    return Path(__file__).with_name("templates") / "__pycache__"


def _style(*names: str) -> str:
    """Style sheets, after the colours that they use."""
    return "\n".join((f":root{{{variables()}}}", *(_asset(name) for name in names)))


class _Compiled(jinja2.FileSystemBytecodeCache):
    """The templates' code, kept as that of modules is: beside them, where that is permitted and Python keeps code."""

    def __init__(self) -> None:
        super().__init__(str(_folder_of_code()), "%s.jinja")
        # What a template becomes depends on this module's options and filters too.
        self._made_by = f"{__version__} {jinja2.__version__} {Path(__file__).read_text(encoding='utf-8')}"

    def get_source_checksum(self, source: str) -> str:
        """What the code was made of."""
        return super().get_source_checksum(self._made_by + source)

    def load_bytecode(self, bucket: Bucket) -> None:
        """Read a template's code, where it is kept and whole."""
        try:
            super().load_bytecode(bucket)
        except Exception:  # whatever unpickling a damaged file may raise
            bucket.reset()

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Keep a template's code."""
        if not sys.dont_write_bytecode:
            with suppress(OSError):
                Path(self.directory).mkdir(exist_ok=True)
                super().dump_bytecode(bucket)


@cache
def environment() -> jinja2.Environment:
    """The templates: everything that they show is escaped, and what they do not know is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        bytecode_cache=_Compiled(),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Last line of defence: a value that no formatter saw shows as absent, never as "None".
        finalize=lambda value: ABSENT if value is None else value,
    )
    environment.filters["bound"] = _bound
    environment.filters["at_joints"] = _at_joints
    environment.filters["of_recording"] = of_recording
    return environment


def _bound(text: str) -> str:
    """``text`` with its numbers bound to their units, so that no line ends between them."""
    return _NUMBER_AND_UNIT.sub("\\1\u00a0\\2", text)


def _at_joints(name: str) -> list[str]:
    """A dotted name in the parts between which a line may end: after dots and underscores."""
    return re.split(r"(?<=[._])(?=.)", name[:400])


@cache
def _asset(name: str) -> str:
    """A file of ``assets``, as it goes into the page."""
    return (Path(__file__).with_name("assets") / name).read_text(encoding="utf-8")


def _policy(scripts: tuple[str, ...], sources: tuple[str, ...]) -> str:
    """The content security policy: these scripts, inline styles (plotly sets them), pictures made here; no network."""
    import hashlib  # loads OpenSSL: once other processes have ended that need memory

    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join((*(f"'sha256-{digest}'" for digest in hashes), *sources))
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
