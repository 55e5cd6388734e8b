"""The step history of a rank on disk: how long every step of a run took, a few bytes per step.

A file is blocks, each of consecutive steps, appended whole while the job runs: a kill loses at most the block that was
not yet there, and a block that was cut or damaged is left out by its checksum. A block is a header and packed columns::

    header    magic, checksum, bytes that follow, steps, stages, attempt, first step, began (``_HEADER``)
    columns   µs of each step, of each stage and of each wait whose bit is set, 8 bytes per value; then a byte of flags
              per step

Before they are packed (zlib) a column's bytes are regrouped, all first bytes, then all second ones, and so on: steps
are alike, so all but the lowest bytes nearly vanish. Standard library only: collectors write it in the training job.
"""

from __future__ import annotations

import struct
import sys
import zlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Final

from perfscope.frozen import dataclass

STAGES: Final = ("dataloader", "forward", "backward", "optimizer", "evaluation", "checkpoint")
"""What is measured of a step on the training thread's clock, in the order of the columns and of the bits."""

UNPROFILED_STEPS: Final = 256
"""Unprofiled steps whose time goes into a rank's metadata, the first ones: enough for a steady median."""

OCCASIONAL: Final = frozenset({"evaluation", "checkpoint"})
"""Stages that most steps do not have: a block in which none has them leaves them out, and they are 0 there."""

CORE: Final = "core"
"""The wait of a thread that could run for a core that is free."""

CORE_IN: Final = {name: f"{CORE} in {name}" for name in (*STAGES, "other")}
"""Stage -> the same where it is known to be in that stage, and not while the thread waited for other ranks."""

WAITS: Final = (*STAGES, "other", CORE, *CORE_IN.values())
"""What a step waits for, in the order of the columns and of the bits. With the name of a stage: the time in it in which
the training thread waited for a collective or a message to complete, a part of the stage's time; :data:`CORE`,
which may lie anywhere in the step; and those of :data:`CORE_IN`, parts of stages and of none of the other waits."""

DISTURBED: Final = 1
"""Flag of a step during which this project itself (profiler, compression) or the script's own profiler was at work: not
to be compared."""

VALUE_BYTES: Final = 8

_MAGIC: Final = b"PSH1"
_HEADER: Final = struct.Struct("<4sIIIIIqq")
_COVERED: Final = struct.Struct("<IIIIqq")
"""What the checksum covers of the header: all that follows it."""
_FIRST_WAIT: Final = 16
"""Bit of the first of ``WAITS``; the stages' bits are below."""
_WAITS_MEASURED: Final = 1 << 31
_LEVEL: Final = 6
_MOST_STEPS: Final = 1 << 20
"""In one block; a header with more is damaged."""
_TIME_BYTES: Final = 6
"""Of a time's bytes; the others are 0: 2^48 µs are nine years."""
_LAST_STEP: Final = 1 << 40
_LATEST_NS: Final = 1 << 62
"""The year 2116."""
_MOST_BYTES: Final = 1 << 20
"""The same, after the header, while a file grows: collectors write blocks of some kB."""


@dataclass(frozen=True)
class Block:
    """Consecutive steps of one rank, as they are written."""

    attempt: int
    """Elastic restarts before them."""
    first_step: int
    """Number of the first one; the job's own, from 0."""
    began_ns: int
    """When the first one began, ns since the epoch."""
    step_us: Sequence[int]
    """Wall time of each."""
    stages_us: dict[str, Sequence[int]]
    """Stage -> time of each step in it alone; stages that nothing measured are left out."""
    flags: bytes
    """One byte per step: :data:`DISTURBED` or 0."""
    waits_us: dict[str, Sequence[int]] | None = None
    """Name of ``WAITS`` -> waiting in each step; those left out are 0. None where waiting is not measured."""


@dataclass(frozen=True)
class PackedBlock:
    """A block as it is read: checked and unpacked, its columns still grouped by byte.

    ``columns`` is, of each of ``1 + len(stages) + len(waits)`` columns, 8 runs of ``steps`` bytes, the lowest first.
    """

    attempt: int
    first_step: int
    began_ns: int
    steps: int
    stages: tuple[str, ...]
    columns: bytes
    flags: bytes
    waits: tuple[str, ...] | None = None
    """None where waiting is not measured."""


def pack(block: Block) -> bytes:
    """A block's bytes, header included."""
    stages = [name for name in STAGES if name in block.stages_us]
    waited = block.waits_us or {}
    waits = [name for name in WAITS if name in waited]
    columns = [block.step_us, *(block.stages_us[name] for name in stages), *(waited[name] for name in waits)]
    payload = zlib.compress(b"".join(map(_grouped, columns)) + block.flags, _LEVEL)
    bits = sum(1 << STAGES.index(name) for name in stages) + sum(1 << _FIRST_WAIT + WAITS.index(name) for name in waits)
    bits |= _WAITS_MEASURED * (block.waits_us is not None)
    covered = (len(payload), len(block.step_us), bits, block.attempt, block.first_step, block.began_ns)
    return _HEADER.pack(_MAGIC, zlib.crc32(_COVERED.pack(*covered) + payload), *covered) + payload


def step_times_us(block: PackedBlock) -> list[int]:
    """How long each step of a block took."""
    column = block.columns[: VALUE_BYTES * block.steps]
    return [int.from_bytes(column[step :: block.steps], "little") for step in range(block.steps)]


def unpack(data: bytes) -> Iterator[PackedBlock]:
    """Every whole block of a file's bytes, in order; what is damaged in between is stepped over."""
    position = data.find(_MAGIC)
    while position >= 0:
        block, following = _block_at(data, position)
        if block is not None:
            yield block
        position = data.find(_MAGIC, position + 1 if block is None else following)


def unpack_growing(data: bytes) -> tuple[list[PackedBlock], int]:
    """Every whole block of the bytes of a file that still grows, and how many of the bytes are done with.

    The others may be the beginning of a block that is being written: hand them over again, followed by what comes next.
    """
    blocks: list[PackedBlock] = []
    open_at: int | None = None
    position = data.find(_MAGIC)
    while position >= 0:
        block, following = _block_at(data, position)
        if block is not None:
            blocks.append(block)
            open_at = None  # what comes before a whole block was cut
        elif open_at is None and _may_go_on(data, position):
            open_at = position
        position = data.find(_MAGIC, position + 1 if block is None else following)
    return blocks, max(len(data) - len(_MAGIC) + 1, 0) if open_at is None else open_at


def _may_go_on(data: bytes, position: int) -> bool:
    """Whether the bytes end within the block that begins at ``position``."""
    begin = position + _HEADER.size
    if begin > len(data):
        return True
    _, _, size, steps, *_ = _HEADER.unpack_from(data, position)
    return bool(size <= _MOST_BYTES and steps <= _MOST_STEPS and begin + size > len(data))


def _grouped(values: Sequence[int]) -> bytes:
    column = array("Q", values)
    if sys.byteorder == "big":
        column.byteswap()
    raw = column.tobytes()
    return b"".join(raw[place::VALUE_BYTES] for place in range(VALUE_BYTES))


def _unpacked(payload: bytes, length: int) -> bytes | None:
    """The payload unpacked, no more than it should be; None where that is not its length."""
    unpack = zlib.decompressobj()
    try:
        plain = unpack.decompress(payload, length + 1)
    except zlib.error:
        return None
    return plain if unpack.eof and len(plain) == length else None


def _can_be_true(plain: bytes, steps: int, first_step: int, began_ns: int) -> bool:
    """Whether times are below the bound, and the block lies where a block can: a right checksum says nothing of it."""
    column = VALUE_BYTES * steps
    ends = range(column, len(plain), column) if steps else ()
    highest = (plain[end - (VALUE_BYTES - _TIME_BYTES) * steps : end] for end in ends)
    return 0 <= first_step < _LAST_STEP and abs(began_ns) < _LATEST_NS and not any(map(any, highest))


def _block_at(data: bytes, position: int) -> tuple[PackedBlock | None, int]:
    """The block that begins at ``position``, None where none does, and where the next one may begin."""
    begin = position + _HEADER.size
    if begin > len(data):
        return None, begin
    _, checksum, size, steps, bits, attempt, first_step, began_ns = _HEADER.unpack_from(data, position)
    payload = data[begin : begin + size]
    covered = _COVERED.pack(size, steps, bits, attempt, first_step, began_ns)
    if len(payload) < size or steps > _MOST_STEPS or zlib.crc32(covered + payload) != checksum:
        return None, begin
    stages = tuple(name for place, name in enumerate(STAGES) if bits >> place & 1)
    waits = tuple(name for place, name in enumerate(WAITS) if bits >> _FIRST_WAIT + place & 1)
    length = (1 + len(stages) + len(waits)) * VALUE_BYTES * steps
    plain = _unpacked(payload, length + steps)
    if plain is None or not _can_be_true(plain, steps, first_step, began_ns):
        return None, begin
    measured = waits if bits & _WAITS_MEASURED else None
    found = PackedBlock(attempt, first_step, began_ns, steps, stages, plain[:length], plain[length:], measured)
    return found, begin + size
