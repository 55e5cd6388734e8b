"""Captures that nothing planned: what is slow, how ranks agree, and when a capture begins."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from perfscope.collectors.agreement import ABANDONED_S, PLANS_FILE, RECORD, Board, CapturePlan, ask, open_board
from perfscope.collectors.capture.schedule import CaptureSchedule, Due
from perfscope.collectors.capture.trigger import EVERY, FEWEST_STEPS_AHEAD, SlowSteps, Trigger, next_slow
from perfscope.collectors.config import ENOUGH, CollectorConfig
from perfscope.recording.paths import BOOTSTRAP_FOLDER

MS = 1_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / BOOTSTRAP_FOLDER).mkdir()
    open_board(tmp_path)
    return tmp_path


def config(folder: Path, **options: object) -> CollectorConfig:
    return CollectorConfig(output=str(folder), package_root="", **options)  # type: ignore[arg-type]


class TestSlowSteps:
    def test_a_step_is_compared_with_the_median_of_those_before_it(self) -> None:
        slow = SlowSteps(2.0)
        assert [slow.step(10 * MS) for _ in range(ENOUGH)] == [None] * ENOUGH
        assert slow.step(19 * MS) is None
        assert slow.step(25 * MS) == 2.5

    def test_few_steps_have_no_median(self) -> None:
        slow = SlowSteps(1.5)
        assert [slow.step(duration) for duration in (MS, MS, MS, 90 * MS)] == [None] * 4
        assert slow.typical_ns() == MS

    def test_the_median_follows_the_run_and_not_its_outliers(self) -> None:
        slow = SlowSteps(1.5)
        for number in range(64):
            slow.step(90 * MS if number % 4 == 0 else 10 * MS)
        assert slow.typical_ns() == 10 * MS
        for _ in range(64 + EVERY):
            slow.step(30 * MS)
        assert slow.typical_ns() == 30 * MS
        assert slow.step(40 * MS) is None


class TestBoard:
    def test_the_first_proposal_holds_for_all(self, folder: Path) -> None:
        one, other = Board(folder, 0), Board(folder, 0)
        assert one.propose(100, 5, "slow", asked=False)
        assert not other.propose(120, 5, "slow as well", asked=False)
        assert one.look() == other.look() == [CapturePlan(0, 100, 5, 0, "slow")]
        assert other.look() == []
        assert other.propose(300, 5, "again", asked=False)
        assert [plan.number for plan in one.look()] == [1]

    def test_of_many_at_once_one_succeeds(self, folder: Path) -> None:
        boards = [Board(folder, 0) for _ in range(16)]
        start = threading.Barrier(len(boards))
        won: list[int] = []

        def propose(rank: int) -> None:
            start.wait()
            if boards[rank].propose(rank, 1, "", asked=False):
                won.append(rank)

        threads = [threading.Thread(target=propose, args=(rank,)) for rank in range(len(boards))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [plan.start for plan in Board(folder, 0).look()] == won
        assert len(won) == 1

    def test_plans_of_another_attempt_are_not_this_ones(self, folder: Path) -> None:
        assert Board(folder, 0).propose(100, 5, "before the restart", asked=False)
        later = Board(folder, 1)
        assert later.look() == []
        assert later.by_slow_steps == 1
        assert later.propose(50, 5, "after it", asked=False)
        assert [(plan.number, plan.start) for plan in later.look()] == [(1, 50)]

    def test_a_request_is_answered_once(self, folder: Path) -> None:
        ask(folder, 3)
        ask(folder, None)
        one, other = Board(folder, 0), Board(folder, 0)
        for board in (one, other):
            board.look()
            request = board.open_request()
            assert request is not None
            assert (request.number, request.active) == (0, 3)
        assert one.propose(40, 3, "asked", asked=True, request=0)
        other.look()
        request = other.open_request()
        assert request is not None
        assert (request.number, request.active) == (1, None)

    def test_a_proposal_whose_owner_died_is_passed_over(self, folder: Path) -> None:
        claim = folder / BOOTSTRAP_FOLDER / "plan-0"
        claim.touch()
        board = Board(folder, 0)
        assert not board.propose(10, 1, "", asked=False)  # it may still be writing
        os.utime(claim, (time.time() - 2 * ABANDONED_S,) * 2)
        assert board.propose(10, 1, "", asked=False)
        assert [(plan.number, plan.start) for plan in Board(folder, 0).look()] == [(1, 10)]

    def test_a_record_half_written_is_read_when_it_is_whole(self, folder: Path) -> None:
        writer, reader = Board(folder, 0), Board(folder, 0)
        assert writer.propose(10, 1, "é" * 300, asked=False)
        plans = folder / BOOTSTRAP_FOLDER / PLANS_FILE
        whole = plans.read_bytes()
        assert len(whole) == RECORD
        plans.write_bytes(whole[:50] + bytes(RECORD - 50))
        assert reader.look() == []
        plans.write_bytes(whole)
        assert [plan.start for plan in reader.look()] == [10]


class TestSchedule:
    def test_planned_captures_come_when_they_are_due(self, folder: Path) -> None:
        schedule = CaptureSchedule(config(folder, wait=5, repeat=2))
        first = Due(0, 4, early=True)
        assert schedule.due(1) == (first, [])
        schedule.ended(first, 4)
        assert not schedule.wants(4)
        assert schedule.due(5) == (Due(0, 8), [])
        schedule.ended(Due(0, 8), 20)
        assert [schedule.wants(step) for step in (20, 24, 25)] == [False, False, True]
        schedule.ended(Due(1, 8), 40)
        assert not schedule.wants(10**9)

    def test_the_last_capture_plans_no_more(self, folder: Path) -> None:
        schedule = CaptureSchedule(config(folder, repeat=2))
        schedule.ended(Due(0, 8), 16)
        assert schedule.plans_more
        schedule.ended(Due(1, 8), 32)
        assert not schedule.plans_more
        schedule.agree(CapturePlan(0, 40, 8, 0, "why"))
        assert schedule.plans_more

    def test_the_first_steps_end_where_a_planned_capture_begins(self, folder: Path) -> None:
        schedule = CaptureSchedule(config(folder, wait=4))
        assert schedule.due(1) == (Due(0, 3, early=True), [])
        assert schedule.due(3) == (Due(0, 1, early=True), [])  # what was taken for steps had not been: begun anew
        assert schedule.due(4) == (Due(0, 8), [])
        assert CaptureSchedule(config(folder, wait=1)).due(1) == (Due(0, 8), [])

    def test_an_agreed_capture_begins_at_its_step_or_not_at_all(self, folder: Path) -> None:
        schedule = CaptureSchedule(config(folder, mode="steps"))
        schedule.agree(CapturePlan(0, 30, 4, 0, "why"))
        assert schedule.plans
        assert not schedule.wants(29)
        assert schedule.due(30) == (Due(0, 4, "why", agreed=True), [])
        schedule.agree(CapturePlan(1, 20, 4, 0, "too late"))
        due, (missed,) = schedule.due(31)
        assert due is None
        assert "agreed for step 20" in missed
        assert not schedule.wants(31)

    def test_agreed_captures_are_counted_after_the_planned_ones(self, folder: Path) -> None:
        schedule = CaptureSchedule(config(folder, repeat=2))
        schedule.agree(CapturePlan(0, 3, 4, 0, ""))
        due, _ = schedule.due(3)
        assert due is not None
        assert due.number == 2

    def test_after_a_failure_there_are_none(self, folder: Path) -> None:
        schedule = CaptureSchedule(config(folder))
        schedule.stop()
        schedule.agree(CapturePlan(0, 3, 4, 0, ""))
        assert not schedule.wants(100)


class Rank:
    """A rank whose steps and looks the test makes happen."""

    def __init__(self, folder: Path, number: int = 0, **options: object) -> None:
        self.schedule = CaptureSchedule(config(folder, mode="trigger", **options))
        self.trigger = Trigger(config(folder, mode="trigger", **options), number, Board(folder, 0), self.schedule)
        self.completed = 0
        self.now = 0

    def steps(self, count: int, ms: float = 10, *, busy: bool = False) -> bool:
        """Go through steps; does the last one wake the background thread?"""
        woken = False
        for _ in range(count):
            self.completed += 1
            self.now += int(ms * MS)
            woken = self.trigger.step_ended(self.completed, int(ms * MS), disturbed=busy, now_ns=self.now)
            self.trigger.step_begins(self.completed, busy=busy, paused_ns=0)
        return woken

    def look(self) -> list[int]:
        """Look; the steps that captures are agreed upon for."""
        self.trigger.look()
        return [plan.start for plan in self.schedule.plans]


class TestTrigger:
    def test_a_slow_step_is_proposed_a_few_seconds_ahead(self, folder: Path) -> None:
        rank = Rank(folder)
        rank.steps(40)
        assert rank.steps(1, ms=30)
        rank.look()
        assert rank.look() == [41 + FEWEST_STEPS_AHEAD + 300]

    def test_where_steps_are_slow_regularly_the_capture_holds_the_next_one(self, folder: Path) -> None:
        """Steps 39, 59, 79 and 99 are; the first that can be the second recorded one is 419."""
        rank = Rank(folder, wait=95, warmup=3, active=8)
        rank.steps(39)
        for _ in range(3):
            rank.steps(1, ms=30)
            rank.steps(19)
        assert rank.steps(1, ms=30)
        rank.look()
        (start,) = rank.look()
        assert start >= 100 + FEWEST_STEPS_AHEAD + 300
        assert start + 3 == 419 - 1

    def test_a_capture_does_not_wait_for_minutes_for_the_next_slow_step(self, folder: Path) -> None:
        """Every 20,000th step of 10 ms, of which 16 in between are gone through here."""
        rank = Rank(folder, wait=1)
        rank.steps(39)
        for _ in range(3):
            rank.completed += 20_000 - 17
            rank.steps(16)
            assert rank.steps(1, ms=30)
        rank.look()
        (start,) = rank.look()
        assert start == rank.completed + FEWEST_STEPS_AHEAD + 300

    @pytest.mark.parametrize(
        ("slow", "due"),
        [
            ([20, 40, 60], 120),
            ([20, 40, 80], 120),  # one in a capture
            ([20, 40, 63], None),
            ([20, 40], None),
            ([30, 31, 32], None),  # one slow stretch
            ([20, 40, 400], None),
        ],
    )
    def test_the_next_slow_step(self, slow: list[int], due: int | None) -> None:
        assert next_slow(slow, 101) == due

    def test_all_ranks_follow_the_one_that_comes_first(self, folder: Path) -> None:
        ranks = [Rank(folder, number) for number in range(3)]
        for rank in ranks:
            rank.steps(40 + len(ranks))
            assert rank.steps(1, ms=30)
        for _ in range(2):
            agreed = [rank.look() for rank in ranks]
        assert agreed[0] == agreed[1] == agreed[2]
        assert len(agreed[0]) == 1

    def test_no_other_begins_while_one_is_made_or_soon_after(self, folder: Path) -> None:
        rank = Rank(folder, cooldown=50, wait=1)
        rank.steps(40)
        rank.steps(3, busy=True)
        assert not rank.steps(1, ms=30)
        rank.steps(60)
        assert rank.steps(1, ms=30)

    def test_captures_stop_when_they_have_taken_their_share(self, folder: Path) -> None:
        rank = Rank(folder, cooldown=0, budget=5.0)
        rank.steps(40)
        rank.steps(10, busy=True)  # 100 ms of captures need 2 s of run
        rank.steps(20)
        assert not rank.steps(1, ms=30)
        rank.steps(140)
        assert rank.steps(1, ms=30)

    def test_slow_steps_start_so_many_captures_and_requests_more(self, folder: Path) -> None:
        rank = Rank(folder, cooldown=0, max_captures=1, wait=1)
        rank.steps(40)
        rank.steps(1, ms=30)
        rank.look()
        assert len(rank.look()) == 1
        rank.schedule.plans.clear()
        rank.steps(40)
        rank.steps(1, ms=30)
        rank.look()
        assert rank.look() == []
        ask(folder, 7)
        rank.look()
        rank.look()
        assert [plan.active for plan in rank.schedule.plans] == [7]

    def test_a_request_waits_until_it_is_known_what_a_step_takes(self, folder: Path) -> None:
        rank = Rank(folder)
        ask(folder, None)
        rank.look()
        assert rank.look() == []
        rank.steps(5)
        rank.look()
        assert len(rank.look()) == 1

    @pytest.mark.parametrize(("seconds", "steps"), [(0.1, 10), (0.0301, 4), (0.001, 1), (1000.0, 500)])
    def test_a_request_for_a_time_is_one_for_as_many_steps(self, folder: Path, seconds: float, steps: int) -> None:
        rank = Rank(folder)
        rank.steps(20, ms=10)
        ask(folder, None, seconds)
        rank.look()
        rank.look()
        assert [plan.active for plan in rank.schedule.plans] == [steps]

    def test_one_signal_is_one_capture_whoever_proposes_it(self, folder: Path) -> None:
        ranks = [Rank(folder, number) for number in range(2)]
        for rank in ranks:
            rank.steps(20)
            rank.trigger.asked()
        for _ in range(3):
            agreed = [rank.look() for rank in ranks]
        assert agreed[0] == agreed[1]
        for rank in ranks:
            rank.schedule.plans.clear()
        assert [rank.look() for rank in ranks] == [[], []]
