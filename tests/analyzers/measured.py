"""A recording as it is measured, before any rule is asked: for tests of tables, which no advice changes. And with all
advice but the curves, which are part of no finding.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
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


def advised(path: Path) -> Summary:
    """What ``perfscope.analyze`` finds, without the curves, which take almost as long as all findings."""
    with without_curves():
        return perfscope.analyze(path, workers=1)


def without_curves() -> AbstractContextManager[object]:
    """No summary has curves, for as long as this is entered."""
    return mock.patch.object(summarize, "curves", return_value=())
