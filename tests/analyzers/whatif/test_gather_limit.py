"""FSDP's limit on gathered units: which freed unit a gather waits for, by hand."""

from __future__ import annotations

import pytest

from perfscope.analyzers.whatif.gather_limit import Pass, taken_later

G, F = True, False


@pytest.mark.parametrize(
    ("one", "events"),
    [
        (Pass(3, 0, frees=True), [G, F, G, F, G, F]),
        (Pass(3, 1, frees=True), [G, G, F, G, F, F]),
        (Pass(2, 0, frees=False), [G, G]),
    ],
)
def test_the_order_of_gathers_and_freed_units(one: Pass, events: list[bool]) -> None:
    assert list(one.events()) == events


FORWARD, BACKWARD = Pass(3, 0, frees=True), Pass(3, 0, frees=True)
AHEAD = Pass(3, 1, frees=True)


@pytest.mark.parametrize(
    ("before", "after", "fewer"),
    [
        # Two units are left at the end of each step; gathered ahead, three: each gather waits for one freed earlier.
        ((FORWARD, BACKWARD), (FORWARD, AHEAD), 1),
        ((FORWARD, BACKWARD), (AHEAD, AHEAD), 1),
        # The backward is ahead already, and the forward holds no more units than it.
        ((FORWARD, AHEAD), (AHEAD, AHEAD), 0),
        ((FORWARD, AHEAD), (FORWARD, AHEAD), 0),
        ((), (), 0),
    ],
)
def test_units_that_are_gathered_ahead_leave_more_freed_ones(
    before: tuple[Pass, ...], after: tuple[Pass, ...], fewer: int
) -> None:
    assert taken_later(before, after) == fewer
