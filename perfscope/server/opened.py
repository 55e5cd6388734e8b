"""Analyses of the recordings that were asked about, kept between calls as long as their files stay as they are."""

from __future__ import annotations

import contextvars
import dataclasses
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from perfscope.errors import UnusableInput
from perfscope.results.anonymous import anonymous
from perfscope.results.file import load_summary
from perfscope.results.summary import Summary
from perfscope.server.folder import Recording, files_of

if TYPE_CHECKING:
    from perfscope.analyzers.read_ranks import Progress
    from perfscope.analyzers.whatif.change import Context

Value = TypeVar("Value")

_SUMMARIES: Final = 32
_REPLAYS: Final = 2
"""A replay holds every op of every rank: of 1,024 ranks a GB."""

PROGRESS: Final[contextvars.ContextVar[Progress | None]] = contextvars.ContextVar("progress", default=None)
"""What the call that runs is to be told of files read."""


class Kept(Generic[Value]):
    """The values that were asked for last, at most ``most``. Two calls that ask for one value make it once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._look = threading.Lock()
        self._work = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of ``key``, made where it is not kept. What ``make`` raises is not kept."""
        known = self._known(key)
        if known is None:
            with self._work:  # one after the other: each may need all cores and much memory
                known = self._known(key)
                if known is None:
                    known = make()
                    self._keep(key, known)
        return known

    def _known(self, key: Hashable) -> Value | None:
        with self._look:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def _keep(self, key: Hashable, value: Value) -> None:
        with self._look:
            self._values[key] = value
            while len(self._values) > self._most:
                self._values.popitem(last=False)


class Analyses:
    """Summaries and replays of recordings. ``workers`` bounds the processes that read traces."""

    def __init__(self, *, anonymize: bool = False, workers: int | None = None) -> None:
        self._anonymize, self._workers = anonymize, workers
        self._summaries: Kept[Summary] = Kept(_SUMMARIES)
        self._contexts: Kept[Context] = Kept(_REPLAYS)

    def summary(self, recording: Recording, capture: int | None = None) -> Summary:
        """The analysis of a recording. Raises UnusableInput where it cannot be analyzed."""
        key = (recording.name, capture, state_of(recording))
        return self._summaries.get(key, lambda: self._analyzed(recording, capture))

    def context(self, recording: Recording, capture: int | None = None) -> Context:
        """The replay of a recording, for what-ifs. Raises UnusableInput where it cannot be replayed."""
        if recording.is_summary:
            raise UnusableInput(f"{recording.name}: is a result, and what-ifs replay traces; name the recording itself")
        from perfscope.analyzers.whatif.whatif import context_of

        key = (recording.name, capture, state_of(recording))
        return self._contexts.get(
            key, lambda: context_of(recording.path, capture=capture, workers=self._workers)
        )  # fmt: skip

    def _analyzed(self, recording: Recording, capture: int | None) -> Summary:
        from perfscope.analyzers.analyze import analyze

        if recording.is_summary:
            if capture is not None:
                raise UnusableInput(f"{recording.name}: is the result of one capture; ask without capture")
            summary = load_summary(recording.path)
        else:
            summary = analyze(recording.path, capture=capture, workers=self._workers, progress=PROGRESS.get())
        if self._anonymize:
            summary = anonymous(summary)
        return dataclasses.replace(summary, source=recording.name)


def state_of(recording: Recording) -> str:
    """What changes when a file of the recording does: its files' names, sizes and times of change."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(files_of(recording.path)):
        try:
            stat = path.stat()
        except OSError:  # being renamed at this moment
            continue
        digest.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()
