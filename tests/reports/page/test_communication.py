"""Overlap and last arrivals in words."""

from __future__ import annotations

import dataclasses

from perfscope.reports.page import communication
from tests.reports.examples import healthy, straggler


def test_who_arrives_last_is_named_only_where_it_stands_out() -> None:
    assert "Rank 2 arrives last" in communication.arrivals_reading(straggler())
    assert "The other ranks wait for it" in communication.arrivals_reading(straggler())
    even = dataclasses.replace(healthy().collectives[0], last_arriver={0: 0.5, 1: 0.5})
    assert "No rank stands out" in communication.arrivals_reading(dataclasses.replace(healthy(), collectives=(even,)))
