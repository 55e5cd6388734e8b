"""A recording as it is measured, before any rule is asked: for tests of tables, which no advice changes."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from unittest import mock

import perfscope
from perfscope.analyzers import summarize
from perfscope.results.summary import Summary


def measured(path: Path) -> Summary:
    """What ``perfscope.analyze`` finds before it evaluates the rules, which takes as long as all the rest."""
    with mock.patch.object(summarize, "_advised", attrgetter("summary")):
        return perfscope.analyze(path, workers=1)
