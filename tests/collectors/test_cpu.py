"""CPU time by the kernel's clocks: of steps, of this thread, of other processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from perfscope.collectors import cpu
from perfscope.collectors.cpu import StepTimes, Times, describe_cpu


def compute(seconds: float) -> None:
    """Until this thread has used so much CPU time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_what_went_by_between_two_looks() -> None:
    assert Times(10, 7, 9).since(Times(4, 2, 1)) == Times(6, 5, 8)


def test_sleep_is_wall_time_and_computing_is_both() -> None:
    times = StepTimes()
    times.begin()
    time.sleep(0.02)
    compute(0.02)
    times.step_ended()
    helper = threading.Thread(target=compute, args=(0.02,))
    helper.start()
    helper.join()
    times.step_ended()
    assert times.steps == 2
    assert times.took.wall >= 40e6
    assert 20e6 <= times.took.thread < 40e6, "the helper's time is not this thread's"
    assert times.took.process >= 40e6


def test_steps_before_the_first_recorded_one_do_not_count() -> None:
    times = StepTimes()
    times.step_ended()
    assert (times.steps, times.took) == (0, Times(0, 0, 0))


@pytest.mark.parametrize(
    ("count", "waits"), [((5, 5, 9, 10), [0, 4, 1]), ((5, None, 9, 10), [1]), ((None, 5, 6, 8), [])]
)
def test_waits_for_a_core_are_those_of_each_step(
    monkeypatch: pytest.MonkeyPatch, count: tuple[int | None, ...], waits: list[int]
) -> None:
    answers = iter(count)
    monkeypatch.setattr(cpu, "waited_for_core", lambda: next(answers))
    times = StepTimes()
    times.begin()
    for _ in count[1:]:
        times.step_ended()
    assert times.waits == (waits if None not in count else [])
    assert times.waited == (sum(waits) if None not in count else None)


def test_captures_are_added_up() -> None:
    first, second = StepTimes(), StepTimes()
    first.steps, first.took, first.waits = 2, Times(10, 3, 4), [0, 1]
    second.steps, second.took, second.waits = 3, Times(20, 6, 9), [2, 0, 0]
    found = describe_cpu([first, second])
    assert (found.steps, found.wall_ns, found.thread_ns, found.process_ns, found.waited_ns) == (5, 30, 9, 13, 3)
    second.waits.clear()
    assert describe_cpu([first, second]).waited_ns is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system binds no process to cores")
def test_cores_are_listed_as_the_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {8, 0, 1, 2, 5})
    assert describe_cpu([]).cores == "0-2,5,8"


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not count how long threads wait")
def test_the_time_that_a_thread_waits_for_a_core_is_read() -> None:
    before = cpu.waited_for_core()
    assert before is not None
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        while (cpu.waited_for_core() or 0) - before <= 10e6:
            compute(0.05)
    finally:
        for other in others:
            other.kill()
            other.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="processes' clocks are the kernel's of Linux")
def test_other_processes_together_until_one_has_ended() -> None:
    busy = subprocess.Popen(
        [sys.executable, "-c", "import time\nwhile time.process_time() < 0.05: pass\nprint(flush=True)\ninput()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert busy.stdout is not None
    busy.stdout.readline()
    used = cpu.of_processes([busy.pid])
    assert used is not None
    assert 50e6 <= used < 5e9
    both = cpu.of_processes([busy.pid, os.getpid()])
    assert both is not None
    assert both > used
    busy.communicate(b"\n")
    assert cpu.of_processes([busy.pid, os.getpid()]) is None
    assert cpu.of_processes([]) == 0


def test_a_system_without_such_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(time, "clock_gettime_ns", raising=False)
    assert cpu.of_processes([1]) is None
