"""One capture: the profiler over a stretch of consecutive steps, with ranges, into one trace file."""

from __future__ import annotations

import gc
import importlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from perfscope.collectors.annotate import Annotator
from perfscope.collectors.capture import cupti
from perfscope.collectors.capture.execution_trace import ExecutionTraceRecorder
from perfscope.collectors.config import CollectorConfig
from perfscope.collectors.cpu import StepTimes
from perfscope.collectors.describe.flops import FlopCount
from perfscope.collectors.device import DeviceProbe, device_types, devices
from perfscope.collectors.discovery import JobObjects, subclasses
from perfscope.collectors.patches import Patches
from perfscope.collectors.problems import Problems
from perfscope.collectors.ranges.gc_ranges import GcRanges
from perfscope.collectors.ranges.ranges import Ranges
from perfscope.recording.paths import execution_trace_in_progress
from perfscope.recording.vocabulary import BACKWARD

_WITHOUT_USDT: Final = "6"
"""Kineto's log level above that of its lines "USDT: … profiler_start", the highest; it reads the level once."""
_EXECUTION_TRACE: Final = "recording the execution trace"


class RankCapture:
    """The profiler from its warm-up to the end of its last step. Use once."""

    def __init__(
        self,
        config: CollectorConfig,
        first: int,
        rank: int,
        ranges: Ranges,
        annotator: Annotator,
        problems: Problems,
        yield_first: Callable[[], None],
    ) -> None:
        self.first = first
        """Number of the first warm-up step."""
        self.completed = 0
        """Steps completed since, warm-up included."""
        self.last = False
        """No other capture is planned."""
        self.backwards = 0
        """Calls of ``backward`` in those steps."""
        self.flops: float | None = None
        """Floating-point operations of one step, where they were counted."""
        self.times = StepTimes()
        """CPU time of the recorded steps."""
        self._config = config
        self._rank = rank
        self._ranges = ranges
        self._annotator = annotator
        self._problems = problems
        self._gc_ranges = GcRanges(annotator, problems)
        self._foreign = ForeignStart(yield_first)
        self.execution: ExecutionTraceRecorder | None = None
        """Of the recorded steps, where it is wanted."""
        if config.execution_trace:
            self.execution = ExecutionTraceRecorder(execution_trace_in_progress(config.folder, rank, first))
        self._flop_count: FlopCount | None = None
        self._profiler: Any = None
        self._kept: Any = None
        """The profiler once it has stopped, until its trace is written."""
        self._probe: DeviceProbe | None = None

    @property
    def first_active(self) -> int:
        """Number of the first recorded step, after the warm-up."""
        return self.first + self._config.warmup

    @property
    def active_completed(self) -> int:
        """Recorded steps that are complete so far."""
        return max(self.completed - self._config.warmup, 0)

    @property
    def warmup(self) -> int:
        """Steps before the recorded ones."""
        return self._config.warmup

    @property
    def full(self) -> bool:
        """Are all planned steps there?"""
        return self.active_completed >= self._config.active

    def start(self, objects: JobObjects) -> None:
        """Start the warm-up at the boundary before step ``first``. Raises whatever the profiler raises."""
        self._probe = DeviceProbe(devices(objects.roots))
        self._profiler = self._make_profiler(objects)
        self._foreign.install()
        self._ranges.install(objects.to_hook())
        try:
            if self._config.count_flops:
                self._flop_count = self._problems.guard("counting operations", FlopCount.begin, objects)
            with self._operating(), _quiet_kineto():
                self._profiler.__enter__()
        except BaseException:
            self._release()
            raise
        self._gc_ranges.install()
        self._annotator.step(self.first)
        self._begin_execution_trace()
        self._count_cpu()

    def step(self) -> bool:
        """A step has been completed. True when it was the last one: the capture then waits for :meth:`cut`."""
        self.completed += 1
        self.backwards = self._ranges.calls[BACKWARD]
        self._problems.guard("counting CPU time", self.times.step_ended)
        self._end_flop_count()
        if self.full:
            return True
        with self._operating():
            self._profiler.step()
        self._begin_execution_trace()
        self._annotator.step(self.first + self.completed)
        self._count_cpu()
        return False

    def stop(self) -> None:
        """Stop, at a step's end or in the middle of one, and keep what was recorded in memory."""
        kept = self._profiler
        self.discard()
        self._kept = kept

    def cut(self, export: Callable[[Callable[[str], object]], str]) -> str:
        """Stop unless stopped, and have ``export`` write the trace; the file's name."""
        if self._kept is None:
            self.stop()
        kept, self._kept = self._kept, None
        return export(kept.export_chrome_trace)

    def can_stop(self) -> bool:
        """At the end of the job: will stopping return, or wait for a device that never finishes? Ask once."""
        return self._probe is not None and self._probe.idle()

    def abandon(self) -> None:
        """Leave the training as it was, but the profiler running: stopping it would not return."""
        self._profiler = None
        self._release()

    def forget(self) -> None:
        """In a forked child, where the profiler's threads do not exist: put everything back and record nothing.

        The child's copy of the profiler would otherwise keep every operator of a data loader's worker in memory. A
        child that trains itself needs ``end_inherited`` besides.
        """
        autograd: Any = importlib.import_module("torch.autograd")
        copied = getattr(self._profiler, "profiler", None)
        if copied is not None:
            copied.entered = False  # or it would be taken for one of the script's own
        self._profiler = None
        if self.execution is not None:
            self.execution.forget()
        self._gc_ranges.remove()
        self._ranges.forget()
        self._foreign.remove()
        autograd._enable_record_function(False)

    def discard(self) -> None:
        """Stop; what was recorded stays unwritten."""
        self._gc_ranges.remove()  # first: the profiler's own collections while it stops are none of the training's
        profiler, self._profiler = self._profiler, None
        if self.execution is not None:
            self._problems.guard(_EXECUTION_TRACE, self.execution.end)
        try:
            if profiler is not None:
                # Before what takes time: the last step ends here, and how long stopping takes is not in it.
                self._problems.guard("ending the last step", _end_step, profiler)
                self._problems.guard("ending open ranges", _end_open_ranges)
                with self._operating(), cupti.stopping(last=self.last):
                    profiler.__exit__(None, None, None)
        finally:
            self._release()

    def _begin_execution_trace(self) -> None:
        # One step early, as the profiler: the recorded steps are in it whole.
        if self.execution is not None and self.completed >= self._config.warmup - 1:
            self._problems.guard(_EXECUTION_TRACE, self.execution.begin)

    def _count_cpu(self) -> None:
        if self.completed == self._config.warmup:
            self._problems.guard("counting CPU time", self.times.begin)

    def _end_flop_count(self) -> None:
        if self._flop_count is not None:
            self.flops = self._problems.guard("counting operations", self._flop_count.end)
            self._flop_count = None

    def _release(self) -> None:
        """Leave the training as it was."""
        self._end_flop_count()
        self._annotator.step(None)
        self._gc_ranges.remove()
        self._ranges.remove()
        self._foreign.remove()

    @contextmanager
    def _operating(self) -> Iterator[None]:
        """The profiler that starts or stops now is ours."""
        self._foreign.ours = True
        try:
            yield
        finally:
            self._foreign.ours = False

    def _make_profiler(self, objects: JobObjects) -> Any:
        from torch.profiler import ProfilerAction, ProfilerActivity, profile, supported_activities

        supported: set[ProfilerActivity] = supported_activities()  # type: ignore[no-untyped-call]
        activities = [ProfilerActivity.CPU]
        for kind in device_types(objects.roots):
            activity = getattr(ProfilerActivity, kind.upper(), None)
            if activity is not None and activity in supported:
                activities.append(activity)
        warmup, active = self._config.warmup, self._config.active
        # The profiler asks for step 0 when it is made and knows its real number only afterwards.
        made_at = self.first

        def schedule(step: int) -> ProfilerAction:
            done = step + made_at - self.first
            # The last warm-up step is recorded too: ranks start recording at slightly different moments, and this step,
            # which is no recorded one, lets them all begin the first of those together.
            if done < warmup - 1:
                return ProfilerAction.WARMUP
            return ProfilerAction.RECORD if done < warmup + active - 1 else ProfilerAction.RECORD_AND_SAVE

        profiler = profile(
            activities=activities,
            schedule=schedule,
            record_shapes=self._config.shapes,
            profile_memory=self._config.memory,
            with_stack=self._config.stacks,
        )
        profiler.step_num = self.first
        made_at = 0
        # While a trace is being recorded is the only time when metadata reach it; this does it at the right moment.
        profiler.preset_metadata_json("perfscope", json.dumps({"rank": self._rank, "first_step": self.first_active}))
        return profiler


class ForeignStart:
    """While installed, calls ``yield_first`` before any profiler but ours prepares or starts."""

    def __init__(self, yield_first: Callable[[], None]) -> None:
        self._yield_first = yield_first
        self._patches = Patches()
        self.ours = False
        """True while this project itself operates its profiler."""

    def install(self) -> None:
        """Begin to watch."""
        from torch.autograd import profiler

        for name in ("_prepare_profiler", "_enable_profiler"):
            self._patches.set(profiler, name, self._watched(vars(profiler)[name]))

    def remove(self) -> None:
        """Stop watching and put everything back."""
        self._patches.restore()

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self.ours:
                self._yield_first()
            return original(*args, **kwargs)

        return watched


def _end_step(profiler: Any) -> None:
    """End the range of the profiler's current step. The profiler ends it once more as it stops, which does nothing."""
    step = getattr(profiler, "step_rec_fn", None)
    if step is not None:
        step.__exit__(None, None, None)


def _end_open_ranges() -> None:
    """End the ranges that are open: to the profiler they end here, and their own end does nothing any more.

    A range that began under a profiler writes its end into that profiler's memory. Once it has stopped the memory is
    free, and torch looks no further than whether any profiler runs: if the next one runs, the heap is damaged. Ranges
    of other threads have no part in this.
    """
    from torch.autograd.profiler import record_function

    # By type: an isinstance() may run code of the object's own. A job has millions of objects, and few types of ranges.
    kinds = set(subclasses(record_function))
    for each in [thing for thing in gc.get_objects() if type(thing) in kinds]:
        if getattr(each, "record", None) is not None:
            record_function.__exit__(each, None, None, None)


@contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Keep what Kineto writes at the profiler's every start and stop out of the script's output, unless a level was
    chosen. Its errors, which have a lower level, go with it: ``perfscope doctor`` shows them.
    """
    if "KINETO_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["KINETO_LOG_LEVEL"] = _WITHOUT_USDT
    try:
        yield
    finally:
        os.environ.pop("KINETO_LOG_LEVEL", None)


def end_inherited() -> None:
    """In a forked child that trains: end the copy of its parent's profiler, or none of its own could start.

    Left alone where the parent used a device: the child cannot, and no profiler of devices ends in a copy of a process.
    """
    torch: Any = importlib.import_module("torch")
    if not torch.cuda._is_in_bad_fork():
        if torch.autograd._profiler_enabled():
            _end_open_ranges()
            with _quiet_kineto():
                torch.autograd._disable_profiler()
        torch.autograd._enable_record_function(True)
