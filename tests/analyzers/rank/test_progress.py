"""A rank's own progress on CPUs: which collective a training thread waits for, of traces built by hand."""

from __future__ import annotations

from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.results.categories import TimeCategory
from tests.traces import RUNLOOP, RUNLOOP_2, TraceBuilder

MS = 1_000_000


def partial(*collectives: tuple[str, float, float, int]) -> RankPartial:
    """A thread that computes until 1 ms and from 5 to 9 ms; each collective has a name, begin, end (ms), thread."""
    builder = TraceBuilder(world_size=2).step(1, 0, 9 * MS).op("aten::mm", 0, MS).op("aten::mm", 5 * MS, 9 * MS)
    for name, begin, end, thread in collectives:
        builder.note(f"gloo:{name}", round(begin * MS), round(end * MS), thread)
    return analyze_rank(builder.build())


def test_a_thread_that_continues_just_before_a_collective_s_end_waited_for_it():
    found = partial(("all_reduce", 0.9, 5.3, RUNLOOP))
    (begin, end) = found.progress.blocked.start_ns, found.progress.blocked.end_ns
    assert (begin.tolist(), end.tolist()) == ([MS], [5 * MS])
    assert found.progress.blocker.tolist() == [0]


def test_a_thread_does_not_wait_for_a_collective_that_begins_after_it_continued():
    """``broadcast`` ends soon after the thread continues at 5 ms, but began then; ``all_reduce`` ran all the time."""
    found = partial(("all_reduce", 0.9, 8, RUNLOOP), ("broadcast", 5.1, 5.5, RUNLOOP_2))
    assert len(found.progress.blocked) == 0
    assert TimeCategory.HOST in found.progress.own.category.tolist()


def test_of_two_collectives_that_run_a_thread_waits_for_the_one_that_ends_first():
    found = partial(("all_reduce", 0.9, 8, RUNLOOP), ("broadcast", 1.1, 5.2, RUNLOOP_2))
    assert found.progress.blocked.end_ns.tolist() == [5 * MS]
    assert found.collectives.end_ns[found.progress.blocker].tolist() == [round(5.2 * MS)]
