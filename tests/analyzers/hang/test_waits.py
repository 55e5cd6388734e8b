"""Jobs with more than one thing that is odd: whom the waits lead to in the end, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from perfscope.analyzers.hang.answer import find_hang
from perfscope.results.hang import Hang
from tests.analyzers.hang.dumps import Groups, dump, dumps, op

MESH: Groups = {"0": ("default_pg", range(6)), "1": ("TP", (0, 1, 2)), "2": ("TP", (3, 4, 5))}


def _found(groups: Groups, ops: dict[int, list[dict[str, Any]]]) -> Hang:
    hang = find_hang(dumps(groups, ops), {}, stands=True)
    assert hang is not None
    return hang


def _program(group: str, skipped: bool = False) -> list[dict[str, Any]]:
    """Three steps of two tensor-parallel all-reduces and one of the world; the last step waits."""
    made = [
        entry
        for step in range(3)
        for entry in (
            op(group, 2 * step + 1, at_ms=100 * step + 1),
            op(group, 2 * step + 2, at_ms=100 * step + 2),
            op("0", step + 1, at_ms=100 * step + 3),
        )
    ]
    if skipped:
        del made[7]
    for entry in made[7:]:
        entry.update(state="scheduled", time_discovered_completed_ns=None)
    return made


def test_a_rank_that_skipped_is_named_before_one_without_a_dump() -> None:
    """Rank 4 skipped number 6 of its group: ranks 3 and 5 wait there, and the others for them. Rank 1 left no dump."""
    ops = {rank: _program("1" if rank < 3 else "2", skipped=rank == 4) for rank in (0, 2, 3, 4, 5)}
    hang = _found(MESH, ops)
    assert (hang.missing_ranks, hang.group, hang.sequence, hang.confidence) == ((4,), "2", 6, "medium")
    assert hang.ranks_without_dump == (1,)


def _relay(rank: int, forgets: bool) -> list[dict[str, Any]]:
    """Four steps in which each rank hands on to the next and all meet; at last 2 waits for 1, the others for 2."""
    made = []
    for step in range(1, 5):
        at_ms = 100 * step + 10 * rank
        if rank:
            made.append(op("0", step, f"recv {rank}<-{rank - 1}", at_ms=at_ms))
        if rank < 2 and not (forgets and step == 4):
            made.append(op("0", step, f"send {rank}->{rank + 1}", at_ms=at_ms + 1))
        if rank < 2 or step < 4:
            made.append(op("0", step, "barrier", at_ms=at_ms + 2))
    made[-1].update(state="scheduled", time_discovered_completed_ns=None)
    return made


def test_a_message_that_was_not_sent_though_it_always_was() -> None:
    world: Groups = {"0": ("default_pg", range(3))}
    hang = _found(world, {rank: _relay(rank, forgets=rank == 1) for rank in range(3)})
    assert (hang.missing_ranks, hang.waiting_ranks, hang.collective, hang.sequence) == ((1,), (2,), "recv", 4)
    assert hang.confidence == "medium"


def test_a_rank_without_a_dump_is_named_where_all_keep_their_habit() -> None:
    ops = {rank: _program("1" if rank < 3 else "2") for rank in (0, 2, 3, 4, 5)}
    assert _found(MESH, ops).missing_ranks == (1,)


def test_a_rank_that_stopped_is_named_beside_one_without_a_dump() -> None:
    """All wait for rank 3 at number 2. Ranks 0 and 1 issued 3 and 4 as well, rank 2 stopped after 2."""
    world: Groups = {"0": ("default_pg", range(4))}
    ahead = [op("0", 1), *(op("0", number, state="scheduled") for number in (2, 3, 4))]
    hang = _found(world, {0: ahead, 1: ahead, 2: ahead[:2]})
    assert (hang.missing_ranks, hang.confidence) == ((2, 3), "medium")


def test_a_rank_that_stopped_where_its_peers_wait_is_named_beside_one_without_a_dump() -> None:
    """Ranks 1 and 2 wait for rank 0, which left no dump; rank 2 stopped, its peer 1 issued number 8 as well."""
    groups: Groups = {"1": ("TP", (1, 2)), "2": ("PP", (0, 1)), "3": ("PP", (0, 2))}
    ops = {
        rank: [
            op(str(rank + 1), 4, "recv 1<-0", state="scheduled"),
            *(op("1", number, state="scheduled") for number in range(7, 10 - rank)),
        ]
        for rank in (1, 2)
    }
    hang = _found(groups, ops)
    assert (hang.missing_ranks, hang.confidence) == ((0, 2), "medium")


def _pipeline(skipped: int) -> dict[int, list[dict[str, Any]]]:
    """Stages 0 -> 1 -> 2, two steps of a message and the world's all-reduce, at whose end a host waits.

    Rank ``skipped`` left out the first all-reduce: it is in the second step, and the others wait for it in the first.
    """
    ops: dict[int, list[dict[str, Any]]] = {}
    for rank in range(3):
        sides = [f"{'send 0->1' if rank == low else 'recv 1<-0'}" for low in (0, 1) if rank in (low, low + 1)]
        names = [str(low + 1) for low in (0, 1) if rank in (low, low + 1)]
        own = [op(name, 1, side) for name, side in zip(names, sides, strict=True)]
        if rank == skipped:
            own += [op(name, 2, side, state="scheduled") for name, side in zip(names, sides, strict=True)]
        ops[rank] = [*own, op("0", 1, state="scheduled")]
    return ops


@pytest.mark.parametrize("skipped", range(3))
def test_of_ranks_in_a_ring_the_one_is_named_that_most_wait_for(skipped: int) -> None:
    groups: Groups = {"0": ("default_pg", range(3)), "1": ("PP", (0, 1)), "2": ("PP", (1, 2))}
    hang = _found(groups, _pipeline(skipped))
    assert (hang.missing_ranks, hang.group, hang.confidence) == ((skipped,), "0", "medium")


def test_a_message_that_both_sides_issued_waits_for_the_one_that_has_not_reached_it() -> None:
    """Rank 1 issued its recv after an all-reduce that rank 2 does not join; in its group each side has own numbers."""
    groups: Groups = {"1": ("TP", (1, 2)), "2": ("PP", (0, 1, 3, 4))}
    ops = {
        0: [op("2", 9, "send 0->1", state="scheduled")],
        1: [op("1", 5, at_ms=1, state="scheduled"), op("2", 3, "recv 1<-0", at_ms=2, state="scheduled")],
        2: [op("1", 4)],
    }
    hang = _found(groups, ops)
    assert (hang.missing_ranks, hang.group) == ((2,), "1")
    assert [(row.ranks, row.waits_for) for row in hang.victims] == [((0,), (1,))]


def test_messages_that_the_status_shows_as_done_are_not_awaited() -> None:
    """Dumps of active operations keep the parts of messages issued as one. Rank 2 did not join all-reduce 9."""
    groups: Groups = {"0": ("default_pg", range(3)), "1": ("PP", (0, 1))}
    status = {
        "0": {"last_enqueued_collective": 9, "last_started_collective": -1, "last_completed_collective": 8},
        "1": {"last_enqueued_collective": 7, "last_started_collective": -1, "last_completed_collective": 7},
    }
    behind = {"0": {**status["0"], "last_enqueued_collective": 8}}
    waiting = op("0", 9, state="scheduled")
    ops = {
        0: [op("1", 7, "send 0->1", state="scheduled"), waiting],
        1: [waiting],
        2: [],
    }
    made = {rank: dump(groups, ops[rank], rank, pg_status=status if rank < 2 else behind) for rank in range(3)}
    hang = find_hang(made, {})
    assert hang is not None
    assert (hang.missing_ranks, hang.group, hang.victims) == ((2,), "0", ())


def test_many_ranks_that_wait_at_what_all_joined_are_not_named() -> None:
    """All-to-all 2 of rank 0 to 3 has all ranks; rank 4 waits for them at the world's all-reduce."""
    groups: Groups = {"0": ("default_pg", range(5)), "1": ("EP", range(4))}
    ops = {rank: [op("1", 2, "all_to_all", state="scheduled")] for rank in range(4)}
    hang = _found(groups, {**ops, 4: [op("0", 1, state="scheduled")]})
    assert (hang.missing_ranks, hang.confidence) == ((), "low")


def test_a_status_that_counts_messages_says_nothing_about_collectives() -> None:
    """The world's group has recvs, too, of which the status is; no dump of active operations shows one any more."""
    groups: Groups = {"0": ("default_pg", range(4))}
    status = {"0": {"last_enqueued_collective": 5, "last_started_collective": -1, "last_completed_collective": 36}}
    waiting = [op("0", 5, state="scheduled")]
    made = {rank: dump(groups, waiting if rank else [], rank, pg_status=status) for rank in range(4)}
    hang = find_hang(made, {}, stands=True)
    assert hang is not None
    assert (hang.missing_ranks, hang.sequence, hang.waiting_ranks) == ((0,), 5, (1, 2, 3))


def test_a_second_rank_that_stopped_is_named_though_it_waits_for_the_first() -> None:
    """All wait for rank 0 at number 2; the others but rank 3 went on to 3 and 4."""
    world: Groups = {"0": ("default_pg", range(4))}
    ahead = [op("0", 1), *(op("0", number, state="scheduled") for number in (2, 3, 4))]
    hang = _found(world, {0: ahead[:1], 1: ahead, 2: ahead, 3: ahead[:2]})
    assert (hang.missing_ranks, hang.confidence) == ((0, 3), "medium")


def test_what_is_done_on_others_though_it_was_unlike_is_where_a_rank_waits() -> None:
    """Gloo ends all-reduce 2 on ranks 0 and 2; rank 1, with another size, waits there, and the others at number 3."""
    world: Groups = {"0": ("default_pg", range(3))}
    first = op("0", 1, at_ms=1)
    odd = op("0", 2, at_ms=2, size=(7,), state="scheduled")
    others = [first, op("0", 2, at_ms=2), op("0", 3, at_ms=3, state="scheduled")]
    hang = _found(world, {0: others, 1: [first, odd], 2: others})
    assert (hang.missing_ranks, hang.sequence, hang.input_sizes) == ((1,), 2, ((1024,),))
    assert [variant.ranks for variant in hang.mismatches[0].variants] == [(0, 2), (1,)]
    assert [(victim.ranks, victim.sequence, victim.waits_for) for victim in hang.victims] == [((0, 2), 3, (1,))]
    assert hang.last_seen[0].evidence == "issued another operation"
