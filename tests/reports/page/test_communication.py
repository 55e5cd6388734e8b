"""Overlap and last arrivals in words."""

from __future__ import annotations

import dataclasses

import pytest

from perfscope.reports.page import communication
from tests.reports.examples import healthy, straggler


def test_who_arrives_last_is_named_only_where_it_stands_out() -> None:
    assert "Rank 2 arrives last" in communication.arrivals_reading(straggler())
    assert "The other ranks wait for it" in communication.arrivals_reading(straggler())
    even = dataclasses.replace(healthy().collectives[0], last_arriver={0: 0.5, 1: 0.5})
    assert "No rank stands out" in communication.arrivals_reading(dataclasses.replace(healthy(), collectives=(even,)))


@pytest.mark.parametrize(
    ("share", "count", "says"),
    [
        (7 / 8, 8, "88% of the collectives; evenly spread it would be 50%. 8 collectives are too few to tell"),
        (0.56, 100, "56% of the collectives; evenly spread it would be 50%. No rank stands out."),
        (0.75, 100, "75% of the collectives; evenly spread it would be 50%. The other ranks often wait for it."),
    ],
)
def test_of_few_collectives_nobody_can_tell(share: float, count: int, says: str) -> None:
    """A standard deviation of 100 is 5."""
    row = dataclasses.replace(healthy().collectives[0], last_arriver={0: share, 1: 1 - share}, count=count)
    assert says in communication.arrivals_reading(dataclasses.replace(healthy(), collectives=(row,)))
