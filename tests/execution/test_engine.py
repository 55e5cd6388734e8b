"""The engine's promise: whatever runs the work, the outcomes are the same, one an item, and a dead worker costs one."""

from __future__ import annotations

import functools
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from perfscope.errors import PerfscopeError, TooLittleMemory, TraceError
from perfscope.execution import engine, executors, forked
from perfscope.execution.forked import Forked
from perfscope.execution.outcome import WORKER_DIED, Outcome, describe
from perfscope.execution.serial import Serial
from tests.clusters import dask_cluster
from tests.waiting import PATIENCE_S, until

ITEMS = list(range(12))


def double_or_fail(item: int) -> int:
    if item == 3:
        raise TraceError("rank3.json: not a trace")
    return 2 * item


def double_or_die(item: int) -> int:
    if item == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * item


def double_or_die_twice(item: int) -> int:
    time.sleep(0.05)
    if item in (3, 9):
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * item


def double_or_lack_memory(marker: Path, item: int) -> int:
    """The first call for item 3 lacks memory, and each for item 9."""
    if item == 3 and not marker.exists():
        marker.touch()
        raise TooLittleMemory("rank3.json: too little memory")
    if item == 9:
        raise TooLittleMemory("rank9.json: too little memory")
    return 2 * item


def double_or_die_in_worker(caller: int, item: int) -> int:
    if item == 0 and os.getpid() != caller:
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * item


def double_or_lack_memory_in(caller: int, item: int) -> int:
    if os.getpid() == caller:
        raise TooLittleMemory(f"rank{item}.json: too little memory")
    return 2 * item


def process_of(_item: int) -> int:
    return os.getpid()


def double_slowly(item: int) -> int:
    time.sleep(0.1)
    return 2 * item


def double_or_stop(marker: Path, item: int) -> int:
    """The first call for item 3 stops its worker."""
    if item == 3:
        with suppress(FileExistsError), marker.open("x") as file:
            file.write(str(os.getpid()))
            file.flush()
            os.kill(os.getpid(), signal.SIGSTOP)
    return 2 * item


def outcomes(function: Callable[[int], int], executor: Executor | Forked) -> list[Outcome[int, int]]:
    found = sorted(engine.map_items(function, ITEMS, executor), key=lambda outcome: outcome.item)
    assert [outcome.item for outcome in found] == ITEMS
    assert all((outcome.result is None) != (outcome.error is None) for outcome in found)
    return found


@pytest.mark.parametrize("kind", [Serial, ThreadPoolExecutor, ProcessPoolExecutor])
def test_results_are_the_same_on_every_executor(kind):
    with kind() as executor:
        found = outcomes(double_or_fail, executor)
    assert [outcome.result for outcome in found] == [None if item == 3 else 2 * item for item in ITEMS]
    assert [outcome.error for outcome in found if outcome.error] == ["rank3.json: not a trace"]


def test_a_worker_that_is_killed_costs_its_item_only():
    with ProcessPoolExecutor(2) as executor:
        found = outcomes(double_or_die, executor)
    assert [outcome.result for outcome in found] == [None if item == 3 else 2 * item for item in ITEMS]
    assert found[3].error == WORKER_DIED


def test_so_does_every_further_one():
    with engine.local_executor([1] * 12, 1, workers=3) as executor:
        found = outcomes(double_or_die_twice, executor)
    assert {outcome.item: outcome.error for outcome in found if outcome.error} == {
        3: WORKER_DIED,
        9: WORKER_DIED,
    }


def test_an_executor_that_was_shut_down_is_an_error_of_each_item():
    class Cancelling(ThreadPoolExecutor):
        def submit(self, fn, /, *args, **kwargs):
            future = super().submit(time.sleep, 0)
            future.result()
            cancelled = type(future)()
            cancelled.cancel()
            cancelled.set_running_or_notify_cancel()
            return cancelled

    with Cancelling(2) as executor:
        assert {outcome.error for outcome in outcomes(double_or_fail, executor)} == {executors.WORK_LOST}


def test_errors_of_other_kinds_carry_their_type():
    assert describe(KeyError("x")) == "KeyError: 'x'"
    assert describe(TraceError("x")) == "x"


def test_what_lacks_memory_beside_others_is_tried_alone(tmp_path):
    work = functools.partial(double_or_lack_memory, tmp_path / "marker")
    with ProcessPoolExecutor(3) as executor:
        found = {outcome.item: (outcome.result, outcome.error) for outcome in engine.map_items(work, ITEMS, executor)}
    assert found == {
        **{item: (2 * item, None) for item in ITEMS}, 9: (None, "rank9.json: too little memory")
    }  # fmt: skip


class TestHelpedPool:
    """The caller's process takes items too, beside workers that are not forked from it."""

    @pytest.fixture
    def pool(self, monkeypatch) -> Iterator[Executor | Forked]:
        monkeypatch.setattr(forked, "is_possible", lambda: False)
        with engine.local_executor([1] * 12, 1, workers=2, helped=True) as executor:
            assert isinstance(executor, executors.HelpedPool)
            yield executor

    def test_the_same_results(self, pool):
        with Serial() as serial:
            assert outcomes(double_or_fail, pool) == outcomes(double_or_fail, serial)

    def test_one_worker_less_is_started_than_processes_work(self, pool):
        worked = {outcome.result for outcome in outcomes(process_of, pool)}
        assert os.getpid() in worked
        assert len(worked) == 2

    def test_a_worker_that_is_killed_costs_its_item_only(self, pool):
        found = outcomes(functools.partial(double_or_die_in_worker, os.getpid()), pool)
        assert [outcome.result for outcome in found] == [None, *(2 * item for item in ITEMS[1:])]
        assert found[0].error == WORKER_DIED

    def test_what_lacks_memory_in_the_caller_is_tried_alone(self, pool):
        found = outcomes(functools.partial(double_or_lack_memory_in, os.getpid()), pool)
        assert [outcome.result for outcome in found] == [2 * item for item in ITEMS]

    def test_what_can_be_done_meanwhile_is_done_when_the_last_item_is_taken(self, pool):
        said: list[int | str] = []
        work = functools.partial(self.noted, said)
        found = list(engine.map_items(work, ITEMS, pool, lambda: said.append("meanwhile")))
        assert len(found) == len(ITEMS)
        assert said.count("meanwhile") == 1
        assert said[-1] == "meanwhile", "the caller had items left"

    @staticmethod
    def noted(said: list[int | str], item: int) -> int:
        """Only the caller's own list is looked at."""
        said.append(item)
        return item


class TestLocalExecutor:
    @pytest.fixture(autouse=True)
    def machine(self, monkeypatch):
        monkeypatch.setattr(engine, "available_cores", lambda: 8)
        monkeypatch.setattr(engine, "available_memory", lambda: 1000)

    @staticmethod
    def width(
        memory: list[int], input_bytes: int = 1 << 40, workers: int | None = None, *, helped: bool = False
    ) -> int:
        """Worker processes; 0 is the caller's own."""
        with engine.local_executor(memory, input_bytes, workers, helped=helped) as executor:
            if isinstance(executor, Forked):
                assert helped
                return executor.workers
            return 0 if isinstance(executor, Serial) else executor._max_workers

    def test_as_many_workers_as_cores(self):
        assert self.width([10] * 100) == 8

    def test_not_more_than_items(self):
        assert self.width([10] * 3) == 3

    def test_the_largest_items_fit_into_memory_side_by_side(self):
        assert self.width([10] * 50 + [300] * 3) == 2
        assert self.width([2000] * 3) == 1

    def test_the_users_bound_counts_where_it_is_less(self, monkeypatch):
        monkeypatch.setenv("PERFSCOPE_MEMORY", "500")
        assert self.width([10] * 50 + [300] * 3) == 1
        monkeypatch.setenv("PERFSCOPE_MEMORY", "5GB")
        assert self.width([10] * 50 + [300] * 3) == 2
        monkeypatch.setenv("PERFSCOPE_MEMORY", "much")
        with pytest.raises(PerfscopeError, match="PERFSCOPE_MEMORY=much: not a size"):
            self.width([10] * 50)

    def test_small_work_stays_in_the_caller_s_process(self):
        assert self.width([10] * 8, input_bytes=1000) == 0
        assert self.width([2000]) == 0

    def test_the_caller_may_be_one_of_the_processes(self):
        assert self.width([10] * 8, workers=2, helped=True) == 1
        assert self.width([10] * 8, workers=4, helped=True) == 3
        assert self.width([10] * 3, helped=True) == 2
        assert self.width([10] * 8, helped=True) == 7
        assert self.width([10] * 8, workers=1, helped=True) == 0
        assert self.width([2000] * 3, helped=True) == 1, "killed for memory, a worker costs one item"

    def test_where_processes_cannot_be_forked_it_may_be_one_of_few(self, monkeypatch):
        monkeypatch.setattr(forked, "is_possible", lambda: False)
        assert self.width([10] * 8, workers=4, helped=True) == 3
        assert self.width([10] * 8, helped=True) == 8, "it hands out the work"

    def test_the_caller_takes_no_items_that_need_much_memory(self):
        assert self.width([256 << 20] * 2, workers=2, helped=True) == 1
        assert self.width([10, 257 << 20], workers=2, helped=True) == 2

    def test_the_user_decides(self):
        assert self.width([2000] * 8, input_bytes=1, workers=5) == 5
        assert self.width([10] * 8, workers=1) == 0


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with dask_cluster(tmp_path_factory.mktemp("dask"), workers=2) as address:
        yield address


class OneStopped(Serial):
    """Workers of dask: what is given for the first time never comes back."""

    def __init__(self) -> None:
        self.given = 0

    def threads(self) -> int:
        return 2

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.given += 1
        return Future() if self.given <= len(ITEMS) else super().submit(fn, *args, **kwargs)


class TestCluster:
    @pytest.mark.scale
    def test_the_same_results(self, scheduler):
        with executors.cluster(scheduler) as executor, Serial() as serial:
            assert outcomes(double_or_fail, executor) == outcomes(double_or_fail, serial)

    @pytest.mark.scale
    def test_a_worker_that_is_killed_costs_its_item_only(self, scheduler):
        with executors.cluster(scheduler) as executor:
            found = outcomes(double_or_die, executor)
        assert [outcome.result for outcome in found] == [None if item == 3 else 2 * item for item in ITEMS]
        assert found[3].error == WORKER_DIED

    @pytest.mark.scale
    def test_a_worker_that_dies_when_its_result_is_there_costs_nothing(self, scheduler, monkeypatch):
        from distributed import Client

        gather = Client._gather

        async def gathered(client: Any, futures: Any, *args: Any, **kwargs: Any) -> Any:
            result = await gather(client, futures, *args, **kwargs)
            for state in client.futures.values():
                state.reset()  # what the scheduler's word of a lost result does
            return result

        with executors.cluster(scheduler) as executor:
            monkeypatch.setattr(Client, "_gather", gathered)
            assert executor.submit(double_slowly, 1).result(PATIENCE_S) == 2

    @pytest.mark.scale
    def test_work_is_not_forgotten_while_nobody_has_asked_for_it(self, scheduler):
        with executors.cluster(scheduler) as executor:
            promised = [executor.submit(double_slowly, item) for item in ITEMS]
            gc.collect()
            assert [each.result(PATIENCE_S) for each in promised] == [2 * item for item in ITEMS]

    @pytest.mark.scale
    def test_a_worker_that_is_stopped_costs_nothing(self, tmp_path, monkeypatch):
        monkeypatch.setattr(executors, "_POLL_S", 0.1)
        marker = tmp_path / "stopped"
        with dask_cluster(tmp_path, workers=2) as address, executors.cluster(address) as executor:
            executor.stuck_s = 1.0
            try:
                found = outcomes(functools.partial(double_or_stop, marker), executor)
            finally:
                os.kill(int(marker.read_text()), signal.SIGKILL)
        assert [outcome.result for outcome in found] == [2 * item for item in ITEMS]

    def test_a_worker_that_is_stopped_keeps_results_that_nobody_has_fetched(self, monkeypatch):
        """More of them than its threads can have at once, because each item is done at once."""
        monkeypatch.setattr(executors, "_POLL_S", 0.01)
        executor = executors.Cluster(OneStopped(), stuck_s=0.05)
        assert [outcome.result for outcome in outcomes(double_or_fail, executor)] == [
            outcome.result for outcome in outcomes(double_or_fail, Serial())
        ]

    def test_nothing_answers(self):
        pytest.importorskip("distributed", reason="dask.distributed is not installed (the dask extra)")
        with (
            pytest.raises(PerfscopeError, match=r"tcp://127\.0\.0\.1:9: no dask scheduler answers there"),
            executors.cluster("tcp://127.0.0.1:9", timeout_s=1),
        ):
            pass

    def test_a_cluster_without_workers_is_given_up(self, tmp_path, monkeypatch):
        monkeypatch.setattr(executors, "_POLL_S", 0.1)
        with dask_cluster(tmp_path, workers=0) as address, executors.cluster(address) as executor:
            executor.patience_s = 0.3
            assert {outcome.error for outcome in outcomes(double_or_fail, executor)} == {
                executors.NO_WORKERS.format(seconds=0)
            }

    @pytest.mark.scale
    def test_workers_of_another_version_are_refused(self, scheduler, monkeypatch):
        monkeypatch.setattr(executors, "__version__", "0.0.other")
        with pytest.raises(PerfscopeError, match=r"must have this version, 0\.0\.other"), executors.cluster(scheduler):
            pass


def test_without_dask_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with (
        pytest.raises(PerfscopeError, match=r"pip install 'perfscope-profiler\[dask\]'"),
        executors.cluster("tcp://127.0.0.1:9"),
    ):
        pass


WORKING = """
import os, sys, time
from perfscope.execution import engine

def work(item):
    os.write(1, f"{os.getpid()}\\n".encode())  # at once, whatever the other writes
    time.sleep(6000)

list(engine.map_items(work, [0, 1], engine.local_executor([1, 1], 0, workers=2, helped=HELPED)))
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
@pytest.mark.parametrize("helped", ["False", "True"])
def test_workers_end_with_a_killed_parent(helped: str) -> None:
    code = WORKING.replace("HELPED", helped)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers = [int(parent.stdout.readline()) for _ in range(2)]
        parent.kill()
    try:
        until(lambda: not any(_runs(pid) for pid in workers), "the workers have ended")
    finally:
        for pid in workers:
            if _runs(pid):
                os.kill(pid, signal.SIGKILL)


def _runs(pid: int) -> bool:
    """Is there such a process, and is it no zombie that nobody has asked after?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
