"""The compiled clock counts as the one in Python does, whatever it is told; gates leave alone what is not plain."""

from __future__ import annotations

import gc
import struct
import threading
import tracemalloc
import weakref
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfscope.collectors.phases import clock as module
from perfscope.collectors.phases.clock import HEAD, CompiledClock, PythonClock
from perfscope.collectors.phases.compiled import IS_BUILT
from perfscope.recording.history import STAGES, WAITS
from tests.collectors.harness import needs_torch

if IS_BUILT:
    from perfscope.collectors.phases._clock import Clock, Gate, PassingSteps

pytestmark = pytest.mark.skipif(not IS_BUILT, reason="the clock is not built: pip install -e . makes it")

DATALOADER, FORWARD, BACKWARD, OPTIMIZER = range(4)
FLAG = "_is_compiling_flag"


class Subject:
    """A module, of which the clock looks at this alone."""

    def __init__(self, training: bool) -> None:
        self.training, self._modules = training, {}


SUBJECTS = (Subject(True), Subject(False))


class Core:
    """Counts the same waits for a core for each clock that asks."""

    def __init__(self) -> None:
        self.asked = 0

    def since(self) -> int:
        self.asked += 1
        return 7**self.asked % 1000


_TIMES = st.integers(0, 10**12)
_PHASES = st.integers(0, len(STAGES) - 1)
CALLS = st.one_of(
    st.tuples(st.just("moves"), _TIMES),
    st.tuples(st.just("begin"), _PHASES),
    st.tuples(st.just("begin"), st.just(FORWARD), st.sampled_from([None, *SUBJECTS])),
    st.tuples(st.just("end"), _PHASES),
    st.tuples(st.just("end"), _PHASES),
    st.tuples(st.just("waited"), _TIMES),
    st.tuples(st.just("ask_core")),
    st.tuples(st.just("take")),
    st.tuples(st.just("clear")),
    st.tuples(st.just("set_wait"), st.integers(0, len(WAITS) - 1), _TIMES),
    st.tuples(st.just("row"), _TIMES, _TIMES, _TIMES, st.booleans()),
    st.tuples(st.just("reducing"), st.booleans()),
    st.tuples(st.just("core"), st.booleans()),
    st.tuples(st.just("called"), st.booleans()),
)


def told(clock: Any, call: tuple[Any, ...], time: list[int]) -> Any:
    """What the clock answers to the call."""
    name, *arguments = call
    if name == "reducing":
        clock.reducing = time[0] if arguments[0] else 0
    elif name in ("core", "called"):
        setattr(clock, name, {"core": Core, "called": set}[name]() if arguments[0] else None)
    else:
        return getattr(clock, name)(*arguments)
    return None


@needs_torch
@settings(max_examples=1000, deadline=None)
@given(st.lists(CALLS, max_size=80), st.booleans())
def test_both_clocks_count_the_same(calls: list[tuple[Any, ...]], gradients: bool) -> None:
    import torch

    time = [1]
    with pytest.MonkeyPatch.context() as patch, torch.set_grad_enabled(gradients):
        patch.setattr(module, "perf_counter_ns", lambda: time[0])
        clocks = PythonClock(), CompiledClock()
        for call in calls:
            if call[0] == "moves":
                time[0] += call[1]
                continue
            answers = [told(clock, call, time) for clock in clocks]
            assert answers[0] == answers[1], call
            states = [
                (each.since, each.reducing, each.phases, each.waits, each.called, each.core and each.core.asked)
                for each in clocks
            ]
            assert states[0] == states[1], call
        assert clocks[0].row(1, 2, 3, True) == clocks[1].row(1, 2, 3, True)
        assert clocks[0].take() == clocks[1].take()


def test_many_phases_within_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = CompiledClock()
    for _ in range(10_000):
        assert clock.begin(FORWARD)
    for _ in range(10_000):
        clock.end(FORWARD)
    clock.end(FORWARD)
    assert clock.phases == 10_000


def test_what_makes_no_sense_raises_and_changes_nothing() -> None:
    clock = CompiledClock()
    before = clock.row(0, 0, 0, False)
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (clock.begin, ()), (clock.begin, (len(STAGES),)), (clock.begin, (-1,)), (clock.begin, ("forward",)),
        (clock.begin, (0, None, None)), (clock.begin, (1 << 80,)), (clock.end, (99,)), (clock.end, (None,)),
        (clock.waited, ("long",)), (clock.waited, (1 << 80,)), (clock.set_wait, (-1, 1)),
        (clock.set_wait, (len(WAITS), 1)),
        (clock.row, (1,)), (Clock, (None, None, (60, 60, 0, 0, 0, 0))), (Clock, (None, None, (1, 1, 5, 0, 0, 1))),
        (Clock, (None, None, (6, 15, 4, 2, 20, 6))), (Clock, (None, None, (6, 15, 4, 2, -1, 6))), (Clock, ()),
        (Gate, (-1,)), (Gate, ()), (Gate(0).open, (PythonClock(),)), (Gate(0).ask, (bool, (), FLAG)),
        (PassingSteps, ({}, clock)), (PassingSteps, ([], Gate(0))), (PassingSteps({}, Gate(0)).leave, (None,)),
    ]  # fmt: skip
    for call, arguments in calls:
        with pytest.raises((TypeError, ValueError, OverflowError, RuntimeError)):
            call(*arguments)
    clock.called = []  # type: ignore[assignment]
    with pytest.raises(SystemError):
        clock.begin(FORWARD, SUBJECTS[0])
    assert clock.row(0, 0, 0, False) == before


def test_what_was_never_initialised_harms_nobody() -> None:
    clock: Any = Clock.__new__(Clock)
    for call in (lambda: clock.begin(0), lambda: clock.end(0), lambda: clock.set_wait(0, 1)):
        with pytest.raises(ValueError, match="no such"):
            call()
    assert clock.take() == ([], [])
    gate, passing = Gate.__new__(Gate), PassingSteps.__new__(PassingSteps)
    assert not gate.begin()
    assert not gate.end()
    assert not passing.begin()
    with pytest.raises(ValueError, match="no such phase"):
        gate.open(clock)


def test_a_clock_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise RuntimeError("injected")

    monkeypatch.setattr(module, "perf_counter_ns", broken)
    clock = CompiledClock()
    with pytest.raises(RuntimeError, match="injected"):
        clock.begin(FORWARD)
    clock.core = SimpleNamespace(since=broken)  # type: ignore[assignment]
    for call in (lambda: clock.begin(FORWARD), lambda: clock.waited(1), clock.ask_core):
        with pytest.raises(RuntimeError, match="injected"):
            call()


def on_a_thread(call: Callable[[], Any]) -> Any:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    thread.join()
    return answers[0]


class TestGate:
    """What begins and ends one phase."""

    @pytest.fixture
    def clock(self) -> CompiledClock:
        return CompiledClock()

    @pytest.fixture
    def compiler(self) -> dict[str, Any]:
        return {FLAG: False}

    @pytest.fixture
    def gate(self, clock: CompiledClock, compiler: dict[str, Any]) -> Any:
        gate = Gate(FORWARD)
        gate.ask(lambda: True, compiler, FLAG)
        gate.open(clock)
        return gate

    def begins(self, gate: Any) -> list[bool]:
        """Whether each way to begin a forward answers True; those that do are ended again."""
        subject = Subject(True)
        ways = (
            (gate.begin, gate.end),
            (lambda: gate.begin_module(subject), lambda: gate.end_module(subject)),
            (lambda: gate.begin_outermost(subject, {id(subject): weakref.ref(subject)}), gate.end_outermost),
        )
        answers = []
        for begin, end in ways:
            answers.append(begin())
            assert not answers[-1] or end()
        return answers

    def test_an_open_gate_times(self, gate: Any, clock: CompiledClock) -> None:
        assert self.begins(gate) == [True] * 3
        assert clock.phases == 3
        assert clock.take()[0][FORWARD] > 0

    def test_a_closed_gate_does_not(self, gate: Any, clock: CompiledClock) -> None:
        gate.close()
        assert self.begins(gate) == [False] * 3
        assert clock.phases == 0

    def test_nor_on_another_thread(self, gate: Any) -> None:
        assert on_a_thread(lambda: self.begins(gate)) == [False] * 3

    def test_nor_while_something_is_exported(self, gate: Any, compiler: dict[str, Any]) -> None:
        for flag in (True, None):
            compiler[FLAG] = flag
            assert self.begins(gate) == [False] * 3
        compiler.clear()
        assert self.begins(gate) == [False] * 3

    def test_nor_where_each_stage_is_asked_about(self, gate: Any, clock: CompiledClock) -> None:
        clock.core = Core()  # type: ignore[assignment]
        assert self.begins(gate) == [False] * 3

    def test_modules_that_are_to_be_noted_are_none_of_its_business(self, gate: Any, clock: CompiledClock) -> None:
        clock.called = set()
        subject = Subject(True)
        assert gate.begin()
        assert not gate.begin_module(subject)
        assert not gate.begin_outermost(subject, {id(subject): weakref.ref(subject)})

    def test_nor_are_forwards_without_gradients(self, gate: Any, compiler: dict[str, Any]) -> None:
        gate.ask(lambda: False, compiler, FLAG)
        assert not gate.begin_module(Subject(True))

    def test_nor_other_objects_than_those_held(self, gate: Any) -> None:
        one, other = Subject(True), Subject(True)
        held = {id(one): weakref.ref(one)}
        assert not gate.begin_outermost(other, held)
        assert not gate.begin_outermost(one, {id(one): weakref.ref(other)})
        assert not gate.begin_outermost(one, {id(one): one})
        assert not gate.inside
        assert gate.begin_outermost(one, held)
        assert gate.inside
        assert not gate.begin_outermost(one, held)
        assert gate.end_outermost()
        assert not gate.inside

    def test_what_fails_is_left_to_the_other_way(
        self, gate: Any, clock: CompiledClock, compiler: dict[str, Any]
    ) -> None:
        def broken() -> bool:
            raise RuntimeError("injected")

        def interrupted() -> bool:
            raise KeyboardInterrupt

        def closing() -> bool:
            gate.close()
            return True

        for call in (broken, closing):
            gate.open(clock)
            gate.ask(call, compiler, FLAG)
            assert not gate.begin_module(Subject(True))
        gate.open(clock)
        gate.ask(interrupted, compiler, FLAG)
        with pytest.raises(KeyboardInterrupt):
            gate.begin_module(Subject(True))
        assert clock.phases == 0


class Optimizer:
    """Anything that can be referred to weakly."""


class World:
    """What the steps of an optimizer are handled with."""

    def __init__(self) -> None:
        self.clock, self.gate, self.depth = CompiledClock(), Gate(OPTIMIZER), {}
        self.gate.open(self.clock)
        self.passing = PassingSteps(self.depth, self.gate)
        self.optimizer = Optimizer()
        self.detector = SimpleNamespace(completed=10)
        self.run_file = SimpleNamespace(unsaved=False)
        self.agreed: deque[Any] = deque()
        self.task = -1
        self.rows: list[bytes] = []
        self.waits: Callable[[int], None] | None = None

    def arm(self, until: int = 1 << 62, append: Callable[[bytes], None] | None = None) -> None:
        self.passing.arm(
            weakref.ref(self.optimizer), self.detector, self.run_file, self.agreed, lambda: self.task,
            append or self.rows.append, self.waits, self.detector.completed, until,
        )  # fmt: skip

    def step(self, optimizer: Any = None) -> bool:
        assert self.passing.begin()
        return self.passing.leave(optimizer or self.optimizer)

    def numbers(self) -> list[tuple[int, ...]]:
        """Of each row: number, began, duration, disturbed."""
        return [struct.unpack(f"={HEAD + 4}q", row)[HEAD:] for row in self.rows]


class TestPassingSteps:
    """Steps after which there is nothing to do."""

    @pytest.fixture
    def world(self) -> World:
        return World()

    def test_a_step_is_stored_counted_and_followed_by_the_next(self, world: World) -> None:
        world.arm()
        assert world.step()  # its beginning was not seen
        assert (world.rows, world.detector.completed) == ([], 11)
        world.clock.begin(BACKWARD)
        world.clock.end(BACKWARD)
        began = world.clock.began
        assert world.step()
        ((number, since, duration, disturbed),) = world.numbers()
        assert (number, since, disturbed) == (11, began, 0)
        assert world.clock.began >= since + duration == world.passing.ended
        times = struct.unpack(f"={HEAD + 4}q", world.rows[0])
        assert times[BACKWARD] > 0 < times[OPTIMIZER]
        assert sum(times[: len(STAGES)]) <= duration
        assert world.passing.take_recent() == [duration]
        assert world.passing.take_recent() == []
        assert len(world.passing.between()) == 2
        assert world.passing.between()[1] == world.clock.began - world.clock.since > 0
        assert (world.passing.passed, world.passing.begun, world.passing.completed) == (2, 2, 12)
        assert world.detector.completed == 12
        assert not any(map(any, world.clock.take()))

    def test_the_last_durations_are_kept_in_order(self, world: World) -> None:
        world.clock.began = 1
        world.arm()
        for _ in range(150):
            assert world.step()
        assert world.passing.take_recent() == [duration for _, _, duration, _ in world.numbers()][-64:]

    @pytest.mark.parametrize(
        "why", ["disarmed", "optimizer", "gone", "until", "unsaved", "agreed", "backward", "never armed", "core"]
    )
    def test_all_other_steps_are_reported_and_nothing_is_stored(self, world: World, why: str) -> None:
        world.clock.began = 1
        if why != "never armed":
            world.arm(until=11 if why == "until" else 1 << 62)
        match why:
            case "disarmed":
                world.passing.disarm()
            case "unsaved":
                world.run_file.unsaved = True
            case "agreed":
                world.agreed.append("a capture")
            case "backward":
                world.task = 3
            case "gone":
                world.optimizer = Optimizer()
        assert world.passing.begin()
        if why == "core":
            world.clock.core = Core()  # type: ignore[assignment]
        assert not world.passing.leave(Optimizer() if why == "optimizer" else world.optimizer)
        assert (world.rows, world.detector.completed, world.clock.began, world.depth) == (
            [],
            10,
            1,
            {threading.get_ident(): 0},
        )
        assert world.clock.take()[0][OPTIMIZER] > 0

    def test_a_step_that_failed_ends_no_training_step(self, world: World) -> None:
        world.arm()
        assert world.passing.begin()
        assert world.passing.leave(None)
        assert (world.rows, world.detector.completed, world.passing.passed) == ([], 10, 0)

    def test_a_step_within_another_and_those_of_other_threads_are_not_begun(self, world: World) -> None:
        assert world.passing.begin()
        assert world.depth == {threading.get_ident(): 1}
        assert not world.passing.begin()
        assert not on_a_thread(world.passing.begin)
        assert not world.passing.leave(world.optimizer)
        world.depth[threading.get_ident()] = 2
        assert not world.passing.begin()
        world.gate.close()
        world.depth.clear()
        assert not world.passing.begin()
        assert world.passing.begun == 1

    def test_waits_for_a_core_are_asked_about_before_the_step_is_stored(self, world: World) -> None:
        asked: list[int] = []

        def waits(duration: int) -> None:
            asked.append(duration)
            world.clock.set_wait(0, 5)

        world.waits, world.clock.began = waits, 1
        world.arm()
        assert world.step()
        assert [duration for _, _, duration, _ in world.numbers()] == asked
        assert struct.unpack(f"={HEAD + 4}q", world.rows[0])[len(STAGES)] == 5

    def test_what_fails_is_left_to_the_report(self, world: World) -> None:
        def broken(*_: Any) -> None:
            raise RuntimeError("injected")

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        world.clock.began = 1
        world.arm(append=broken)
        assert not world.step()
        assert not world.step()
        world.arm(append=interrupted)
        with pytest.raises(KeyboardInterrupt):
            world.step()
        del world.run_file.unsaved
        world.arm()
        assert not world.step()
        assert (world.rows, world.detector.completed, world.clock.began) == ([], 10, 1)
        assert world.depth == {threading.get_ident(): 0}

    def test_what_is_replaced_while_it_is_used_is_used_no_more(self, world: World) -> None:
        class RunFile:
            @property
            def unsaved(self) -> bool:
                world.passing.arm(None, None, None, (), bool, None, None, 1, 2)  # type: ignore[arg-type]
                world.passing.disarm()
                gc.collect()
                return False

        world.run_file = RunFile()  # type: ignore[assignment]
        world.arm()
        world.run_file = None  # type: ignore[assignment]
        assert not world.step()
        assert (world.rows, world.detector.completed) == ([], 10)


def test_what_refers_to_itself_is_collected() -> None:
    class Referred(CompiledClock):
        pass

    clock, gate, depth = Referred(), Gate(OPTIMIZER), {}
    gate.open(clock)
    gate.ask(bool, {FLAG: False, "gate": gate}, FLAG)
    depth["passing"] = passing = PassingSteps(depth, gate)
    clock.core = SimpleNamespace(clock=clock, passing=passing)  # type: ignore[assignment]
    gone = weakref.ref(clock)
    del clock, gate, passing, depth
    gc.collect()
    assert gone() is None


def test_a_million_steps_leave_nothing_behind() -> None:
    world = World()
    world.clock.began = 1
    world.arm(append=lambda _: None)
    forward = Gate(FORWARD)
    forward.ask(lambda: True, {FLAG: False}, FLAG)
    forward.open(world.clock)
    held = {id(world): weakref.ref(world)}

    def steps(count: int) -> None:
        for _ in range(count):
            forward.begin_outermost(world, held)
            world.clock.begin(BACKWARD)
            world.clock.end(BACKWARD)
            forward.end_outermost()
            world.step()
            world.step(Optimizer())
            world.clock.row(1, 2, 3, False)
            world.clock.take()
            world.passing.take_recent()
            CompiledClock().begin(FORWARD)

    steps(100)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        steps(20_000)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 20_000
    finally:
        tracemalloc.stop()
