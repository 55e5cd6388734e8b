"""The part of docs/api.md that lists every table and column: ``python -m tests.results.api_reference`` writes it."""

from __future__ import annotations

import sys
from pathlib import Path

from perfscope.results.frames import TABLES

DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"
HEADING = "## Every table"
SOURCE = """Written by `python -m tests.results.api_reference` from the classes in `perfscope/results/`, whose fields
these are; [metrics.md](metrics.md) has the definitions in context."""


def reference() -> str:
    """From the heading to the end of the document."""
    parts = [HEADING, SOURCE]
    for name, table in TABLES.items():
        parts.append(f"### `{name}`")
        parts.append(_plain(table.__doc__ or ""))
        rows = [
            f"| `{column.name}` | {column.unit or _kind(column.dtype)} | {_plain(column.meaning)} |"
            for column in table.columns
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
