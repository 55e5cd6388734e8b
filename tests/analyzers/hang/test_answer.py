"""Jobs of a few ranks that stand still, each with the answer worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from perfscope.analyzers.hang.answer import find_hang
from perfscope.analyzers.hang.words import verdict
from perfscope.analyzers.readers.flight import Frame
from perfscope.analyzers.readers.stacks import ThreadStack
from perfscope.results.hang import Hang
from tests.analyzers.hang.dumps import MS, START_NS, Groups, dump, dumps, op

WORLD: Groups = {"0": ("default_pg", range(4))}


def _steps(count: int, late_ms: float = 0.0) -> list[dict[str, Any]]:
    """All-reduces that are done, one each 100 ms; they end on all ranks at once, 61 ms later."""
    return [
        op("0", number, at_ms=100 * number + late_ms)
        | {"time_discovered_completed_ns": START_NS + (100 * number + 61) * MS}
        for number in range(1, count + 1)
    ]


def _stuck(ops: dict[int, list[dict[str, Any]]], groups: Groups = WORLD, **more: Any) -> Hang:
    hang = find_hang(dumps(groups, ops, **more), {})
    assert hang is not None
    return hang


def test_the_rank_that_did_not_come_is_named_with_the_collective() -> None:
    waiting = [*_steps(5), op("0", 6, at_ms=600, state="started", size=(8, 4))]
    hang = _stuck({0: waiting, 1: waiting, 2: _steps(5), 3: waiting})
    assert hang.missing_ranks == (2,)
    assert (hang.group, hang.group_description, hang.collective, hang.sequence) == ("0", "default_pg", "all_reduce", 6)
    assert (hang.input_sizes, hang.dtype, hang.waiting_ranks) == (((8, 4),), "Float", (0, 1, 3))
    assert hang.since_us == START_NS / 1e3 + 600e3
    assert hang.confidence == "high"
    assert [(seen.rank, seen.sequence, seen.evidence) for seen in hang.last_seen] == [(2, 5, "did not join")]
    assert hang.victims == ()


def test_a_job_whose_collectives_are_done_does_not_hang() -> None:
    assert find_hang(dumps(WORLD, {rank: _steps(5) for rank in range(4)}), {}) is None


def test_a_collective_under_way_is_no_hang() -> None:
    ops = [*_steps(5), op("0", 6, at_ms=600, state="started")]
    assert find_hang(dumps(WORLD, dict.fromkeys(range(4), ops)), {}) is None


def test_a_rank_that_is_always_late_is_slow() -> None:
    waiting = [*_steps(20), op("0", 21, at_ms=2100, state="started")]
    assert find_hang(dumps(WORLD, {0: waiting, 1: waiting, 2: _steps(20, late_ms=60), 3: waiting}), {}) is None


def test_a_late_rank_stands_still_once_the_watchdog_gave_up() -> None:
    waiting = [*_steps(20), op("0", 21, at_ms=2100, state="started", retired=True)]
    assert _stuck({0: waiting, 1: waiting, 2: _steps(20, late_ms=60), 3: waiting}).missing_ranks == (2,)


def test_a_stall_is_passed_on_through_a_pipeline() -> None:
    """Stages 0 -> 1 -> 2, of two ranks each; rank 5 does not join the all-reduce of the last stage."""
    groups: Groups = {
        "1": ("TP", (0, 1)), "2": ("TP", (2, 3)), "3": ("TP", (4, 5)),
        "4": ("PP", (0, 2)), "5": ("PP", (1, 3)), "6": ("PP", (2, 4)), "7": ("PP", (3, 5)),
    }  # fmt: skip
    ops = {
        0: [op("1", 1, at_ms=1), op("4", 1, "send 0->1", at_ms=2, state="scheduled")],
        1: [op("1", 1, at_ms=1), op("5", 1, "send 0->1", at_ms=2, state="scheduled")],
        2: [op("2", 1, at_ms=3), op("6", 1, "send 0->1", at_ms=4, state="scheduled")],
        3: [op("2", 1, at_ms=3), op("7", 1, "send 0->1", at_ms=4, state="scheduled")],
        4: [op("3", 1, at_ms=5, state="scheduled")],
        5: [],
    }
    hang = find_hang(dumps(groups, ops), {5: (_thread("train.py", "wait_for_disk"),)})
    assert hang is not None
    assert hang.missing_ranks == (5,)
    assert (hang.group, hang.waiting_ranks) == ("3", (4,))
    assert {(row.ranks, row.waits_for) for row in hang.victims} == {
        ((0,), (2,)),
        ((1,), (3,)),
        ((2,), (4,)),
        ((3,), (5,)),
    }
    site = hang.call_sites[0]
    assert (site.ranks, site.file, site.function, site.missing) == ((5,), "train.py", "wait_for_disk", True)


def _thread(file: str, function: str) -> ThreadStack:
    return ThreadStack("MainThread", (Frame(file, 7, function), Frame(file, 90, "<module>")))


def test_without_a_dump_a_rank_is_named_by_elimination() -> None:
    waiting = [*_steps(5), op("0", 6, at_ms=600, state="started")]
    hang = _stuck({0: waiting, 1: waiting, 3: waiting})
    assert (hang.missing_ranks, hang.confidence, hang.ranks_without_dump) == ((2,), "medium", (2,))
    assert hang.last_seen[0].evidence == "no dump"


def test_a_rank_without_a_dump_is_not_named_where_another_did_not_come() -> None:
    waiting = [*_steps(5), op("0", 6, at_ms=600, state="started")]
    hang = _stuck({0: waiting, 1: _steps(5), 3: waiting})
    assert (hang.missing_ranks, hang.confidence, hang.ranks_without_dump) == ((1,), "medium", (2,))


def test_a_dump_without_entries_is_evidence() -> None:
    waiting = [*_steps(5), op("0", 6, at_ms=600, state="started")]
    hang = _stuck({0: waiting, 1: waiting, 2: [], 3: waiting})
    assert (hang.missing_ranks, hang.last_seen[0].evidence) == ((2,), "no entries")


def test_the_odd_rank_of_unlike_sizes_is_named() -> None:
    ops = {rank: [*_steps(2), op("0", 3, at_ms=300, state="started", size=(64,))] for rank in (0, 1, 3)}
    ops[2] = [*_steps(2), op("0", 3, at_ms=300, state="started", size=(32,))]
    hang = _stuck(ops)
    assert hang.missing_ranks == (2,)
    (mismatch,) = hang.mismatches
    assert [(each.ranks, each.issued) for each in mismatch.variants] == [
        ((0, 1, 3), "all_reduce of 64 elements Float"),
        ((2,), "all_reduce of 32 elements Float"),
    ]
    assert (mismatch.odd_ranks, hang.last_seen[0].evidence) == ((2,), "issued another operation")


def test_of_two_ranks_that_differ_none_is_named() -> None:
    groups: Groups = {"0": ("default_pg", (0, 1))}
    hang = _stuck({0: [op("0", 1, state="started")], 1: [op("0", 1, "broadcast", state="started")]}, groups)
    assert (hang.missing_ranks, hang.confidence) == ((), "low")
    assert len(hang.mismatches) == 1


def test_a_group_of_the_same_kind_shows_which_of_two_is_wrong() -> None:
    groups: Groups = {"1": ("TP", (0, 1)), "2": ("TP", (2, 3))}
    ops = {rank: [op("1" if rank < 2 else "2", 1, state="started")] for rank in range(4)}
    ops[1] = [op("1", 1, state="started", dtype="Half")]
    assert _stuck(ops, groups).missing_ranks == (1,)


def test_all_to_all_may_differ_in_size() -> None:
    ops = {rank: [op("0", 1, "all_to_all", state="started", size=(rank + 1,))] for rank in range(4)}
    assert find_hang(dumps(WORLD, ops), {}) is None


def test_all_to_all_that_was_always_of_one_size_shows_the_odd_rank() -> None:
    """Rank 3 brings 7 where all brought 64; rank 4, without a dump, explains the wait as well, but less."""
    groups: Groups = {"0": ("default_pg", range(5))}
    before = [op("0", number, "all_to_all", size=(64,)) for number in (1, 2, 3)]
    ops = {
        rank: [*before, op("0", 4, "all_to_all", state="started", size=(64 if rank < 3 else 7,))] for rank in range(4)
    }
    hang = _stuck(ops, groups)
    assert (hang.missing_ranks, hang.sequence) == ((3,), 4)
    assert hang.mismatches[0].odd_ranks == (3,)


def test_ranks_that_issue_two_groups_in_another_order_wait_for_each_other() -> None:
    groups: Groups = {"1": ("A", range(4)), "2": ("B", range(4))}
    ops = {rank: [op("1", 1, state="started")] for rank in (0, 1, 2)} | {3: [op("2", 1, state="started")]}
    hang = _stuck(ops, groups)
    assert (hang.missing_ranks, hang.group, hang.confidence) == ((3,), "1", "medium")


def test_a_device_that_stands_still_shows_what_is_done_elsewhere_as_open() -> None:
    """Rank 3 issued all-reduce 6 as well; ranks 0 to 2 have completed 4 and 5, which rank 3 shows as scheduled."""
    done, opened = _steps(5), op("0", 6, at_ms=600, state="scheduled")
    after = op("0", 7, at_ms=700, state="scheduled")
    broken = [*_steps(3), *(op("0", number, at_ms=100 * number, state="scheduled") for number in (4, 5, 6))]
    hang = _stuck({0: [*done, opened, after], 1: [*done, opened, after], 2: [*done, opened, after], 3: broken})
    assert (hang.missing_ranks, hang.last_seen[0].evidence) == ((3,), "device stands still")


def test_statuses_stand_for_entries_that_are_done() -> None:
    """Dumps of active collectives alone: what a rank completed is only in the status of its groups."""
    status = {"0": {"last_enqueued_collective": 5, "last_started_collective": -1, "last_completed_collective": 5}}
    opened = [op("0", 6, state="scheduled")]
    ranks = {rank: dump(WORLD, opened if rank else [], rank, pg_status=status) for rank in range(4)}
    hang = find_hang(ranks, {})
    assert hang is not None
    assert (hang.missing_ranks, hang.confidence) == ((0,), "high")


def test_coalesced_sends_and_recvs_are_done_with_the_last_of_them() -> None:
    groups: Groups = {"1": ("PP", (0, 1))}

    def both(number: int, first: str, second: str, state: str) -> list[dict[str, Any]]:
        parts = [op("1", number, name, state="scheduled") for name in (first, second)]
        return [*parts, op("1", number, "coalesced", state=state, p2p=True)]

    left = [*both(1, "send 0->1", "recv 0<-1", "completed"), *both(2, "send 0->1", "recv 0<-1", "started")]
    right = both(1, "recv 1<-0", "send 1->0", "completed")
    hang = _stuck({0: left, 1: right}, groups)
    assert (hang.missing_ranks, hang.sequence) == ((1,), 2)


def test_gloo_is_done_when_it_is_retired() -> None:
    done = op("0", 1, state="scheduled", profiling_name="gloo:all_reduce", retired=True)
    opened = op("0", 2, state="scheduled", profiling_name="gloo:all_reduce")
    assert find_hang(dumps(WORLD, {rank: [done] for rank in range(4)}), {}) is None
    hang = _stuck({0: [done, opened], 1: [done, opened], 2: [done, opened], 3: [done]}, pg_config={"": {"ranks": "[]"}})
    assert (hang.missing_ranks, hang.waiting_ranks) == ((3,), (0, 1, 2))


def test_a_buffer_that_wrapped_hides_no_rank() -> None:
    """Rank 2 issued many collectives in another group: its buffer no longer holds those of the world."""
    groups: Groups = {"0": WORLD["0"], "1": ("TP", (2, 3))}
    opened = [*_steps(5)[-1:], op("0", 6, at_ms=600, state="started")]
    other = [op("1", number, at_ms=500 + number) for number in range(80, 90)]
    hang = _stuck({0: opened, 1: opened, 2: other, 3: [*other, *opened]}, groups)
    assert hang.missing_ranks == (2,)


def test_stacks_alone_show_who_waits_in_no_communication() -> None:
    waiting = ThreadStack(
        "",
        (
            Frame("/x/site-packages/torch/distributed/distributed_c10d.py", 9, "all_reduce"),
            Frame("train.py", 3, "step"),
        ),
    )
    hang = find_hang({}, {0: (waiting,), 1: (_thread("data.py", "read"),), 2: (waiting,)}, stands=True)
    assert hang is not None
    assert (hang.missing_ranks, hang.group) == ((1,), None)
    assert (hang.call_sites[0].file, hang.call_sites[0].line) == ("data.py", 7)
    assert hang.call_sites[1].ranks == (0, 2)
    assert verdict(hang).headline == (
        "The job stands still: rank 1 is in read, and the other ranks wait for it in communication."
    )
    assert verdict(replace(hang, call_sites=())).headline == (
        "The job stands still: rank 1 is elsewhere, and the other ranks wait for it in communication."
    )
