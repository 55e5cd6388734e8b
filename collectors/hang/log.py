"""The last collectives and messages of this process, where torch's flight recorder does not record them.

gloo's recorder leaves out messages (``send``, ``recv``) and monitored barriers, and older torch records nothing of
gloo. What is noted here costs some tens of microseconds a call, so it is only what torch leaves out.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, deque
from types import CodeType, FrameType
from typing import Any, Final

from perfscope.collectors.identity import identify
from perfscope.collectors.operators import KINDS, Call, ignore, listen
from perfscope.collectors.problems import Problems

ENTRIES: Final = 2000
"""Calls held, as many as torch's recorder holds."""

MOST_OPEN: Final = 32
"""Calls whose end is waited for: each holds its tensors. Older ones count as ended."""

DEPTH: Final = 24
"""Frames of a call's stack."""

LEFT_OUT_BY_GLOO: Final = ("send", "recv_", "recv_any_source_", "monitored_barrier_")
RECORDING: Final = ("nccl", "xccl")
"""Backends whose recorder leaves nothing out."""


class Entry:
    """One call."""

    __slots__ = (
        "call", "count", "done", "frames", "group", "inputs", "outputs", "peer", "rank", "thread", "time_ns", "work",
    )  # fmt: skip

    def __init__(self, call: Call, arguments: tuple[Any, ...]) -> None:
        group = call.group(arguments)
        self.call = call
        self.group: tuple[str, str] = (str(group.group_name), str(getattr(group, "group_desc", "")))
        self.rank = int(group.rank())
        """In the group, as ``peer`` is."""
        self.peer = call.peer(arguments)
        self.inputs = [(tuple(tensor.shape), tensor.dtype) for tensor in call.inputs(arguments)]
        self.outputs = [(tuple(tensor.shape), tensor.dtype) for tensor in call.outputs(arguments)]
        self.time_ns = time.time_ns()
        self.thread = threading.get_ident()
        self.frames = _stack(sys._getframe(4))
        self.count = 0
        """Its number: of a message in its direction between these two, of a collective in its group; from 1."""
        self.work: Any = None
        self.done = False


class CollectiveLog:
    """The calls of one process, oldest first."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._entries: deque[Entry] = deque(maxlen=ENTRIES)
        self._open: deque[Entry] = deque()
        self._counts: Counter[Any] = Counter()
        self._lock = threading.Lock()
        self.complete = False
        """Does it note every collective?"""

    def install(self) -> None:
        """Begin, as soon as there is a process group: nothing is being called yet."""
        backend = identify().backend
        if backend in RECORDING:
            return
        recorder = hasattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace")
        self.complete = not (backend == "gloo" and recorder)
        listen(self, tuple(KINDS) if self.complete else LEFT_OUT_BY_GLOO)

    def forget(self) -> None:
        """In a forked child."""
        self._entries.clear()
        self._open.clear()
        ignore(self)

    def entries(self) -> list[Entry]:
        """The calls so far, each with whether it has ended."""
        with self._lock:
            self._close_ended()
            return list(self._entries)

    def begins(self, call: Call, arguments: tuple[Any, ...]) -> Any:
        """Note a call."""
        return self._problems.guard("noting messages", self._begin, call, arguments)

    def ended(self, begun: Any, result: Any) -> None:
        """The call is over; what it began may go on."""
        self._problems.guard("noting messages", self._ended, begun, result)

    def _begin(self, call: Call, arguments: tuple[Any, ...]) -> Entry:
        entry = Entry(call, arguments)
        channel = (entry.group[0], call.kind if call.is_message else "", entry.peer)
        with self._lock:
            self._counts[channel] += 1
            entry.count = self._counts[channel]
            self._close_ended()
            self._entries.append(entry)
        return entry

    def _ended(self, entry: Entry, result: Any) -> None:
        from torch.distributed import Work

        boxed = result[-1] if isinstance(result, tuple) else result
        if boxed is None:
            entry.done = True
            return
        entry.work = boxed if isinstance(boxed, Work) else Work.unbox(boxed)
        with self._lock:
            self._open.append(entry)

    def _close_ended(self) -> None:
        still = [entry for entry in self._open if not entry.work.is_completed()]
        kept = still[-MOST_OPEN:]
        for entry in self._open:
            if entry not in kept:
                entry.done, entry.work = True, None
        self._open = deque(kept)


def _stack(frame: FrameType | None) -> list[tuple[CodeType, int]]:
    """Code and line of each caller, innermost first."""
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < DEPTH:
        found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return found
