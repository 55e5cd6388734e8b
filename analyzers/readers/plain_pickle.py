"""Reads a pickle of plain data, from anybody: there is no opcode here that looks up a class or calls anything.

Numbers, texts, None, lists, tuples and dictionaries with texts or numbers as keys: what torch's flight recorder writes,
and what Python's own pickler makes of the same data. Anything else, and anything beyond the bounds, is a ValueError.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

MAX_BYTES: Final = 32 << 20
"""Of a dump; one of 2,000 entries with stacks has 1 to 2 MiB."""
MAX_CONTAINERS: Final = 1_000_000
"""Lists, tuples and dictionaries: they take the most memory for the fewest bytes."""
MAX_DEPTH: Final = 64
"""Containers that are open at once."""

_GET1, _GET4, _PUT1, _PUT4, _INT1, _TEXT4, _STOP, _MARK, _DICT, _SETITEMS = b"hjqrKX.(}u"
_KEYS: Final = frozenset({str, int})
_UINT2: Final = struct.Struct("<H")
_INT4: Final = struct.Struct("<i")
_UINT4: Final = struct.Struct("<I")
_DOUBLE: Final = struct.Struct(">d")


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
        """A dictionary: an index from the file decides about no memory."""
        self.containers = 0
        self.opcodes: Final[dict[int, Callable[[], None]]] = {
            ord("("): self._mark,
            ord("]"): self._list,
            ord("}"): self._dictionary,
            ord(")"): lambda: self._tuple([]),
            ord("e"): lambda: self._append(self._since_mark()),
            ord("u"): lambda: self._set(self._since_mark()),
            ord("a"): lambda: self._append([self.stack.pop()]),
            ord("s"): lambda: self._set([self.stack.pop(), self.stack.pop()][::-1]),
            ord("t"): lambda: self._tuple(self._since_mark()),
            0x85: lambda: self._tuple([self.stack.pop()]),
            0x86: lambda: self._tuple([self.stack.pop() for _ in range(2)][::-1]),
            0x87: lambda: self._tuple([self.stack.pop() for _ in range(3)][::-1]),
            ord("N"): lambda: self.stack.append(None),
            0x88: lambda: self.stack.append(True),
            0x89: lambda: self.stack.append(False),
            ord("M"): lambda: self._number(_UINT2),
            ord("J"): lambda: self._number(_INT4),
            ord("G"): lambda: self._number(_DOUBLE),
            0x8A: self._long,
            0x8C: self._short_text,
            0x94: self._memoize,
            0x80: lambda: self._skip(1),  # the protocol's number
            0x95: lambda: self._skip(8),  # a frame's size
        }

    def run(self) -> Any:  # noqa: C901  # a call for each opcode would double the time
        """Everything up to STOP. The commonest opcodes are done here: this loop takes nearly all of the time."""
        data, stack, memo, marks, uint4 = self.data, self.stack, self.memo, self.marks, _UINT4.unpack_from
        at = 0
        while True:
            code = data[at]
            at += 1
            if code == _GET1:
                stack.append(memo[data[at]])
                at += 1
            elif code == _GET4:
                stack.append(memo[uint4(data, at)[0]])
                at += 4
            elif code == _PUT1:
                memo[data[at]] = stack[-1]
                at += 1
            elif code == _PUT4:
                memo[uint4(data, at)[0]] = stack[-1]
                at += 4
            elif code == _INT1:
                stack.append(data[at])
                at += 1
            elif code == _TEXT4:
                end = at + 4 + uint4(data, at)[0]
                stack.append(data[at + 4 : end].decode("utf-8", "replace"))
                at = end  # beyond the end of the data, the next opcode is not there
            elif code == _MARK:
                marks.append(len(stack))
                if len(marks) > MAX_DEPTH:
                    raise ValueError(f"nested more than {MAX_DEPTH} deep")
            elif code == _DICT:
                self._push({})
            elif code == _SETITEMS:
                mark = marks.pop()
                values = stack[mark:]
                del stack[mark:]
                self._set(values)
            elif code == _STOP:
                return stack[-1]
            else:
                at = self._rarer(code, at)

    def _rarer(self, code: int, at: int) -> int:
        """Any other opcode; returns the place after it."""
        do = self.opcodes.get(code)
        if do is None:
            raise ValueError(f"not plain data (opcode 0x{code:02x})")
        self.at = at
        do()
        return self.at

    def _skip(self, size: int) -> None:
        self.at += size

    def _number(self, form: struct.Struct) -> None:
        self.stack.append(form.unpack_from(self.data, self.at)[0])
        self.at += form.size

    def _bytes(self) -> bytes:
        """Those after one byte that has their number."""
        start = self.at + 1
        self.at = start + self.data[self.at]
        return self.data[start : self.at]

    def _long(self) -> None:
        self.stack.append(int.from_bytes(self._bytes(), "little", signed=True))

    def _short_text(self) -> None:
        self.stack.append(self._bytes().decode("utf-8", "replace"))

    def _memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def _mark(self) -> None:
        self.marks.append(len(self.stack))
        if len(self.marks) > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")

    def _since_mark(self) -> list[Any]:
        mark = self.marks.pop()
        values = self.stack[mark:]
        del self.stack[mark:]
        return values

    def _push(self, container: list[Any] | dict[Any, Any] | tuple[Any, ...]) -> None:
        self.containers += 1
        if self.containers > MAX_CONTAINERS:
            raise ValueError(f"more than {MAX_CONTAINERS:,} lists and dictionaries")
        self.stack.append(container)

    def _list(self) -> None:
        self._push([])

    def _dictionary(self) -> None:
        self._push({})

    def _tuple(self, values: list[Any]) -> None:
        # Nested ones could be keys of dictionaries, whose hash needs as much stack as they are deep.
        if any(isinstance(value, (tuple, list, dict)) for value in values):
            raise ValueError("a tuple of containers")
        self._push(tuple(values))

    def _append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise ValueError("values for a list, but no list")
        target.extend(values)

    def _set(self, values: list[Any]) -> None:
        target, keys = self.stack[-1], values[::2]
        if type(target) is not dict or len(values) % 2 or not _KEYS.issuperset(map(type, keys)):
            raise ValueError("keys and values for a dictionary, but none, or keys that are neither text nor number")
        target.update(zip(keys, values[1::2], strict=True))
