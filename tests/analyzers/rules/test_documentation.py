"""docs/advice.md lists every rule, with when it fires, and nothing else."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from perfscope.analyzers.rules import RULES


def test_the_tables_list_every_rule(root: Path) -> None:
    text = (root / "docs" / "advice.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([a-z0-9-]+)` \|", text, flags=re.MULTILINE)
    assert sorted(listed) == sorted(sys.modules[rule.__module__].RULE for rule in RULES)
