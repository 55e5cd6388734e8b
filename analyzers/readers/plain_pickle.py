"""Reads a pickle of plain data, from anybody: there is no opcode here that looks up a class or calls anything.

Numbers, texts, None, lists, tuples and dictionaries with texts or numbers as keys: what torch's flight recorder writes,
and what Python's own pickler makes of the same data. Anything else, and anything beyond the bounds, is a ValueError.
"""

from __future__ import annotations

import struct
from typing import Any, Final

MAX_BYTES: Final = 32 << 20
"""Of a dump; one of 2,000 entries with stacks has 1 to 2 MiB."""
MAX_CONTAINERS: Final = 1_000_000
"""Lists, tuples and dictionaries: they take the most memory for the fewest bytes."""
MAX_DEPTH: Final = 64
"""Containers that are open at once."""

_PROTO, _STOP, _MARK, _FRAME = b"\x80.(\x95"
_GET1, _GET4, _PUT1, _PUT4, _MEMOIZE = b"hjqr\x94"
_INT1, _INT2, _INT4, _LONG1, _FLOAT = b"KMJ\x8aG"
_TEXT1, _TEXT4 = b"\x8cX"
_APPEND, _APPENDS, _SETITEM, _SETITEMS = b"aesu"
_TUPLE, _TUPLE1, _TUPLE2, _TUPLE3 = b"t\x85\x86\x87"
_CONSTANTS: Final = {ord("N"): None, 0x88: True, 0x89: False}
_EMPTY: Final = {ord("]"): list, ord("}"): dict, ord(")"): tuple}


def loads(data: bytes) -> Any:
    """The value that ``data`` is a pickle of. Raises ValueError where it is damaged, too large or not plain data."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES >> 20} MiB")
    try:
        return _Machine(data).run()
    except (IndexError, KeyError, struct.error) as error:
        raise ValueError("damaged or cut short") from error


class _Machine:
    """The pickle machine: a stack of values, the places of its marks, and a memo."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.containers = 0

    def run(self) -> Any:
        """Everything up to STOP. The commonest opcodes come first: this loop takes nearly all of the time."""
        data, stack, memo = self.data, self.stack, self.memo
        while True:
            code = data[self.at]
            self.at += 1
            if code == _GET1:
                stack.append(memo[data[self.at]])
                self.at += 1
            elif code == _PUT1:
                memo[data[self.at]] = stack[-1]
                self.at += 1
            elif code == _INT1:
                stack.append(data[self.at])
                self.at += 1
            elif code == _MARK:
                self._open()
            elif code in _EMPTY:
                self._count()
                stack.append(_EMPTY[code]())
            elif code in _CONSTANTS:
                stack.append(_CONSTANTS[code])
            elif code == _STOP:
                return stack[-1]
            elif not (self._number(code) or self._text(code) or self._memo(code) or self._fill(code)):
                raise ValueError(f"not plain data (opcode 0x{code:02x})")

    def _unpack(self, form: str, size: int) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += size
        return value

    def _take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.data):
            raise IndexError
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def _count(self) -> None:
        self.containers += 1
        if self.containers > MAX_CONTAINERS:
            raise ValueError(f"more than {MAX_CONTAINERS:,} lists and dictionaries")

    def _open(self) -> None:
        self.marks.append(len(self.stack))
        if len(self.marks) > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")

    def _since_mark(self) -> list[Any]:
        mark = self.marks.pop()
        values = self.stack[mark:]
        del self.stack[mark:]
        return values

    def _number(self, code: int) -> bool:
        if code == _INT2:
            self.stack.append(self._unpack("<H", 2))
        elif code == _INT4:
            self.stack.append(self._unpack("<i", 4))
        elif code == _LONG1:
            self.stack.append(int.from_bytes(self._take(self._unpack("<B", 1)), "little", signed=True))
        elif code == _FLOAT:
            self.stack.append(self._unpack(">d", 8))
        else:
            return False
        return True

    def _text(self, code: int) -> bool:
        if code not in (_TEXT1, _TEXT4):
            return False
        size = self._unpack("<B", 1) if code == _TEXT1 else self._unpack("<I", 4)
        self.stack.append(self._take(size).decode("utf-8", "replace"))
        return True

    def _memo(self, code: int) -> bool:
        """The memo is a dictionary: an index from the file decides about no memory."""
        if code == _GET4:
            self.stack.append(self.memo[self._unpack("<I", 4)])
        elif code == _PUT4:
            self.memo[self._unpack("<I", 4)] = self.stack[-1]
        elif code == _MEMOIZE:
            self.memo[len(self.memo)] = self.stack[-1]
        elif code == _PROTO:
            self.at += 1
        elif code == _FRAME:
            self.at += 8
        else:
            return False
        return True

    def _fill(self, code: int) -> bool:
        """Put values into the container below them, or make a tuple of them."""
        stack = self.stack
        if code == _APPENDS:
            _list(stack, self._since_mark())
        elif code == _SETITEMS:
            _dictionary(stack, self._since_mark())
        elif code == _APPEND:
            _list(stack, [stack.pop()])
        elif code == _SETITEM:
            value = stack.pop()
            _dictionary(stack, [stack.pop(), value])
        elif code == _TUPLE:
            self._tuple(self._since_mark())
        elif code in (_TUPLE1, _TUPLE2, _TUPLE3):
            count = code - _TUPLE1 + 1
            self._tuple([stack.pop() for _ in range(count)][::-1])
        else:
            return False
        return True

    def _tuple(self, values: list[Any]) -> None:
        if any(isinstance(value, (tuple, list, dict)) for value in values):
            raise ValueError("a tuple of containers")
        self._count()
        self.stack.append(tuple(values))


def _list(stack: list[Any], values: list[Any]) -> None:
    if type(stack[-1]) is not list:
        raise ValueError("values for a list, but no list")
    stack[-1].extend(values)


def _dictionary(stack: list[Any], values: list[Any]) -> None:
    target, keys = stack[-1], values[::2]
    if type(target) is not dict or len(values) % 2 or not all(type(key) in (str, int) for key in keys):
        raise ValueError("keys and values for a dictionary, but none, or keys that are neither text nor number")
    target.update(zip(keys, values[1::2], strict=True))
