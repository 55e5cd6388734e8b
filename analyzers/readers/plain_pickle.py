"""Reads a pickle of plain data, from anybody: no class is looked up, nothing is called, and memory is bounded.

Numbers, texts, None, lists, tuples and dictionaries: what torch's flight recorder and its memory snapshots hold, as
torch and Python's own pickler write them. Anything else, and anything beyond the bounds, is a ValueError.

Python's unpickler does the work, which is 15 times as fast as a loop over the opcodes. It gets a copy that holds only
opcodes of this list: none of them looks up a class or calls anything, and none takes memory by a number in the file.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from typing import Any, Final, NamedTuple, NoReturn

MAX_BYTES: Final = 32 << 20
"""Of a dump; one of 2,000 entries with stacks has 1 to 2 MiB."""
MAX_CONTAINERS: Final = 1_000_000
"""Lists, tuples and dictionaries: they take the most memory for the fewest bytes."""
MAX_NOTES: Final = 4_000_000
"""Marks, and places in the memo that are taken one after the other."""


class Bounds(NamedTuple):
    """The most that a pickle may have."""

    size: int = MAX_BYTES
    containers: int = MAX_CONTAINERS
    notes: int = MAX_NOTES


DUMP: Final = Bounds()


_MOST_IN_RUN: Final = 4096
"""The matcher takes memory for each."""
_RUN: Final = re.compile(
    rb"(?:[\]})aesu(N\x88\x89\x94]"  # containers, what goes into them, marks, None, True, False, the next memo place
    rb"|[hqK].|M..|[jJ]....|G.{8}|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8})"  # memo places and numbers
    rb"|r..[\x00-\x0f]\x00"  # a memo place takes memory for all before it: less than a million of them
    rb"){1,%d}" % _MOST_IN_RUN,
    re.DOTALL,
)
"""Opcodes of a fixed length, with what belongs to them."""
_CONTAINERS: Final = b"]})"
_NOTES: Final = b"(\x94"
_TUPLES: Final = b"t\x85\x86\x87"
_STOP, _LONG, _PROTOCOL, _FRAME = b".\x8a\x80\x95"
_SKIPPED: Final = {_PROTOCOL: 2, _FRAME: 9}
"""Left out: opcode -> its length."""
_HEADS: Final = {ord("X"): 5, 0x8C: 2, _LONG: 2}
"""Texts and long numbers: opcode -> its length, with the number of the bytes that follow."""
_CHECKED: Final = b"Q"
"""Hands the value before it to ``persistent_load``."""
_NOT_ASCII: Final = re.compile(rb"[\x80-\xff]")
"""Made question marks in a text that is not UTF-8: as many, so that its length holds."""


def loads(data: bytes, bounds: Bounds = DUMP) -> Any:
    """The value that ``data`` is a pickle of. Raises ValueError where it is damaged, too large or not plain data."""
    if len(data) > bounds.size:
        raise ValueError(f"more than {bounds.size >> 20} MiB")
    try:
        plain = _plain(data, bounds)
        # In one frame: without it, the file's ``read`` is called for each opcode.
        return _Unpickler(io.BytesIO(struct.pack("<BQ", _FRAME, len(plain)) + plain)).load()
    except (pickle.UnpicklingError, EOFError, LookupError, TypeError, AttributeError) as error:
        raise ValueError("damaged or cut short") from error


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        """Called with each tuple, which may be a key: the hash of nested ones needs as much stack as they are deep."""
        if not {tuple, list, dict}.isdisjoint(map(type, pid)):
            raise ValueError("a tuple of containers")
        return pid

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        """Never called: no opcode is left that would."""
        raise ValueError(f"not plain data ({module_name[:100]}.{global_name[:100]})")


def _plain(data: bytes, bounds: Bounds) -> bytes:
    """The opcodes of ``data`` up to STOP, without protocol and frames; after each tuple a look at it.

    Raises ValueError, or IndexError where ``data`` ends before.
    """
    made: list[bytes] = []
    runs: list[bytes] = []
    tuples = at = copied = 0
    while True:
        run = _RUN.match(data, at)
        if run is not None:
            runs.append(run[0])
            at = run.end()
            if len(run[0]) >= _MOST_IN_RUN:
                continue  # it may go on
        code = data[at]
        if code in _TUPLES:
            tuples += 1
            at += 1
            made += (data[copied:at], _CHECKED)
            copied = at
        elif code in _SKIPPED:
            made.append(data[copied:at])
            copied = at = at + _SKIPPED[code]
        elif code == _STOP:
            made.append(data[copied : at + 1])
            break
        else:
            end = _end(data, at, code)
            if code != _LONG and not _is_utf8(data[at + _HEADS[code] : end]):
                made += (data[copied : at + _HEADS[code]], _NOT_ASCII.sub(b"?", data[at + _HEADS[code] : end]))
                copied = end
            at = end
    fixed = b"".join(runs)
    if tuples + _at_most(fixed, _CONTAINERS) > bounds.containers:
        raise ValueError(f"more than {bounds.containers:,} lists and dictionaries")
    if _at_most(fixed, _NOTES) > bounds.notes:
        raise ValueError(f"more than {bounds.notes:,} marks")
    return b"".join(made)


def _end(data: bytes, at: int, code: int) -> int:
    """Where a text or a long number ends that begins at ``at``. Raises ValueError for any other opcode."""
    head = _HEADS.get(code)
    if head is None:
        raise ValueError(f"not plain data (opcode 0x{code:02x})")
    end = at + head + int.from_bytes(data[at + 1 : at + head], "little")
    if end > len(data):
        raise IndexError
    return end


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _at_most(fixed: bytes, opcodes: bytes) -> int:
    """How often ``opcodes`` are there at most: numbers and places of the memo may have the same bytes."""
    return len(fixed) - len(fixed.translate(None, opcodes))
