"""Starts and ends a recording from inside the program. A process records once at a time."""

from __future__ import annotations

import os
import sys
from collections import Counter
from contextlib import ContextDecorator, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Final

from perfscope.collectors.capture.session import VARIABLE_MODULE, Collector, RecordingHooks, attach_within
from perfscope.collectors.config import CollectorConfig
from perfscope.collectors.ending import at_end, exit_code, outcome, program_frame
from perfscope.collectors.hang import watch as hang
from perfscope.collectors.hang.prepare import prepare_late
from perfscope.collectors.identity import identify
from perfscope.collectors.inprocess import late
from perfscope.collectors.inprocess.options import DEFAULT_OUTPUT, Options, configured
from perfscope.collectors.inprocess.place import finish, settle
from perfscope.collectors.launch.bootstrap import MODULE_NAME
from perfscope.collectors.launch.recap import recap_of_rank
from perfscope.collectors.problems import Problems
from perfscope.recording.metadata import WITHOUT_OPTIMIZER

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

NO_STEP: Final = f"nothing was recorded: no optimizer step was completed. {WITHOUT_OPTIMIZER}"


class record(ContextDecorator):  # noqa: N801 - used like a function: with perfscope.record(...)
    """Records the training steps made within, as ``perfscope run`` does: a context manager and a decorator.

    ``output`` is the recording's folder (default ``perfscope-recording``), alike on all ranks; where it holds a
    recording already, a number is put after its name. Nothing is written before the first step. Leaving writes the
    recording, and so does the end of the process. What fails is said on standard error and never raised into the
    training; only options that do not exist or cannot be are, when the object is made (TypeError, ValueError).

    Within another recording, that of ``perfscope run``, of the variable ``PERFSCOPE`` or of an earlier call, this is
    the same recording: it begins, ends and has options as the outer one says.
    """

    def __init__(self, output: str | os.PathLike[str] | None = None, **options: Unpack[Options]) -> None:
        asked = Path(output if output is not None else DEFAULT_OUTPUT).expanduser()
        self.output = Path(os.path.abspath(asked))  # noqa: PTH100  # links stay as the user wrote them
        """The folder that was asked for."""
        self._options = options
        self._config = configured(self.output, options)
        self._recording: _Recording | None = None
        self._ours = False

    @property
    def recording(self) -> bool:
        """Has this object begun a recording that has not ended?"""
        return self._ours

    @property
    def folder(self) -> Path | None:
        """The folder that is recorded into; None before the first step."""
        return None if self._recording is None else self._recording.folder

    def start(self) -> Self:
        """Begin to record, as entering does."""
        self.stop()
        self._recording, self._ours = _begin(self._config, overwrite=self._options.get("overwrite", False))
        return self

    def stop(self) -> Path | None:
        """End the recording, as leaving does, and return its folder. Further calls do nothing."""
        return self._stop("finished")

    def _stop(self, outcome: str) -> Path | None:
        if self._recording is not None and self._ours:
            self._recording.stop(outcome)
        self._ours = False
        return self.folder

    def __enter__(self) -> Self:
        """Begin to record."""
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the recording; an exception goes on."""
        self._stop("finished" if error is None else "exception")

    def _recreate_cm(self) -> Self:
        """For each call of a decorated function one of its own."""
        return type(self)(self.output, **self._options)


class _Recording:
    """One recording of this process: one that it has begun, or another that it is part of."""

    def __init__(self, config: CollectorConfig, *, overwrite: bool = False, folder: Path | None = None) -> None:
        self.asked = config
        self.folder = folder
        """Where it lies; None before the first step."""
        self._overwrite = overwrite
        self._settled: CollectorConfig | None = None
        self._rank = 0
        self._opened = False
        self._program: FrameType | None = None
        self._exit_code: int | None = None
        """Once the process ends, where it is known."""
        self._collector: Collector | None = None
        self._pid = os.getpid()

    def begin(self) -> None:
        """Have the steps counted from now on."""
        self._collector, made = attach_within(self.asked, RecordingHooks(self._prepare, self._ended))
        if made:
            late.hook(self._collector)
        self._end_with_process()

    def stop(self, outcome: str) -> None:
        """Write what there is. Further calls do nothing."""
        collector, self._collector = self._collector, None
        if collector is not None and self._pid == os.getpid():
            collector.stop(outcome)

    def _end_with_process(self) -> None:
        def ends() -> None:
            self._exit_code = exit_code(self._program)
            self.stop(outcome())

        at_end(ends)

    def _prepare(self, config: CollectorConfig) -> CollectorConfig:
        """At the first step, when it is known which rank this process is."""
        self._rank = identify().rank
        self._program = program_frame()
        if self._pid != os.getpid():  # forked since it began
            self._pid = os.getpid()
            self._end_with_process()
        _numbers[config.output] += 1
        name = f"{config.output}/{_numbers[config.output]}"
        config, self._opened = settle(config, name, overwrite=self._overwrite)
        self._settled, self.folder = config, config.folder
        if config.hang_timeout:
            prepare_late(config)
        return config

    def _ended(self, outcome: str) -> None:
        _current[:] = [each for each in _current if each is not self]
        hang.drop()
        config = self._settled
        if config is not None and self._opened:
            with suppress(OSError):
                finish(config.folder, self._exit_code)
        for line in self._lines():
            _say(line)

    def _lines(self) -> list[str]:
        """What one rank says of the recording."""
        config = self._settled
        if config is not None:
            return recap_of_rank(config, self._rank) if config.announce and self._rank == config.first_rank else []
        if not self.asked.announce or identify().rank:
            return []
        return [NO_STEP]


_current: list[_Recording] = []
"""The recording under way; empty without."""

_numbers: Counter[str] = Counter()
"""Recordings that this process has made of each folder's name: all ranks count alike."""

_started: list[record] = []
"""What :func:`start` has started last."""


def start(output: str | os.PathLike[str] | None = None, **options: Unpack[Options]) -> record:
    """Record the training steps from now on, until :func:`stop` or the end of the process.

    Takes the options of :class:`record` and returns one; its ``folder`` is the recording's. Where something is recorded
    already, nothing begins. Raises TypeError or ValueError for an option that does not exist or cannot be, and nothing
    else.
    """
    started = record(output, **options).start()
    if not (_started and _started[-1].recording):
        _started[:] = [started]
    return started


def stop() -> Path | None:
    """End the recording of :func:`start`, and return its folder; None where nothing was recorded."""
    return _started.pop().stop() if _started else None


def start_for_variable(output: str | None, options: Options) -> None:
    """Record the rest of this process, as the variable PERFSCOPE asks. Raises as :class:`record` does."""
    _for_variable.append(record(output, **options).start())


_for_variable: list[record] = []


def _begin(config: CollectorConfig, *, overwrite: bool) -> tuple[_Recording | None, bool]:
    """The recording that this process makes from now on, and whether it was begun here."""
    if (waiting := sys.modules.get(VARIABLE_MODULE)) is not None:
        waiting.attach_waiting()  # what PERFSCOPE asks for is the outer recording
    if (bootstrap := sys.modules.get(MODULE_NAME)) is not None:
        _say_once(config, "perfscope run records this program; what the program starts itself is the same recording")
        return _Recording(config, folder=Path(bootstrap.FOLDER).parent), False
    if _current:
        where = f", into {_current[0].folder}" if _current[0].folder else ""
        _say_once(config, f"a recording is under way{where}; what is started within is the same recording")
        return _current[0], False
    recording = _Recording(config, overwrite=overwrite)
    _current[:] = [recording]
    problems = Problems()
    problems.guard("starting the recording", recording.begin)
    if problems.as_tuple():
        _current.clear()
    return recording, True


def _say_once(config: CollectorConfig, line: str) -> None:
    """One rank says it, unless it is to be quiet."""
    if config.announce and identify().rank == config.first_rank and line not in _said:
        _said.add(line)
        _say(line)


_said: set[str] = set()


def _say(line: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # stderr may be closed or gone
        sys.stderr.write(f"perfscope: {line}\n")
        sys.stderr.flush()
