"""What the site has besides the files in docs/: reference pages made from the code, and a gallery of real reports.

MkDocs calls the functions named ``on_…``. The documents are written for GitHub; ``on_page_markdown`` allows for what
Python-Markdown reads otherwise.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from website import gallery, reference

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/perfscope/perfscope/blob/main/"

OUTSIDE = re.compile(r"\]\((?:\.\./)+(?P<target>[^)]+)\)")
"""A link that leaves docs/."""
LIST_ITEM = re.compile(r"(?P<indent> *)(?P<mark>[-*]|\d+\.) ")

GENERATED = {
    "reference/cli.md": reference.command_line,
    "reference/python.md": reference.python,
    "reference/numbers.md": reference.numbers,
    "reference/schemas.md": reference.schemas,
    "gallery.md": gallery.page,
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List pages that mkdocs.yml does not name under *How to*: none is missing from the menu."""
    listed = str(config.nav)
    (how_to,) = (section["How to"] for section in config.nav or [] if isinstance(section, dict) and "How to" in section)
    for path in sorted(Path(config.docs_dir).glob("*.md")):
        if f"'{path.name}'" not in listed:
            how_to.append(path.name)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages and the gallery's reports."""
    for name, make in GENERATED.items():
        files.append(File.generated(config, name, content=make()))
    with tempfile.TemporaryDirectory() as folder:
        for report in gallery.reports(ROOT / "sample_traces", Path(folder)):
            files.append(File.generated(config, f"gallery/{report.name}", content=report.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links out of docs/ lead to the repository; lists are as Python-Markdown wants them."""
    depth = page.file.src_uri.count("/")

    def outside(link: re.Match[str]) -> str:
        return f"]({REPOSITORY}{link['target']})" if link[0].count("../") > depth else link[0]

    return for_python_markdown(OUTSIDE.sub(outside, markdown))


def for_python_markdown(text: str) -> str:
    """A blank line before each list, and four spaces for each level: GitHub wants neither."""
    lines: list[str] = []
    fenced = False
    nesting: list[int] = []  # indents of the lists that the line is in
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        item = None if fenced else LIST_ITEM.match(line)
        if item is not None:
            indent = len(item["indent"])
            if not nesting and lines and lines[-1].strip():
                lines.append("")
            while nesting and nesting[-1] > indent:
                nesting.pop()
            if not nesting or nesting[-1] < indent:
                nesting.append(indent)
            line = " " * 4 * (len(nesting) - 1) + line[indent:]
        elif nesting and line.strip() and not line.startswith(" ") and not (lines and lines[-1].strip()):
            nesting = []  # a paragraph after the list
        elif nesting and line.startswith(" "):
            line = " " * 4 * len(nesting) + line.lstrip() if not fenced else line
        lines.append(line)
    return "\n".join(lines) + "\n"
