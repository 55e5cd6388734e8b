"""Looks through a pickle before it is unpickled: none of its opcodes may take memory by a number in the file.

Python's unpickler makes room for as many bytes as an opcode claims to be followed by, and for every place of its memo
up to the one that an opcode names. Pickles of Python's own, of protocol 4 and above, hold what they claim and count
places one after the other.
"""

from __future__ import annotations

import pickle
import re
from typing import Final

_MOST_IN_RUN: Final = 4096
"""The matcher takes memory for each."""
_RUN: Final = re.compile(
    rb"(?:[N\x88\x89()\]}\x8f-\x91taesubR\x81\x85-\x87\x93\x94\x98]"  # constants, containers, calls, memo
    rb"|[hK].|M..|[jJ]....|G.{8}|\x80.|\x95.{8}"  # memo places that are read, numbers, the protocol and frames
    rb"){1,%d}" % _MOST_IN_RUN,
    re.DOTALL,
)
"""Opcodes of a fixed length, with what belongs to them."""
_LENGTH_BYTES: Final = {
    ord("C"): 1, ord("B"): 4, 0x8E: 8, 0x96: 8, 0x8C: 1, ord("X"): 4, 0x8D: 8, 0x8A: 1,
}  # fmt: skip
"""Bytes, texts and long numbers: opcode -> how many bytes say how many follow."""
_STOP: Final = ord(".")


def check_sizes(data: bytes) -> None:
    """Raises UnpicklingError where ``data`` holds other opcodes, or less than one of them claims."""
    at, end = 0, len(data)
    while at < end:
        run = _RUN.match(data, at)
        if run is not None:
            at = run.end()
            continue
        code = data[at]
        if code == _STOP:
            return
        head = _LENGTH_BYTES.get(code)
        if head is None:
            raise pickle.UnpicklingError(f"opcode 0x{code:02x}")
        at += 1 + head + int.from_bytes(data[at + 1 : at + 1 + head], "little")
    raise pickle.UnpicklingError("cut short")
