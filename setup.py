"""The description on PyPI: the README with absolute links, since PyPI has no files for relative ones to lead to."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = "https://github.com/perfscope/perfscope"
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!https?:|#)(?P<target>[^)]+)\)")


def absolute(link: re.Match[str]) -> str:
    """A relative link of the README as one to the repository: pictures to the raw file, others to its page."""
    kind = "raw" if link["image"] else "blob"
    return f"{link['image']}[{link['text']}]({REPOSITORY}/{kind}/main/{link['target']})"


readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
setup(long_description=LINK.sub(absolute, readme), long_description_content_type="text/markdown")
