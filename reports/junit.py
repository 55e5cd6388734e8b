"""JUnit XML, as GitHub's reporters, GitLab and Jenkins read it: one test case for each limit and finding.

The format follows Jenkins' xunit plugin (``junit-10.xsd``): ``testsuites``/``testsuite``/``testcase`` with ``failure``
for a failed check, ``error`` for one that cannot be judged and ``skipped`` for an optional one that cannot be judged.
"""

from __future__ import annotations

import re
from typing import Final
from xml.etree import ElementTree as ET

from perfscope.reports.compare.words import metric_value
from perfscope.results.budget import FAILED, SKIPPED, UNKNOWN, Check, CheckRow

_FORBIDDEN: Final = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 does not allow, escaped or not."""


def render(check: Check) -> str:
    """The XML document."""
    count = {status: sum(row.status == status for row in check.rows) for status in (FAILED, UNKNOWN, SKIPPED)}
    totals = {
        "name": "perfscope check",
        "tests": str(len(check.rows)),
        "failures": str(count[FAILED]),
        "errors": str(count[UNKNOWN]),
        "time": "0",
    }
    root = ET.Element("testsuites", totals)
    suite = ET.SubElement(root, "testsuite", {**totals, "skipped": str(count[SKIPPED])})
    properties = ET.SubElement(suite, "properties")
    for name, value in (("recording", check.source), ("budget", check.budget), ("baseline", check.baseline or "none")):
        ET.SubElement(properties, "property", {"name": name, "value": _legal(value)})
    for row in check.rows:
        _case(suite, row)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _case(suite: ET.Element, row: CheckRow) -> None:
    case = ET.SubElement(suite, "testcase", {"classname": "perfscope.budget", "name": _legal(row.name), "time": "0"})
    numbers = ", ".join(
        f"{what} {metric_value(value, row.unit)}"
        for what, value in (("measured", row.measured), ("limit", row.limit), ("baseline", row.baseline))
        if value is not None
    )
    text = _legal(f"{row.message}{f' ({numbers})' if numbers else ''}")
    tag = {FAILED: "failure", UNKNOWN: "error", SKIPPED: "skipped"}.get(row.status)
    if tag is not None:
        result = ET.SubElement(case, tag, {"message": text})
        if tag != "skipped":
            result.set("type", row.status)
            result.text = text
    else:
        ET.SubElement(case, "system-out").text = text


def _legal(text: str) -> str:
    """Text with forbidden characters replaced."""
    return _FORBIDDEN.sub("\ufffd", text)
