"""Forked processes and the caller's: every item has one outcome, and nothing of the processes stays behind."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from perfscope.errors import TooLittleMemory, TraceError
from perfscope.execution import engine, forked
from perfscope.execution.forked import Forked
from perfscope.execution.outcome import WORKER_DIED, Outcome
from tests.waiting import until

ITEMS = list(range(12))

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@dataclass(frozen=True)
class Sides:
    """The caller's process and the others; each waits until the other side has an item, too."""

    caller: int
    folder: Path

    def is_caller(self) -> bool:
        """Is this the caller's process?"""
        mine = os.getpid() == self.caller
        (self.folder / f"{mine}").touch()
        until((self.folder / f"{not mine}").exists, "the other side has an item")
        return mine


@pytest.fixture
def sides(tmp_path: Path) -> Sides:
    return Sides(os.getpid(), tmp_path)


def double_or_fail(sides: Sides, item: int) -> int:
    sides.is_caller()
    if item % 4 == 3:
        raise TraceError(f"rank{item}.json: not a trace")
    return 2 * item


def double_or_die(sides: Sides, item: int) -> int:
    if not sides.is_caller():
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * item


def double_or_lack_memory(sides: Sides, in_caller: bool, item: int) -> int:
    """The first time."""
    mark = sides.folder / f"item {item}"
    if sides.is_caller() == in_caller and not mark.exists():
        mark.touch()
        raise TooLittleMemory(f"rank{item}.json: too little memory")
    return 2 * item


def process_of(sides: Sides, _item: int) -> int:
    sides.is_caller()
    return os.getpid()


def megabyte_or_process(sides: Sides, item: int) -> bytes | int:
    return os.getpid() if sides.is_caller() else bytes([item]) * (1 << 20)


def nothing_to_send(sides: Sides, item: int) -> Callable[[], int] | int:
    return item if sides.is_caller() else lambda: item


def outcomes(
    function: Callable[[int], Any], workers: int = 2, items: list[int] = ITEMS, **options: Any
) -> list[Outcome[int, Any]]:
    with Forked(workers) as executor:
        found = sorted(engine.map_items(function, items, executor, **options), key=lambda outcome: outcome.item)
    assert [outcome.item for outcome in found] == items
    assert all((outcome.result is None) != (outcome.error is None) for outcome in found)
    return found


def test_each_item_has_its_result_or_its_error(sides):
    found = outcomes(functools.partial(double_or_fail, sides))
    assert [outcome.result for outcome in found] == [None if item % 4 == 3 else 2 * item for item in ITEMS]
    assert [outcome.error for outcome in found if outcome.error] == [
        f"rank{item}.json: not a trace" for item in (3, 7, 11)
    ]


def test_the_caller_and_the_others_take_items(sides):
    worked = {outcome.result for outcome in outcomes(functools.partial(process_of, sides))}
    assert os.getpid() in worked
    assert 2 <= len(worked) <= 3


@pytest.mark.parametrize("count", [1, 4, 5, 6, 11, 12])
def test_more_items_than_a_pipe_holds_numbers(count, monkeypatch):
    monkeypatch.setattr(forked, "_MOST_NUMBERS", 5)
    assert [outcome.result for outcome in outcomes(str, items=ITEMS[:count])] == list(map(str, range(count)))


def test_results_larger_than_a_pipe_arrive_whole(sides):
    found = [outcome.result for outcome in outcomes(functools.partial(megabyte_or_process, sides))]
    sent = [result for result in found if isinstance(result, bytes)]
    assert sent
    assert all(result == result[:1] * (1 << 20) for result in sent)


def test_a_process_that_is_killed_costs_the_items_it_had(sides):
    found = outcomes(functools.partial(double_or_die, sides))
    lost = [outcome for outcome in found if outcome.error]
    assert 1 <= len(lost) <= 2, "each of the two had one"
    assert {outcome.error for outcome in lost} == {WORKER_DIED}
    assert all(outcome.result == 2 * outcome.item for outcome in found if outcome not in lost)


@pytest.mark.parametrize("in_caller", [True, False])
def test_what_lacks_memory_beside_others_is_tried_alone(in_caller, sides):
    few = ITEMS[:4]
    found = outcomes(functools.partial(double_or_lack_memory, sides, in_caller), items=few)
    assert [outcome.result for outcome in found] == [2 * item for item in few]


def test_what_cannot_be_sent_is_an_error(sides):
    found = outcomes(functools.partial(nothing_to_send, sides))
    failed = [outcome for outcome in found if outcome.error]
    assert failed
    assert all("pickle" in str(outcome.error) for outcome in failed)
    assert all(outcome.result == outcome.item for outcome in found if not outcome.error)


def test_what_can_be_done_meanwhile_is_done_once_when_the_last_item_is_taken(sides):
    said: list[int | str] = []

    def noted(item: int) -> int:
        if sides.is_caller():
            said.append(item)
        return item

    outcomes(noted, meanwhile=lambda: said.append("meanwhile"))
    assert said.count("meanwhile") == 1
    assert said[-1] == "meanwhile"


class TestNothingStays:
    @pytest.fixture(autouse=True)
    def as_before(self) -> Iterator[None]:
        before = self.files()
        yield
        assert self.files() == before

    @staticmethod
    def files() -> set[str]:
        """Open files; a pipe's other end is a process's that still runs."""
        place = Path("/proc/self/fd")
        if not place.exists():
            pytest.skip("open files are looked up in /proc")
        return {f"{each.name} {each.readlink()}" for each in place.iterdir() if each.exists()}

    @pytest.fixture
    def processes(self, monkeypatch) -> list[int]:
        """Those that are forked."""
        found: list[int] = []
        fork = os.fork

        def noted() -> int:
            process = fork()
            found.append(process)
            return process

        monkeypatch.setattr(os, "fork", noted)
        return found

    def test_after_all_outcomes(self, sides, processes):
        outcomes(functools.partial(double_or_fail, sides))
        self.none_is_left(processes)

    def test_after_the_caller_has_lost_interest(self, sides, processes):
        with Forked(2) as executor:
            found = engine.map_items(functools.partial(double_or_fail, sides), ITEMS, executor)
            next(found)
            found.close()  # type: ignore[attr-defined]
        self.none_is_left(processes)

    def test_after_an_error_of_the_caller_s_own(self, processes):
        def fail() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            outcomes(str, meanwhile=fail)
        self.none_is_left(processes)

    def test_where_no_process_can_be_started(self, monkeypatch):
        def refused() -> int:
            raise BlockingIOError("Resource temporarily unavailable")

        monkeypatch.setattr(os, "fork", refused)
        assert [outcome.result for outcome in outcomes(str)] == list(map(str, ITEMS))

    @staticmethod
    def none_is_left(processes: list[int]) -> None:
        assert len(processes) == 2
        for process in processes:
            with pytest.raises(ChildProcessError):
                os.waitpid(process, os.WNOHANG)


def test_a_process_with_threads_is_not_forked():
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert not forked.is_possible()
    finally:
        done.set()
        thread.join()
