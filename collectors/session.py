"""The collector in one process: finds its steps and has them recorded.

Waiting costs a counter and two looks at the clock per step. The profiler exists only from the beginning of a capture's
warm-up to the end of its last step, so it never runs in a process that does not step.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Final

from perfscope.collectors.claims import claim_rank
from perfscope.collectors.config import FAILURES_FILE, CollectorConfig, RankSelection
from perfscope.collectors.identity import attempt, identify
from perfscope.collectors.problems import Problems
from perfscope.collectors.recorder import Recorder
from perfscope.collectors.steps import StepDetector, Verdict
from perfscope.metadata import RunMetadata, StepRecord, load_run
from perfscope.paths import BOOTSTRAP_FOLDER, run_file
from perfscope.vocabulary import OPTIMIZER

UNPROFILED_STEPS: Final = 256
"""Unprofiled steps whose time is kept: enough for a steady median, few enough for a job of a million steps."""


class Session:
    """One process's steps. Made when the process has completed its first."""

    def __init__(self, config: CollectorConfig, problems: Problems) -> None:
        self._pid = os.getpid()
        self._thread = threading.get_ident()
        self._config = config
        self._problems = problems
        self._detector = StepDetector()
        self._optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._optimizers_met = 0
        self._last_ns: int | None = None
        self._unprofiled: list[int] = []
        self._saved_captures = -1
        self._identity = identify()
        self._earlier = self._load_earlier()
        self._recorder: Recorder | None = None
        if self._is_ours():
            self._recorder = Recorder(config, self._identity, problems)

    def optimizer_stepped(self, optimizer: Any) -> None:
        """An outermost optimizer step has ended."""
        if self._counts():
            key = self._optimizers.get(optimizer)
            if key is None:
                self._optimizers_met += 1
                key = self._optimizers[optimizer] = self._optimizers_met
            self._act(self._detector.optimizer_step(key))

    def engine_stepped(self) -> None:
        """A training engine has finished a step of its own."""
        if self._counts():
            self._act(self._detector.engine_step())

    def explicitly_stepped(self) -> None:
        """``perfscope.step()`` was called."""
        if self._counts():
            self._act(self._detector.explicit_step())

    def begin_optimizer(self) -> Any:
        """Open the optimizer's range, where a capture runs; hand what is returned to :meth:`end_optimizer`."""
        return self._recorder.ranges.begin_optimizer() if self._recorder is not None else None

    def end_optimizer(self, record: Any) -> None:
        """Close the optimizer's range."""
        if record is not None and self._recorder is not None:
            self._recorder.ranges.end_optimizer(record)

    def forget(self) -> None:
        """In a forked child: leave everything to the parent."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.forget()

    def close(self, outcome: str) -> None:
        """The process ends: write what there is. Further calls do nothing."""
        recorder = self._recorder
        if recorder is None or os.getpid() != self._pid:
            return
        self._problems.guard("writing the capture under way", recorder.close)
        self._recorder = None
        self._problems.guard("writing the run's metadata", self._save, recorder, outcome)
        self._problems.guard("compressing the traces", recorder.join)

    def _load_earlier(self) -> RunMetadata | None:
        """What an earlier process recorded of this rank; None where none did."""
        try:
            earlier = load_run(run_file(self._config.folder, self._identity.rank))
        except ValueError:
            return None
        return earlier if earlier.captures else None

    def _is_ours(self) -> bool:
        """Is this rank wanted, and this the process to record it?"""
        rank = self._identity.rank
        if rank not in RankSelection.parse(self._config.ranks):
            return False
        holder = claim_rank(self._config.folder, rank, attempt(), recorded=self._earlier is not None)
        if holder is None:
            return True
        self._problems.add(
            f"process {self._pid} trains as rank {rank}, which process {holder.pid} on {holder.host} already records "
            "(the same command started both); it is left out"
        )
        return False

    def _counts(self) -> bool:
        """Do this thread's steps count?"""
        if self._recorder is None:
            return False
        if threading.get_ident() == self._thread:
            return True
        self._problems.add(
            "optimizers step on several threads, and only the first one's steps are counted; "
            "if steps are cut wrongly, call perfscope.step() at the end of each"
        )
        return False

    def _act(self, verdict: Verdict) -> None:
        recorder = self._recorder
        assert recorder is not None
        if verdict is Verdict.STEP:
            self._time_step(recorder)
            recorder.boundary(self._detector.completed, lambda: list(self._optimizers))
            self._last_ns = None if self._disturbed(recorder) else perf_counter_ns()
        elif verdict is Verdict.RESTART:
            self._unprofiled.clear()
            self._last_ns = None
            recorder.restart()
        if recorder.captures != self._saved_captures:
            self._problems.guard("writing the run's metadata", self._save, recorder, "running")

    def _time_step(self, recorder: Recorder) -> None:
        """Keep the time of the step that has ended, if nothing of ours was near it."""
        if self._last_ns is not None and not recorder.busy:
            self._unprofiled.append(perf_counter_ns() - self._last_ns)

    def _disturbed(self, recorder: Recorder) -> bool:
        """Is the next step's time of no use?"""
        return (
            recorder.busy
            or recorder.captures > max(self._saved_captures, 0)
            or len(self._unprofiled) >= UNPROFILED_STEPS
        )

    def _save(self, recorder: Recorder, outcome: str) -> None:
        self._saved_captures = recorder.captures
        if self._earlier is not None and not recorder.captures:
            return  # what an earlier attempt recorded is worth more than that this one recorded nothing
        steps = StepRecord(
            seen=self._detector.completed,
            detected_by=self._detector.source,
            unprofiled_ns=tuple(self._unprofiled),
        )
        recorder.save(steps, outcome)


class Collector:
    """The process's one way to its session: makes it at the first step, guards every call, closes it at the end."""

    def __init__(self, config: CollectorConfig) -> None:
        self._config = config
        self._problems = Problems()
        self._session: Session | None = None
        self._depth = threading.local()
        os.register_at_fork(after_in_child=self._forked)

    def enter(self) -> Any:
        """An optimizer's or engine's step begins; hand what is returned to :meth:`leave`."""
        depth = getattr(self._depth, "value", 0)
        self._depth.value = depth + 1
        if depth or self._session is None:
            return None
        return self._problems.guard(f"the range {OPTIMIZER}", self._session.begin_optimizer)

    def leave(self, record: Any, stepped: Callable[[Session], None] | None) -> None:
        """It has ended. ``stepped`` tells the session, unless the step failed or was part of another."""
        self._depth.value -= 1
        if record is not None and self._session is not None:
            self._problems.guard(f"the end of the range {OPTIMIZER}", self._session.end_optimizer, record)
        if stepped is not None and not self._depth.value:
            self.tell(stepped)

    def tell(self, stepped: Callable[[Session], None]) -> None:
        """Tell the session about an event; make the session first if there is none."""
        if isinstance(threading.current_thread(), threading._DummyThread):
            self._problems.add(
                "optimizers step on autograd's own threads, where steps cannot be told apart; "
                "call perfscope.step() at the end of each"
            )
            return
        if self._session is None and not self._problems.broke("starting the collector"):
            self._problems.guard("starting the collector", self._start)
            if self._session is None:
                note_failure(self._config.folder, self._problems.as_tuple()[-1])
        if self._session is None or self._problems.broke("recording"):
            return
        self._problems.guard("recording", stepped, self._session)
        if self._problems.broke("recording"):  # leave nothing running
            self._problems.guard("stopping the recording", self._session.close, "running")

    def _start(self) -> None:
        self._session = Session(self._config, self._problems)
        atexit.register(self._close)
        if "multiprocessing.util" in sys.modules:
            # Forked children end without running what atexit holds.
            from multiprocessing.util import Finalize

            Finalize(None, self._close, exitpriority=100)

    def _close(self) -> None:
        if self._session is not None:
            self._problems.guard("the collector's end", self._session.close, outcome())

    def _forked(self) -> None:
        session, self._session = self._session, None
        self._problems = Problems()
        self._depth = threading.local()
        if session is not None:
            self._problems.guard("leaving a forked process alone", session.forget)


def note_failure(folder: Path, failure: str) -> None:
    """Leave a line for ``perfscope run`` to show, where there is no metadata to hold it."""
    with suppress(OSError), (folder / BOOTSTRAP_FOLDER / FAILURES_FILE).open("a", encoding="utf-8") as file:
        file.write(failure + "\n")


def outcome() -> str:
    """How the process is ending, asked at its end: ``finished`` or ``exception``."""
    error = sys.exc_info()[1]
    if error is None:
        error = getattr(sys, "last_value", None)
    if isinstance(error, SystemExit):
        return "finished" if error.code in (None, 0) else "exception"
    return "finished" if error is None else "exception"


_attached: list[Collector] = []
"""This process's collector; empty outside ``perfscope run``."""


def attach(config: CollectorConfig) -> Collector:
    """Make this process's collector. Called once, when torch has been imported under ``perfscope run``."""
    _attached[:] = [Collector(config)]
    return _attached[0]


def attached() -> Collector | None:
    """This process's collector; None outside ``perfscope run``."""
    return _attached[0] if _attached else None


def step() -> None:
    """Tell PerfScope that a training step has ended.

    Only for loops whose steps it cannot find from their optimizers; once called, calls alone count. Outside
    ``perfscope run`` it does nothing.
    """
    for collector in _attached:
        collector.tell(Session.explicitly_stepped)
