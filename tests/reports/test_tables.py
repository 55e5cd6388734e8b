"""Cells and columns of a table."""

from __future__ import annotations

from perfscope.reports.tables import in_unit
from perfscope.text import unit_for


def test_a_columns_numbers_share_their_decimals() -> None:
    unit = unit_for(126_400.0)
    assert [in_unit(us, unit, 126_400.0) for us in (126_400.0, 300.0, 4.0, 0.0)] == ["126.4", "0.3", "<0.1", "0"]
