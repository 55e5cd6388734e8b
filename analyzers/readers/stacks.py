"""Stacks of a process's threads as text: what ``faulthandler`` and ``py-spy dump`` write."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from perfscope.analyzers.readers import sources
from perfscope.analyzers.readers.flight import MAX_FRAMES, Frame
from perfscope.frozen import dataclass
from perfscope.typed import clean

_MAX_BYTES: Final = 4 << 20
_THREAD: Final = re.compile(
    r"^(?:Current thread|Thread) (?P<id>(?:0x)?[0-9a-fA-F]+)(?: \[(?P<title>[^\]]*)\])?(?P<rest>.*)$"
)
_FAULTHANDLER_CALL: Final = re.compile(r'^\s+File "(?P<file>[^"]*)", line (?P<line>\d{1,9}) in (?P<function>.*)$')
_PY_SPY_CALL: Final = re.compile(r"^\s+(?P<function>.+?) \((?P<file>[^()]*?):(?P<line>\d{1,9})\)\s*$")
_UNCAUGHT: Final = re.compile(r"^Uncaught (\w+)$", re.MULTILINE)
"""What PerfScope's collector writes before the stack of an exception."""
_LIBRARY: Final = re.compile(
    r"site-packages|dist-packages|[/\\]lib[/\\]python\d|(?:^|[/\\])torch[/\\]|[/\\]torchinductor_|^<|perfscope[/\\]collectors"
)


@dataclass(frozen=True)
class ThreadStack:
    """One thread: ``calls`` are innermost first."""

    name: str
    calls: tuple[Frame, ...]


def read(path: Path) -> tuple[ThreadStack, ...]:
    """The threads in a file. Of several dumps after each other the last one. Raises TraceError as ``opened`` does."""
    return parse(clean(sources.read_head(path, _MAX_BYTES).decode("utf-8", "replace")))


def read_uncaught(path: Path) -> tuple[str, tuple[Frame, ...]]:
    """The class of the exception that ended the process, and the calls at which it was raised, innermost first; an
    empty name where the file holds none. Raises TraceError as ``opened`` does.
    """
    text = clean(sources.read_head(path, _MAX_BYTES).decode("utf-8", "replace"))
    found = _UNCAUGHT.search(text)
    thread = main_thread(parse(text[found.end() :])) if found else None
    return (found[1] if found else ""), (thread.calls if thread is not None else ())


def parse(text: str) -> tuple[ThreadStack, ...]:
    """The threads in a text, with their calls; other lines are left out."""
    threads: dict[str, ThreadStack] = {}
    current = ""
    for line in text.splitlines():
        begins = _THREAD.match(line)
        call = _FAULTHANDLER_CALL.match(line) or _PY_SPY_CALL.match(line)
        if begins:
            current = begins["id"]
            quoted = re.search(r'"([^"]*)"', begins["rest"])
            threads.pop(current, None)  # a later dump of the same thread
            threads[current] = ThreadStack(begins["title"] or (quoted[1] if quoted else ""), ())
        elif call and current and len(threads[current].calls) < MAX_FRAMES:
            frame = Frame(call["file"], int(call["line"]), call["function"])
            threads[current] = ThreadStack(threads[current].name, (*threads[current].calls, frame))
    return tuple(thread for thread in threads.values() if thread.calls)


def main_thread(threads: tuple[ThreadStack, ...]) -> ThreadStack | None:
    """The thread that runs the script: the one named so, else the one whose outermost call is a module's."""
    named = [thread for thread in threads if thread.name == "MainThread"]
    modules = [thread for thread in threads if thread.calls[-1].function in ("<module>", "_run_module_as_main")]
    return next(iter((*named, *modules[::-1], *threads[::-1])), None)


def user_call(calls: tuple[Frame, ...]) -> Frame | None:
    """The innermost call in the user's own code, else the innermost of all; None without calls."""
    return next((call for call in calls if not is_library(call)), calls[0] if calls else None)


def is_library(call: Frame) -> bool:
    """Is a call in Python's, torch's or another installed package's code?"""
    return _LIBRARY.search(call.file) is not None
