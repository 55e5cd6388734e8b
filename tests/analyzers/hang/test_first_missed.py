"""Which operation a rank did not join, where others wait for it at several."""

from __future__ import annotations

from perfscope.analyzers.hang.answer import find_hang
from tests.analyzers.hang.dumps import Groups, dumps, op

GROUPS: Groups = {"0": ("default_pg", range(4)), "1": ("TP", (0, 1)), "2": ("TP", (2, 3)), "3": ("DP", (0, 2))}


def test_the_group_that_was_next_in_the_ranks_own_program_is_named() -> None:
    """Each step of rank 0 is TP, TP, DP, world; it stops after two of TP. Rank 2, of another program, does DP last."""
    step = [("1", 1), ("1", 2), ("3", 1), ("0", 1)]
    before = [
        op(name, number + (2 if name == "1" else 1) * at, at_ms=10 * at + place)
        for at in range(2)
        for place, (name, number) in enumerate(step)
    ]
    ops = {
        0: [*before, op("1", 5, at_ms=21), op("1", 6, at_ms=22)],
        1: [op("1", 6, at_ms=22), op("0", 3, at_ms=23, state="scheduled")],
        2: [op("0", 3, at_ms=29, state="scheduled"), op("3", 3, at_ms=30, state="scheduled")],
        3: [op("2", 6, at_ms=22), op("0", 3, at_ms=24, state="scheduled")],
    }
    hang = find_hang(dumps(GROUPS, ops), {}, stands=True)
    assert hang is not None
    assert (hang.missing_ranks, hang.group, hang.sequence) == ((0,), "3", 3)
