"""Processes that are forked for one piece of work; the caller's own works beside them.

A forked process has all that its caller has imported, and shares the memory that neither of them changes. Whichever
process is done with an item takes the next one itself: their numbers lie in a pipe. So nobody hands out work, nobody
waits while there is some, and the caller needs no thread that receives results.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from struct import Struct
from typing import Any, Final, Generic, NoReturn

from perfscope.errors import TooLittleMemory
from perfscope.execution.outcome import Item, Outcome, Result, describe
from perfscope.frozen import dataclass

_NUMBER: Final = Struct("<I")
_HEAD: Final = Struct("<IQ")
"""An item's number, and how many bytes of its outcome follow."""
_PROTOCOL: Final = 4
"""Of later protocols an array comes as one more object, which takes more memory than most arrays have."""
_MOST_NUMBERS: Final = 1000
"""Every system's pipes hold them at once; one number stands for several of more items."""


def is_possible() -> bool:
    """May this process be forked? Not where another of its threads may hold a lock, and not on Windows."""
    return hasattr(os, "fork") and threading.active_count() == 1


class Forked:
    """So many forked processes beside the caller's own."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end: the processes end with the work that they were forked for."""

    def outcomes(
        self,
        function: Callable[[Item], Result],
        items: Sequence[Item],
        meanwhile: Callable[[], None] | None,
        suspects: list[Item],
    ) -> Iterator[Outcome[Item, Result]]:
        """Outcomes as they are done, in any order.

        ``meanwhile`` is called once, when the last item is taken: the caller may be the first to be done, and no longer
        needs the memory that an item takes.

        ``suspects`` gets the items without an outcome: their process died, or memory was too little beside others.
        """
        left = dict(enumerate(items))
        work = _SharedWork(function, items, _numbered(len(items)))
        others: list[_Other] = []
        try:
            with suppress(OSError), _shared_memory():  # an error is a limit on processes: those that there are suffice
                while len(others) < min(self.workers, len(items)):
                    others.append(work.forked())
            for number in work.taken():
                done = work.attempted(number)
                if done is not None:
                    yield Outcome(left.pop(number), *done)
                for number, done in _arrived(others, wait=False):
                    yield Outcome(left.pop(number), *done)
            if meanwhile is not None:
                meanwhile()
            for number, done in _arrived(others, wait=True):
                yield Outcome(left.pop(number), *done)
        finally:
            for other in others:
                other.end()
            os.close(work.numbers)
        suspects.extend(left.values())


@contextmanager
def _shared_memory() -> Iterator[None]:
    """Looking for cycles writes to every object, and so to a copy of its own of what the processes share: those forked
    meanwhile leave out what there is now.
    """
    was_frozen = gc.get_freeze_count() > 0
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()


_Done = tuple[Any, str | None]
"""A result, or an error."""


def _numbered(count: int) -> int:
    """A pipe with the number of every item, or of every so many items."""
    numbers, writing = os.pipe()
    os.write(writing, b"".join(map(_NUMBER.pack, range(0, count, _at_once(count)))))
    os.close(writing)
    return numbers


def _at_once(count: int) -> int:
    return -(-count // _MOST_NUMBERS)


@dataclass(frozen=True, eq=False)
class _SharedWork(Generic[Item, Result]):
    function: Callable[[Item], Result]
    items: Sequence[Item]
    numbers: int
    """The pipe with numbers of items."""

    def taken(self) -> Iterator[int]:
        """Numbers of items that no other process takes, until there are none left."""
        count = len(self.items)
        while taken := os.read(self.numbers, _NUMBER.size):
            (first,) = _NUMBER.unpack(taken)
            yield from range(first, min(first + _at_once(count), count))

    def attempted(self, number: int) -> _Done | None:
        """What comes of an item; None where it lacks memory beside others."""
        try:
            return self.function(self.items[number]), None
        except TooLittleMemory:
            return None
        except Exception as error:
            return None, describe(error)

    def forked(self) -> _Other:
        """Start another process that takes items."""
        receiving, sending = os.pipe()
        watched, held = os.pipe()
        try:
            process = os.fork()
        except OSError:
            for end in (receiving, sending, watched, held):
                os.close(end)
            raise
        if process:
            os.close(sending)
            os.close(watched)
            return _Other(process, receiving, held)
        try:
            os.close(receiving)
            os.close(held)
            self._run(sending, watched)
        finally:
            os._exit(1)

    def _run(self, sending: int, watched: int) -> NoReturn:
        """In the other process: take items, send what comes of them, and end."""
        threading.Thread(target=_end_with, args=(watched,), daemon=True).start()
        outcomes: SimpleQueue[bytes | None] = SimpleQueue()
        sender = threading.Thread(target=_send, args=(outcomes, sending), daemon=True)
        sender.start()
        for number in self.taken():
            done = self.attempted(number)
            if done is not None:
                outcomes.put(_packed(number, done))
        outcomes.put(None)
        sender.join()
        os._exit(0)


def _packed(number: int, done: _Done) -> bytes:
    try:
        body = pickle.dumps(done, protocol=_PROTOCOL)
    except Exception as error:
        body = pickle.dumps((None, describe(error)), protocol=_PROTOCOL)
    return _HEAD.pack(number, len(body)) + body


def _send(outcomes: SimpleQueue[bytes | None], sending: int) -> None:
    """Send what is there while the next item is worked on: the caller may take it only after one of its own."""
    with suppress(BrokenPipeError), open(sending, "wb", buffering=0) as pipe:
        while (outcome := outcomes.get()) is not None:
            view = memoryview(outcome)
            while view:
                view = view[pipe.write(view) :]


def _end_with(watched: int) -> None:
    """End when the caller's process is gone, which cannot end the others where it is killed."""
    os.read(watched, 1)
    os._exit(1)


class _Other:
    """Another process, as its caller sees it."""

    def __init__(self, process: int, receiving: int, held: int) -> None:
        self.receiving = receiving
        self.has_ended = False
        self._process = process
        self._held = held
        """What the process watches: closed when the caller ends."""

    def received(self) -> tuple[int, _Done] | None:
        """The next item's number and what came of it; None where the process has ended."""
        head = self._exactly(_HEAD.size)
        if head is not None:
            number, length = _HEAD.unpack(head)
            body = self._exactly(length)
            if body is not None:
                return number, pickle.loads(body)  # noqa: S301  # of a process forked here
        self.has_ended = True
        return None

    def _exactly(self, count: int) -> bytearray | None:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            got = os.readv(self.receiving, [view])
            if not got:
                return None
            view = view[got:]
        return data

    def end(self) -> None:
        """End the process, whatever it does, and forget it."""
        if not self.has_ended:
            os.kill(self._process, signal.SIGKILL)
        with suppress(ChildProcessError):  # where the caller's program leaves that to the system
            os.waitpid(self._process, 0)
        os.close(self.receiving)
        os.close(self._held)


def _arrived(others: Sequence[_Other], *, wait: bool) -> Iterator[tuple[int, _Done]]:
    """What the others have sent so far; where ``wait``, until all of them have ended."""
    poll = select.poll()
    running = {other.receiving: other for other in others if not other.has_ended}
    for receiving in running:
        poll.register(receiving, select.POLLIN)
    while running and (ready := poll.poll(None if wait else 0)):
        for receiving, _ in ready:
            received = running[receiving].received()
            if received is not None:
                yield received
            else:
                poll.unregister(receiving)
                del running[receiving]
