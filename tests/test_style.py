"""The product and its documents use the words of docs/style.md: those that it rules out do not come back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

PRIVATE = re.compile(
    r"\b(culprits?|guilty|accused?|blam(?:e|ed|es|ing)|cured?|receipts?|for want of|held up|holds? up"
    r"|more steps a second|of the account|rows? of the breakdown|beyond the contract|plays? (?:the|a) step"
    r"|played from)\b",
    re.IGNORECASE,
)
"""Words and turns of the column "not" in docs/style.md that have no other meaning here."""


def _texts(root: Path) -> Iterator[Path]:
    yield from (
        path for path in (*root.glob("*.md"), *root.glob("docs/*.md")) if path.name not in ("style.md", "CHANGELOG.md")
    )
    yield from root.glob("sample_traces/**/*.md")
    for folder in ("perfscope", "collectors", "analyzers", "reports"):
        for suffix in ("py", "html", "js", "css"):
            # Through the root's folders alone: the links in perfscope/ lead to the same files.
            yield from (path for path in (root / folder).rglob(f"*.{suffix}") if path.resolve() == path)


def test_private_words_do_not_come_back(root: Path) -> None:
    found = [
        f"{path.relative_to(root)}:{number}: {match[0]}"
        for path in _texts(root.resolve())
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for match in PRIVATE.finditer(line)
    ]
    assert found == []


def test_the_words_are_those_that_the_style_rules_out(root: Path) -> None:
    style = (root / "docs" / "style.md").read_text(encoding="utf-8")
    for word in ("culprit", "guilty", "accused", "blamed", "cured", "receipt", "held up", "more steps a second"):
        assert word in style
        assert PRIVATE.search(f"the {word} here")
