"""The events of a Chrome trace as typed structs, and the decoding of one slice of the event array.

A slice of valid JSON is decoded in one call. Where that fails, its events are decoded one by one, and only the invalid
ones are repaired (``chrome_repair``) or dropped; both are counted.
"""

from __future__ import annotations

import re
from dataclasses import field
from functools import reduce
from operator import or_
from types import GenericAlias
from typing import Any, ClassVar

import msgspec

from perfscope.analyzers.readers import chrome_repair
from perfscope.analyzers.readers.chrome_repair import UNREADABLE
from perfscope.frozen import dataclass

Number = int | float | str | None
"""An id or a time: writers quote them, leave them null or write them as floats."""

NOTHING = msgspec.Raw(b"")
"""Marks an absent field whose value would be JSON text."""

_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")
_SEPARATORS = re.compile(rb"[\s,]*")


class Args(
    msgspec.Struct,
    frozen=True,
    gc=False,
    rename={
        "external_id": "External id",
        "external_id_old": "external id",
        "shapes": "Input Dims",
        "types": "Input type",
        "inputs": "Concrete Inputs",
        "kind": "Collective name",
        "group": "Process Group Name",
        "group_description": "Process Group Description",
        "ranks": "Process Group Ranks",
        "elements_in": "In msg nelems",
        "elements_out": "Out msg nelems",
        "group_size": "Group size",
        "sequence": "Seq",
        "source": "Src Rank",
        "destination": "Dst Rank",
        "step": "step_num",
        "graph": "graph id",
        "graph_node": "graph node id",
        "said": "str",
    },
):
    """The part of an event's ``args`` that is read; the rest is skipped without being decoded."""

    external_id: Number = -1
    external_id_old: Number = -1
    correlation: Number = -1
    correlation_id: Number = -1
    """What JAX calls it."""
    connection_id: Number = -1
    """What Ascend calls it."""
    device: Number = -1
    stream: Number = -1
    shapes: msgspec.Raw = NOTHING
    types: msgspec.Raw = NOTHING
    inputs: msgspec.Raw = NOTHING
    kind: msgspec.Raw = NOTHING
    group: msgspec.Raw = NOTHING
    group_description: msgspec.Raw = NOTHING
    ranks: msgspec.Raw = NOTHING
    dtype: msgspec.Raw = NOTHING
    elements_in: msgspec.Raw = NOTHING
    elements_out: msgspec.Raw = NOTHING
    group_size: msgspec.Raw = NOTHING
    sequence: msgspec.Raw = NOTHING
    source: msgspec.Raw = NOTHING
    destination: msgspec.Raw = NOTHING
    step: Number = -1
    """The number of a step that JAX or TensorFlow annotated."""
    graph: Number = -1
    graph_node: Number = -1
    """Of a kernel that a CUDA graph launched; 0 for others."""
    name: msgspec.Raw = NOTHING
    said: msgspec.Raw = NOTHING
    annotation: msgspec.Raw = NOTHING
    module_fqn: msgspec.Raw = NOTHING
    autograd_phase: msgspec.Raw = NOTHING
    """What torch's annotations of kernels say, where they were put into the trace."""


NO_ARGS = Args()


class _Range(msgspec.Struct, gc=False, tag_field="ph"):
    """What all ranges have, whole or split."""

    cat: str = ""
    name: str = ""
    pid: Number = ""
    tid: Number = ""
    args: Args = NO_ARGS


class Complete(_Range, gc=False, tag="X"):
    """A range with its duration, times as numbers."""

    ts: Number = None
    dur: Number = 0


class CompleteAsText(_Range, gc=False, tag="X"):
    """A range with its duration, times as text: for those that numbers would round."""

    ts: msgspec.Raw = NOTHING
    dur: msgspec.Raw = NOTHING


class Begin(_Range, gc=False, tag="B"):
    """The start of a range that an ``End`` on the same thread closes."""

    ts: msgspec.Raw = NOTHING
    dur: ClassVar[msgspec.Raw] = NOTHING


class End(msgspec.Struct, gc=False, tag_field="ph", tag="E"):
    """The end of the innermost open range of its thread."""

    pid: Number = ""
    tid: Number = ""
    ts: msgspec.Raw = NOTHING


class InstantArgs(
    msgspec.Struct,
    frozen=True,
    gc=False,
    rename={
        "allocated": "Total Allocated",
        "reserved": "Total Reserved",
        "device": "Device Id",
        "device_type": "Device Type",
    },
):
    """The allocator's counters in a ``[memory]`` event."""

    allocated: Number = -1
    reserved: Number = -1
    device: Number = -1
    device_type: Number = -1


class Instant(msgspec.Struct, gc=False, tag_field="ph", tag="i"):
    """A point in time, as a number; only ``[memory]`` is used."""

    name: str = ""
    ts: Number = None
    args: InstantArgs = InstantArgs()


class InstantAsText(msgspec.Struct, gc=False, tag_field="ph", tag="i"):
    """A point in time, as text."""

    name: str = ""
    ts: msgspec.Raw = NOTHING
    args: InstantArgs = InstantArgs()


ALLOCATOR = "[memory]"
"""The name of the allocator's instants."""


class MetadataArgs(msgspec.Struct, frozen=True, gc=False):
    """The value of a metadata event."""

    name: msgspec.Raw = NOTHING


class Metadata(msgspec.Struct, gc=False, tag_field="ph", tag="M"):
    """A name for a process or a thread."""

    name: str = ""
    pid: Number = ""
    tid: Number = ""
    args: MetadataArgs = MetadataArgs()


def _skipped(phase: str) -> type[msgspec.Struct]:
    return msgspec.defstruct(f"Skipped_{ord(phase[0])}", [], gc=False, tag_field="ph", tag=phase)


FLOWS = tuple(map(_skipped, "stf"))
"""Arrows between events: correlation ids contain the same."""
_IGNORED = tuple(map(_skipped, "IRCPvVc(),"))
"""Instants, counters, samples and the like: they have no duration."""
UNREAD = {_skipped(phase): phase for phase in "bneSTpFNOD"}
"""Asynchronous ranges and object life times: they have no thread; they are counted as not read."""

_KINDS: tuple[Any, ...] = (Begin, End, Metadata, *FLOWS, *_IGNORED, *UNREAD)

NUMBERS = (Complete, Instant, *_KINDS)
"""What the events of a slice are decoded to, with times as numbers."""
_TEXTS = (CompleteAsText, InstantAsText, *_KINDS)
_KNOWN_PHASES = {kind.__struct_config__.tag for kind in NUMBERS}


def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


_ONE_AS_TEXT = _decoder(reduce(or_, _TEXTS))
_AS_TEXT = _decoder(GenericAlias(list, (reduce(or_, _TEXTS),)))
_AS_NUMBERS = _decoder(GenericAlias(list, (reduce(or_, NUMBERS),)))
_SYNTAX = _decoder(msgspec.Raw)


@dataclass
class EventBatch:
    """The events of one slice of the event array."""

    events: list[Any]
    consumed: int
    """Bytes of the slice that are decoded."""
    closed: bool = False
    """The array ended, with the ``]`` at ``consumed - 1``."""
    times_as_text: bool = False
    """Complete events are ``CompleteAsText``, instants ``InstantAsText``."""
    dropped: int = 0
    repaired: int = 0
    other_phases: list[str] = field(default_factory=list)
    """Phases that no known writer uses, one per event."""


def decode(view: memoryview, *, last: bool, times_as_text: bool) -> EventBatch:
    """Decode ``view``, which starts with ``[`` and whole events.

    Unless it is the ``last`` of the file, it ends with an added ``]``, and may break off inside its last event, which
    then is not consumed.
    """
    decoder = _AS_TEXT if times_as_text else _AS_NUMBERS
    try:
        events = decoder.decode(view)
        return EventBatch(events, len(view), last, times_as_text)
    except UNREADABLE as error:
        if (at := trailing(error)) is not None:
            end = len(bytes(view[:at]).rstrip())
            return EventBatch(decoder.decode(view[:end]), end, True, times_as_text)
    return _one_by_one(view, last=last)


def trailing(error: Exception) -> int | None:
    """Where the decoder found more text after a complete value; None for other errors."""
    match = _TRAILING.search(str(error))
    return int(match[1]) - _COUNTED_FROM if match else None


def _counted_from() -> int:
    """The number that the decoder gives the first byte."""
    try:
        _SYNTAX.decode(b"0,")
    except msgspec.DecodeError as error:
        if match := _TRAILING.search(str(error)):
            return int(match[1]) - 1
    raise RuntimeError(f"msgspec {msgspec.__version__} reports errors in an unknown way; install another version")


_COUNTED_FROM = _counted_from()


def _one_by_one(view: memoryview, *, last: bool) -> EventBatch:
    text = bytes(view)
    limit = len(text) if last else len(text) - 1
    result = EventBatch([], 1, times_as_text=True)
    while True:
        at = _skip(text, result.consumed, limit)
        if at >= limit:
            result.consumed = limit
            return result
        if text[at : at + 1] == b"]":
            result.consumed, result.closed = at + 1, True
            return result
        end, broken_off = _end_of_value(view, at, limit)
        if end is not None:
            result.consumed = end
            if not _keep(text[at:end], result):
                result.dropped += 1
        elif (broken_off and not last and (at > 1 or limit < chrome_repair.ENOUGH_BYTES)) or not _keep_damaged(
            text, at, limit, result, last=last
        ):
            result.consumed = at
            return result


def _skip(text: bytes, at: int, limit: int) -> int:
    match = _SEPARATORS.match(text, at, limit)
    return match.end() if match else at


def _end_of_value(view: memoryview, at: int, limit: int) -> tuple[int | None, bool]:
    """(end of the value at ``at``, None where it is not well-formed; whether ``limit`` cuts it off)."""
    try:
        _SYNTAX.decode(view[at:limit])
    except UNREADABLE as error:
        past = trailing(error)
        return (None, "truncated" in str(error)) if past is None else (at + past, False)
    return limit, False


def _keep(piece: bytes, result: EventBatch) -> bool:
    """Read one event, repaired if necessary; False if it cannot be read."""
    repaired = chrome_repair.repaired(piece)
    for number, candidate in enumerate((piece, chrome_repair.normalized(piece), chrome_repair.normalized(repaired))):
        try:
            event = _ONE_AS_TEXT.decode(candidate)
        except UNREADABLE:
            continue
        result.events.append(event)
        result.repaired += number == 2
        return True
    phase = chrome_repair.phase_of(piece)
    if phase is None or phase in _KNOWN_PHASES:
        return False
    if phase:
        result.other_phases.append(phase)
    return True


def _keep_damaged(text: bytes, at: int, limit: int, result: EventBatch, *, last: bool) -> bool:
    """Repair or drop the event at ``at``; False where the slice does not show where it ends."""
    ends = chrome_repair.possible_ends(text, at, limit, last=last)
    for end in ends:
        if _keep(text[at:end], result):
            result.consumed = end
            return True
    if not ends:
        return False
    result.dropped += 1
    result.consumed = ends[0]
    return True
