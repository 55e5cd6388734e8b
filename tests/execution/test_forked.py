"""Forked processes and the caller's: every item has one outcome, and nothing of the processes stays behind."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perfscope.errors import TooLittleMemory, TraceError
from perfscope.execution import engine, forked
from perfscope.execution.forked import Forked
from perfscope.execution.outcome import WORKER_DIED, Outcome
from tests.waiting import until

ITEMS = list(range(12))
CALLER = os.getpid()
MARKS: dict[bool, Path] = {}

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@pytest.fixture(autouse=True)
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that tell that the caller has an item, and that another process has one."""
    monkeypatch.setattr(sys.modules[__name__], "MARKS", {True: tmp_path / "caller", False: tmp_path / "other"})


def is_caller() -> bool:
    """Is this the caller's process? Both sides wait until the other has an item, too."""
    mine = os.getpid() == CALLER
    MARKS[mine].touch()
    until(MARKS[not mine].exists, "the other side has an item")
    return mine


def double_or_fail(item: int) -> int:
    is_caller()
    if item % 4 == 3:
        raise TraceError(f"rank{item}.json: not a trace")
    return 2 * item


def double_or_die(item: int) -> int:
    if not is_caller():
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * item


def double_or_lack_memory(in_caller: bool, item: int) -> int:
    if is_caller() == in_caller and not hasattr(forked, "alone"):
        raise TooLittleMemory(f"rank{item}.json: too little memory")
    return 2 * item


def process_of(_item: int) -> int:
    is_caller()
    return os.getpid()


def megabyte_or_process(item: int) -> bytes | int:
    return os.getpid() if is_caller() else bytes([item]) * (1 << 20)


def nothing_to_send(item: int) -> Callable[[], int] | int:
    return item if is_caller() else lambda: item


def outcomes(
    function: Callable[[int], Any], workers: int = 2, items: list[int] = ITEMS, **options: Any
) -> list[Outcome[int, Any]]:
    with Forked(workers) as executor:
        found = sorted(engine.map_items(function, items, executor, **options), key=lambda outcome: outcome.item)
    assert [outcome.item for outcome in found] == items
    assert all((outcome.result is None) != (outcome.error is None) for outcome in found)
    return found


def test_each_item_has_its_result_or_its_error():
    found = outcomes(double_or_fail)
    assert [outcome.result for outcome in found] == [None if item % 4 == 3 else 2 * item for item in ITEMS]
    assert [outcome.error for outcome in found if outcome.error] == [
        f"rank{item}.json: not a trace" for item in (3, 7, 11)
    ]


def test_the_caller_and_the_others_take_items():
    worked = {outcome.result for outcome in outcomes(process_of)}
    assert CALLER in worked
    assert 2 <= len(worked) <= 3


def test_more_items_than_a_pipe_holds_numbers(monkeypatch):
    monkeypatch.setattr(forked, "_MOST_NUMBERS", 5)
    assert [outcome.result for outcome in outcomes(double_or_fail, items=ITEMS[:3])] == [0, 2, 4]
    assert [outcome.result for outcome in outcomes(double_or_fail)][:3] == [0, 2, 4]


def test_results_larger_than_a_pipe_arrive_whole():
    found = [outcome.result for outcome in outcomes(megabyte_or_process)]
    sent = [result for result in found if isinstance(result, bytes)]
    assert sent
    assert all(result == result[:1] * (1 << 20) for result in sent)


def test_a_process_that_is_killed_costs_the_items_it_had():
    found = outcomes(double_or_die)
    lost = [outcome for outcome in found if outcome.error]
    assert 1 <= len(lost) <= 2, "each of the two had one"
    assert {outcome.error for outcome in lost} == {WORKER_DIED}
    assert all(outcome.result == 2 * outcome.item for outcome in found if outcome not in lost)


@pytest.mark.parametrize("in_caller", [True, False])
def test_what_lacks_memory_beside_others_is_tried_alone(in_caller, monkeypatch):
    """Alone it is tried in a process of its own, which this says is another case."""
    real = engine.Forked.outcomes

    def then_alone(self: Forked, *given: Any) -> Any:
        yield from real(self, *given)
        monkeypatch.setattr(forked, "alone", True, raising=False)

    monkeypatch.setattr(Forked, "outcomes", then_alone)
    found = outcomes(functools.partial(double_or_lack_memory, in_caller))
    assert [outcome.result for outcome in found] == [2 * item for item in ITEMS]


def test_what_cannot_be_sent_is_an_error():
    found = outcomes(nothing_to_send)
    failed = [outcome for outcome in found if outcome.error]
    assert failed
    assert all("pickle" in str(outcome.error) for outcome in failed)
    assert all(outcome.result == outcome.item for outcome in found if not outcome.error)


def test_what_can_be_done_meanwhile_is_done_once_when_the_last_item_is_taken():
    said: list[int | str] = []

    def noted(item: int) -> int:
        if is_caller():
            said.append(item)
        return item

    outcomes(noted, meanwhile=lambda: said.append("meanwhile"))
    assert said.count("meanwhile") == 1
    assert said[-1] == "meanwhile"


class TestNothingStays:
    @pytest.fixture(autouse=True)
    def open_files(self):
        before = self.files()
        yield
        assert self.files() == before
        with pytest.raises(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)

    @staticmethod
    def files() -> set[str]:
        place = Path("/proc/self/fd")
        if not place.exists():
            pytest.skip("open files are looked up in /proc")
        return {f"{each.name} {each.readlink()}" for each in place.iterdir() if each.exists()}

    def test_after_all_outcomes(self):
        outcomes(double_or_fail)

    def test_after_the_caller_has_lost_interest(self):
        with Forked(2) as executor:
            found = engine.map_items(double_or_fail, ITEMS, executor)
            next(found)
            found.close()

    def test_after_an_error_of_the_caller_s_own(self):
        def fail() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            outcomes(process_of, meanwhile=fail)


def test_a_process_with_threads_is_not_forked():
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    assert forked.is_possible()
    thread.start()
    try:
        assert not forked.is_possible()
    finally:
        done.set()
        thread.join()
