"""The collector in one process: finds its steps and has them recorded.

Outside captures a step costs a few microseconds: a counter, some looks at the clock and a row in memory. The profiler
exists only from the beginning of a capture's warm-up to the end of its last step, so it never runs in a process that
does not step.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from perfscope.collectors.capture.lazy import LazyCapturer
from perfscope.collectors.capture.run_file import RankContext, RunFile
from perfscope.collectors.capture.steps import StepDetector, StepVerdict
from perfscope.collectors.capture.watch import StepWatch
from perfscope.collectors.compiled.names import NAMES
from perfscope.collectors.config import FAILURES_FILE, FOR_ANOTHER, CollectorConfig, RankSelection
from perfscope.collectors.ending import at_end, outcome
from perfscope.collectors.hang import watch as hang
from perfscope.collectors.identity import attempt
from perfscope.collectors.jobs import earlier_run, join_job
from perfscope.collectors.launch.bootstrap import MODULE_NAME
from perfscope.collectors.launch.nsys import make_way
from perfscope.collectors.overrides.stop import end_training
from perfscope.collectors.phases.compiled import make_gate, make_passing
from perfscope.collectors.phases.phases import NO_TASK, OPTIMIZER, StepPhases
from perfscope.collectors.problems import Problems
from perfscope.collectors.role import identify_with_role, stated_role
from perfscope.collectors.sampler.sampler import HostSampler, start_sampler
from perfscope.recording.metadata import StepsMetadata
from perfscope.recording.paths import BOOTSTRAP_FOLDER

if TYPE_CHECKING:
    from perfscope.collectors.phases._clock import PassingSteps

_STEP: Final = StepVerdict.STEP
_NOTHING: Final = StepVerdict.NOTHING
_ALWAYS: Final = 1 << 62
"""More steps than any run has."""


class Session:
    """One process's steps. Made when the process has completed its first."""

    def __init__(
        self, config: CollectorConfig, problems: Problems, phases: StepPhases, passing: PassingSteps | None = None
    ) -> None:
        self._pid = os.getpid()
        self._thread = get_ident()
        self._config = config = make_way(config, os.environ, problems)
        self._problems = problems
        self._detector = StepDetector()
        self._phases = phases
        self._passing = passing
        self._optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._optimizers_met = 0
        self._last: Callable[[], Any] = lambda: None
        """The optimizer that stepped last, while it lives."""
        self._last_key = 0
        self._skipped = 0
        self._quiet_until: float = 0
        """Completed steps up to which there is nothing to do between two, unless something comes up."""
        self._role = stated_role()
        self._identity = identify_with_role(self._role)
        place = self._place()
        if place is not None and place != config.folder:
            hang.end()  # what it writes is the first job's
        self._config = config = replace(config, output=str(place or config.folder))
        self._earlier = earlier_run(config.folder, self._identity.rank)
        self._run_file = RunFile(config, self._identity, problems, self._earlier, self._role)
        self._capturer: LazyCapturer | None = None
        self._sampler: HostSampler | None = None
        phases.on_this_thread()
        if place is None:
            hang.end()
            return
        context = RankContext(config, self._identity, self._run_file, phases, problems)
        self._capturer = LazyCapturer(context)
        self._agreed = self._capturer.schedule.plans
        self._watch = StepWatch(context, attempt(), self._capturer)
        self._watch.start()
        self._watch.save_at_end_of_thread(self._save_running)
        self._sampler = problems.guard("starting the system sampler", start_sampler, config, self._identity)

    def optimizer_stepped(self, optimizer: Any, *, skipped: bool | None = None) -> None:
        """An outermost optimizer step has ended. ``skipped``: a gradient scaler met an overflow and left it out; None:
        there is no scaler.
        """
        if self._counts():
            if skipped:
                self._skipped += 1
            if optimizer is not self._last():
                self._meet(optimizer)
            detector = self._detector
            verdict, completed = detector.optimizer_step(self._last_key), detector.completed
            # Nearly all steps end here. Every call that is not made is a µs of somebody's step.
            if verdict is _STEP and completed < self._quiet_until and not self._run_file.unsaved and not self._agreed:
                self._watch.step_passes(completed)
                if self._passing is not None and skipped is None and detector.alone and self._watch.passes:
                    self._have_pass(self._passing, completed)
            elif verdict is not _NOTHING:
                self._act(verdict)

    def _have_pass(self, passing: PassingSteps, completed: int) -> None:
        """From now on the steps of the optimizer that stepped last are handled by ``passing``, without a call of
        :meth:`optimizer_stepped`, as long as they end like this one.
        """
        for watch in hang.watches:
            watch.follow(passing)
        passing.arm(
            self._last, self._detector, self._run_file, self._agreed, self._phases.graph_task,
            *self._watch.storing(passing), completed, int(min(self._quiet_until, _ALWAYS)),
        )  # fmt: skip

    def engine_stepped(self) -> None:
        """A training engine has finished a step of its own."""
        if self._counts():
            self._act(self._detector.engine_step())

    def backward_ended(self, *, accumulates: bool) -> None:
        """An outermost backward pass has ended, in a process that has made no optimizer."""
        if self._counts():
            self._act(self._detector.backward(accumulates=accumulates))

    def backwards_ended_before(self, passes: Sequence[bool]) -> None:
        """These have ended before it was known that this process trains: steps of which only the number is known."""
        for accumulates in passes:
            self._detector.backward(accumulates=accumulates)

    def explicitly_stepped(self) -> None:
        """``perfscope.step()`` was called."""
        if self._counts():
            self._act(self._detector.explicit_step())

    @property
    def capturing(self) -> bool:
        """Is a profiler of ours running?"""
        return self._capturer is not None and self._capturer.busy

    def forget(self) -> None:
        """In a forked child: leave everything to the parent."""
        capturer, self._capturer = self._capturer, None
        self._have_none_pass()
        self._sampler = None
        if capturer is not None:
            capturer.forget()
            self._watch.forget()

    def close(self, outcome: str) -> None:
        """The process ends: write what there is. Further calls do nothing."""
        capturer = self._capturer
        if capturer is None or os.getpid() != self._pid:
            return
        self._have_none_pass()
        self._problems.guard("writing the running capture", capturer.close)
        self._capturer = None
        self._problems.guard("writing the step history", self._watch.close)
        if self._sampler is not None:
            self._problems.guard("stopping the system sampler", self._sampler.stop)
        self._problems.guard("writing the run's metadata", self._save, outcome)
        self._problems.guard("compressing the traces", capturer.join)

    def _place(self) -> Path | None:
        """Where this process records its rank; None where that is not wanted, or another process does."""
        rank = self._identity.rank
        if rank not in RankSelection.parse(self._config.ranks):
            return None
        place = join_job(self._config.folder, self._identity, self._role)
        if isinstance(place, Path):
            return place
        self._problems.add(
            f"process {self._pid} trains as rank {rank}, as process {place.pid} on {place.host} and others of the same "
            f"command do, each of which is recorded; process {self._pid} is not recorded"
        )
        return None

    def _counts(self) -> bool:
        """Do this thread's steps count?"""
        self._have_none_pass()
        if self._capturer is None:
            return False
        if get_ident() == self._thread:
            for watch in hang.watches:
                watch.progress()
            return True
        self._problems.add(
            "optimizers step on several threads, and only the first thread's steps are counted; "
            "if steps begin or end at the wrong place, call perfscope.step() at the end of each"
        )
        return False

    def _have_none_pass(self) -> None:
        if self._passing is not None:
            self._passing.disarm()

    def _meet(self, optimizer: Any) -> None:
        """This optimizer has stepped, not the one before."""
        key = self._optimizers.get(optimizer)
        if key is None:
            self._optimizers_met += 1
            self._quiet_until = 0
            key = self._optimizers[optimizer] = self._optimizers_met
        self._last, self._last_key = weakref.ref(optimizer), key

    def _act(self, verdict: StepVerdict) -> None:
        capturer = self._capturer
        assert capturer is not None
        if verdict is StepVerdict.STEP:
            self._between_steps(capturer, self._detector.completed)
        elif verdict is StepVerdict.RESTART:
            self._quiet_until = 0
            self._watch.restart()
            capturer.restart()

    def _between_steps(self, capturer: LazyCapturer, completed: int) -> None:
        """``completed`` steps have ended; the next begins when this returns, and its time with it."""
        was_busy = capturer.busy
        self._watch.step_ends(completed, busy=was_busy)
        if self._sampler is not None and capturer.at_edge(completed):
            self._problems.guard("notifying the system sampler", self._sampler.look)
        capturer.boundary(completed, self._trained)
        hooked = not was_busy and self._watch.hook(completed, self._trained, self._optimizers_met)
        if self._run_file.unsaved:
            self._save_running()
        busy = capturer.busy
        plain = self._config.mode not in FOR_ANOTHER and not self._config.stop_after
        quiet = plain and not busy and self._watch.hooked_for == self._optimizers_met
        self._quiet_until = capturer.schedule.quiet_until() if quiet else 0
        disturbed = busy or was_busy or hooked or capturer.yields
        self._watch.step_begins(completed, busy=busy, disturbed=disturbed)
        if 0 < self._config.stop_after <= completed:
            end_training(self._config.folder, self._identity.rank, self._identity.world_size)

    def _trained(self) -> list[Any]:
        return list(self._optimizers)

    def _save_running(self) -> None:
        self._problems.guard("writing the run's metadata", self._save, "running")

    def _save(self, outcome: str) -> None:
        if self._earlier is not None and not self._run_file.captures:
            self._run_file.unsaved = False
            return  # what an earlier attempt recorded is worth more than that this one recorded nothing
        steps = StepsMetadata(
            seen=self._detector.completed,
            detected_by=self._detector.source,
            unprofiled_ns=tuple(self._watch.unprofiled),
            unprofiled_thread_ns=tuple(self._watch.unprofiled_thread),
            skipped=self._skipped,
            batches_per_step=self._watch.batches_per_step,
        )
        self._run_file.recording = self._watch.cost(self._detector.completed)
        self._problems.guard("writing where compiled code comes from", self._write_compiled)
        try:
            self._run_file.save(steps, outcome)
        except OSError as error:  # a full disk may have room again at the end
            self._problems.add(f"the run's metadata could not be written ({error})")

    def _write_compiled(self) -> None:
        NAMES.write(self._config.folder, self._identity.rank)


@dataclass(frozen=True)
class RecordingHooks:
    """What is done where a recording begins and ends in one process."""

    prepare: Callable[[CollectorConfig], CollectorConfig]
    """At the first step: the options that hold, the folder prepared. May raise."""
    ended: Callable[[str], None]
    """Everything is written; how the recording has ended."""


class Collector:
    """The process's one way to its session: makes it at the first step, guards every call, closes it at the end."""

    def __init__(self, config: CollectorConfig, hooks: RecordingHooks | None = None) -> None:
        self._depth: defaultdict[int, int] = defaultdict(int)
        """Thread -> steps of optimizers and engines that it is inside."""
        self._parent_captured = False
        """Was this process forked while its parent's profiler ran?"""
        self._gate = make_gate(OPTIMIZER)
        self.passing = make_passing(self._depth, self._gate)
        """What handles optimizer steps that are nothing out of the ordinary; None where it is not compiled."""
        self.record(config, hooks)
        os.register_at_fork(after_in_child=self._forked)

    def record(self, config: CollectorConfig, hooks: RecordingHooks | None = None) -> None:
        """Record from the next completed step on. Whatever was recorded before has been stopped."""
        self._config: CollectorConfig | None = config
        self._hooks = hooks
        self.problems = Problems()
        self._session: Session | None = None
        self._broken = False
        """Has recording failed?"""
        if self.passing is not None:
            self.passing.disarm()
        self._phases = StepPhases(self.problems, self._gate)

    def stop(self, outcome: str) -> None:
        """Write what there is, and record no more until :meth:`record` is called. Further calls do nothing."""
        config, self._config = self._config, None
        session, self._session = self._session, None
        if config is None:
            return
        if session is not None:
            self.problems.guard("ending the collector", session.close, outcome)
        self._phases.remove()
        if self._hooks is not None:
            self.problems.guard("ending the recording", self._hooks.ended, outcome)

    def enter(self) -> bool:
        """An optimizer's or engine's step begins; hand what is returned to :meth:`leave`."""
        depth, thread, phases = self._depth, get_ident(), self._phases
        depth[thread] = now = depth[thread] + 1
        try:
            return now == 1 and phases.begins[OPTIMIZER](OPTIMIZER)
        except Exception as error:
            return phases.failed(OPTIMIZER, error)

    def enter_without_phase(self) -> bool:
        """A step begins that :meth:`begin` will be called for later. Is it the outermost, which is the phase?"""
        depth, thread = self._depth, get_ident()
        depth[thread] = now = depth[thread] + 1
        return now == 1

    def begin(self) -> bool:
        """The outermost step's phase begins; hand what is returned to :meth:`end` or :meth:`leave`."""
        return self._phases.begin(OPTIMIZER)

    def end(self, begun: bool) -> None:
        """The outermost step's phase ends, for good or for the time of a closure."""
        if begun:
            self._phases.end(OPTIMIZER)

    def leave(self, begun: bool, stepped: Callable[..., None] | None, *subject: Any) -> None:
        """It has ended. ``stepped`` is called with the session and ``subject``, unless the step failed or was part of
        another.
        """
        depth, thread = self._depth, get_ident()
        depth[thread] = now = depth[thread] - 1
        if begun:
            try:
                self._phases.ends[OPTIMIZER](OPTIMIZER)
            except Exception as error:
                self._phases.failed(OPTIMIZER, error)
        if stepped is not None and not now:
            self.report(stepped, *subject)

    def report(self, stepped: Callable[..., None], *subject: Any) -> None:
        """Report an event to the session; make the session first if there is none."""
        session = self._session
        if session is None or self._phases.graph_task() != NO_TASK:
            session = self._session_now(partial(self.report, stepped, *subject))
        if session is None or self._broken:
            return
        try:
            stepped(session, *subject)
        except Exception as error:  # nothing may reach the training, and nothing is left running
            self._broken = True
            self.problems.failed("recording", error)
            self.problems.guard("stopping the recording", session.close, "running")

    def _session_now(self, again: Callable[[], None]) -> Session | None:
        """The session, made now if there is none. None where nothing is recorded, and inside a backward, after which
        ``again`` is called.
        """
        config, phases = self._config, self._phases
        if config is None or (phases.graph_task() != NO_TASK and phases.postpone(again)):
            return None
        return self._session or self._started(config)

    def _started(self, config: CollectorConfig) -> Session | None:
        """The session, made now; None where that fails."""
        if self.problems.broke("starting the collector"):
            return None
        self.problems.guard("starting the collector", self._start, config)
        if self._session is None:
            note_failure(config.folder, self.problems.as_tuple()[-1])
        return self._session

    def _start(self, config: CollectorConfig) -> None:
        if self._parent_captured:
            from perfscope.collectors.capture.capture import end_inherited

            self.problems.guard("ending a copied profiler", end_inherited)
        hang.begin()  # a rank that was forked is watched from here on
        if self._hooks is not None:
            config = self._hooks.prepare(config)
        self._session = Session(config, self.problems, self._phases, self.passing)
        if self._hooks is None:  # else whoever began the recording ends it
            at_end(self._close)

    def _close(self) -> None:
        if self._session is not None:
            self.stop(outcome())

    def _forked(self) -> None:
        session, self._session = self._session, None
        self._phases.remove()
        if self._config is not None:
            self.record(self._config, self._hooks)
        thread = get_ident()  # the only one left; it may be inside a step
        inside = self._depth[thread]
        self._depth.clear()
        self._depth[thread] = inside
        if session is not None:
            self._parent_captured |= session.capturing
            self.problems.guard("restoring a forked process", session.forget)


def note_failure(folder: Path, failure: str) -> None:
    """Leave a line for ``perfscope run`` to show, where there is no metadata to hold it."""
    with suppress(OSError), (folder / BOOTSTRAP_FOLDER / FAILURES_FILE).open("a", encoding="utf-8") as file:
        file.write(failure + "\n")


VARIABLE_MODULE: Final = "_perfscope_variable"
"""Name of the module that waits to record where the variable PERFSCOPE asks for it."""

_attached: list[Collector] = []
"""This process's collector; empty where nothing was ever recorded."""


def attach(config: CollectorConfig) -> Collector:
    """Make this process's collector. Called once, when torch has been imported under ``perfscope run``."""
    _attached[:] = [Collector(config)]
    hang.begin()
    return _attached[0]


def attach_within(config: CollectorConfig, hooks: RecordingHooks) -> tuple[Collector, bool]:
    """Have this process's collector record what the program itself starts; was the collector made for it?"""
    if _attached:
        _attached[0].record(config, hooks)
        return _attached[0], False
    _attached.append(Collector(config, hooks))
    return _attached[0], True


def attached() -> Collector | None:
    """This process's collector; None where nothing was ever recorded."""
    return _attached[0] if _attached else None


def step() -> None:
    """Tell PerfScope that a training step has ended.

    Only for loops whose steps it cannot find from their optimizers; once called, calls alone count. Where nothing is
    recorded it does nothing.
    """
    if not _attached and "torch" in sys.modules:
        bootstrap = sys.modules.get(MODULE_NAME) or sys.modules.get(VARIABLE_MODULE)
        if bootstrap is not None:  # a job that makes no optimizer of torch's
            bootstrap.attach_waiting()
    for collector in _attached:
        collector.report(Session.explicitly_stepped)
