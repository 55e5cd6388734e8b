"""Protocol Buffers' wire format, as far as this project writes it: fields made into bytes by their numbers.

What is written is small and fixed, so that neither a schema compiler nor a runtime is needed. Source of the format:
protobuf.dev, "Encoding".
"""

from __future__ import annotations

import struct
from typing import Final

_VARINT: Final = 0
_FIXED64: Final = 1
_LENGTH: Final = 2
_FIXED32: Final = 5

_WORD: Final = (1 << 64) - 1


def varint(value: int) -> bytes:
    """An integer, seven bits a byte, the lowest first. Negative ones are written as 64 bits, as ``int64`` is."""
    value &= _WORD
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def tag(field: int, wire_type: int) -> bytes:
    """What precedes a field's value."""
    return varint(field << 3 | wire_type)


def integer(field: int, value: int) -> bytes:
    """A field of type ``int64``, ``uint64``, ``bool`` or an enumeration."""
    return tag(field, _VARINT) + varint(value)


def fixed64(field: int, value: int) -> bytes:
    """A field of type ``fixed64``."""
    return tag(field, _FIXED64) + struct.pack("<Q", value)


def double(field: int, value: float) -> bytes:
    """A field of type ``double``."""
    return tag(field, _FIXED64) + struct.pack("<d", value)


def single(field: int, value: float) -> bytes:
    """A field of type ``float``."""
    return tag(field, _FIXED32) + struct.pack("<f", value)


def message(field: int, content: bytes) -> bytes:
    """A field that holds a message, or ``bytes``."""
    return tag(field, _LENGTH) + varint(len(content)) + content


def text(field: int, value: str) -> bytes:
    """A field of type ``string``; what UTF-8 cannot hold (half a surrogate pair) is replaced."""
    return message(field, value.encode("utf-8", "replace"))
