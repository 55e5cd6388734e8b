"""The part of docs/api.md that lists every table and column; ``python -m tests.core.api_reference`` writes it anew."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from perfscope.frame_tables import TABLES, columns
from perfscope.frames import Frames

DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"
HEADING = "## Every table"
SOURCE = """Written by `python -m tests.core.api_reference` from the classes in `perfscope/summary*.py` and
`perfscope/frame_rows.py`, whose fields these are; the rows of the account are defined in [metrics.md](metrics.md)."""


def reference() -> str:
    """From the heading to the end of the document."""
    parts = [HEADING, SOURCE]
    for name in TABLES:
        parts.append(f"### `{name}`")
        parts.append(_plain(inspect.getdoc(getattr(Frames, name)) or ""))
        rows = [
            f"| `{column.name}` | {column.unit or _kind(column.dtype)} | {_plain(column.meaning)} |"
            for column in columns(name)
        ]
        parts.append("\n".join(["| column | unit or type | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _kind(dtype: str) -> str:
    return {"object": "", "int64": "number", "float64": "number", "bool": "flag", "boolean": "flag"}.get(
        dtype.lower(), ""
    )


def _plain(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


def main() -> int:
    """Write the document's part."""
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(text[: text.index(HEADING)] + reference(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
