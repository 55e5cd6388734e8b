"""Schedules written by hand, replayed by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from perfscope.analyzers.replay.engine import OpKind, Schedules, replay
from perfscope.trace.trace import NONE

NEVER = np.iinfo(np.int64).min

Op = tuple[OpKind, int, int, int]
"""Kind, operand, own time before it, lag."""


def schedules(
    *ranks: list[Op],
    collectives: list[tuple[int, int, int, int]],
    floor: list[int],
    start: list[int] | None = None,
    hold: tuple[int, ...] = (),
    marks: int = 0,
) -> Schedules:
    """``collectives``: instance, previous rank op, gap, transfer of each rank op."""
    ops = [op for rank in ranks for op in rank]
    columns = np.array(ops, dtype=np.int64).T
    instance, previous, gap, transfer = np.array(collectives, dtype=np.int64).reshape(-1, 4).T
    return Schedules(
        ranks=tuple(range(len(ranks))),
        start_ns=np.array(start or [0] * len(ranks), dtype=np.int64),
        first=np.cumsum([0, *(len(rank) for rank in ranks)]),
        kind=columns[0],
        operand=columns[1],
        own_ns=columns[2],
        lag_ns=columns[3],
        instance=instance,
        previous=previous,
        gap_ns=gap,
        transfer_ns=transfer,
        floor_ns=np.array(floor, dtype=np.int64),
        hold_ns=np.array(hold, dtype=np.int64),
        marks=marks,
    )


def in_one_collective(first: int, second: int) -> Schedules:
    """Two ranks that compute, issue one collective of 5 and wait for it."""
    return schedules(
        [(OpKind.ISSUE, 0, first, 0), (OpKind.WAIT, 0, 0, 0), (OpKind.MARK, 0, 0, 0)],
        [(OpKind.ISSUE, 1, second, 0), (OpKind.WAIT, 1, 0, 0), (OpKind.MARK, 1, 0, 0)],
        collectives=[(0, NONE, 0, 5), (0, NONE, 0, 5)],
        floor=[NEVER],
        marks=2,
    )


def test_the_last_arrival_and_the_transfer_set_the_end() -> None:
    replayed = replay(in_one_collective(10, 14))
    assert replayed.complete
    assert replayed.start_ns.tolist() == [10, 14]
    assert replayed.end_ns.tolist() == [19, 19]
    assert replayed.mark_ns.tolist() == [19, 19]


def test_own_time_beside_a_collective_hides_it() -> None:
    """Rank 0 computes 8 more while it runs; only what is left of it is waited for."""
    replayed = replay(
        schedules(
            [(OpKind.ISSUE, 0, 10, 0), (OpKind.WAIT, 0, 8, 0), (OpKind.MARK, 0, 1, 0)],
            [(OpKind.ISSUE, 1, 10, 0), (OpKind.WAIT, 1, 2, 0), (OpKind.MARK, 1, 1, 0)],
            collectives=[(0, NONE, 0, 5), (0, NONE, 0, 5)],
            floor=[NEVER],
            marks=2,
        )
    )
    assert replayed.mark_ns.tolist() == [19, 16]


def test_a_stream_runs_its_collectives_in_order() -> None:
    """The second is handed over at 2 but begins when the first has ended at 10, and 3 after that."""
    replayed = replay(
        schedules(
            [(OpKind.ISSUE, 0, 0, 0), (OpKind.ISSUE, 1, 2, 0), (OpKind.WAIT, 1, 0, 0), (OpKind.MARK, 0, 0, 0)],
            collectives=[(0, NONE, 0, 10), (1, 0, 3, 4)],
            floor=[NEVER, NEVER],
            marks=1,
        )
    )
    assert replayed.start_ns.tolist() == [0, 13]
    assert replayed.mark_ns.tolist() == [17]


def test_an_absent_participant_comes_when_it_came() -> None:
    replayed = replay(
        schedules(
            [(OpKind.ISSUE, 0, 10, 0), (OpKind.WAIT, 0, 0, 0), (OpKind.MARK, 0, 0, 0)],
            collectives=[(0, NONE, 0, 5)],
            floor=[30],
            marks=1,
        )
    )
    assert replayed.mark_ns.tolist() == [35]


def test_a_hold_ends_when_it_ends_however_early_one_comes() -> None:
    for own, end in ((20, 100), (90, 100), (150, 140)):
        # 10 of the own time are the stall.
        replayed = replay(
            schedules(
                [(OpKind.HOLD, 0, own, -10), (OpKind.MARK, 0, 0, 0)], collectives=[], floor=[], hold=(100,), marks=1
            )
        )
        assert replayed.mark_ns.tolist() == [end]


def test_waits_pass_through_groups() -> None:
    """Rank 2 is late for rank 1, which is therefore late for rank 0."""
    replayed = replay(
        schedules(
            [(OpKind.ISSUE, 0, 5, 0), (OpKind.WAIT, 0, 0, 0), (OpKind.MARK, 0, 0, 0)],
            [(OpKind.ISSUE, 1, 5, 0), (OpKind.WAIT, 1, 0, 0), (OpKind.ISSUE, 2, 1, 0), (OpKind.WAIT, 2, 0, 0)],
            [(OpKind.ISSUE, 3, 50, 0)],
            collectives=[(1, NONE, 0, 2), (0, NONE, 0, 3), (1, NONE, 0, 2), (0, NONE, 0, 3)],
            floor=[NEVER, NEVER],
            marks=1,
        )
    )
    assert replayed.mark_ns.tolist() == [50 + 3 + 1 + 2]


def test_schedules_that_wait_for_each_other_are_not_replayed_to_the_end() -> None:
    replayed = replay(
        schedules(
            [(OpKind.ISSUE, 0, 0, 0), (OpKind.WAIT, 0, 0, 0), (OpKind.ISSUE, 1, 0, 0)],
            [(OpKind.ISSUE, 2, 0, 0), (OpKind.WAIT, 2, 0, 0), (OpKind.ISSUE, 3, 0, 0)],
            collectives=[(0, NONE, 0, 1), (1, NONE, 0, 1), (1, NONE, 0, 1), (0, NONE, 0, 1)],
            floor=[NEVER, NEVER],
        )
    )
    assert not replayed.complete


def test_in_a_chain_of_messages_a_rank_waits_only_for_those_at_the_other_ends_of_its_own() -> None:
    """Ranks 0 to 3 come at 10, 20, 30 and 100, and each exchanges messages of 5 with the one before and the next."""
    chain = schedules(
        *([(OpKind.ISSUE, rank, came, 0), (OpKind.WAIT, rank, 0, 0)] for rank, came in enumerate((10, 20, 30, 100))),
        collectives=[(0, NONE, 0, 5)] * 4,
        floor=[NEVER],
    )
    assert replay(chain).end_ns.tolist() == [105, 105, 105, 105]
    replayed = replay(replace(chain, chained={0: {0: {1}, 1: {0, 2}, 2: {1, 3}, 3: {2}}}))
    assert replayed.complete
    assert replayed.end_ns.tolist() == [25, 35, 105, 105]
