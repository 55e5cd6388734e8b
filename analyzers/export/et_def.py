"""Writes Chakra's protobuf format: a file is a ``GlobalMetadata``, then its ``Node`` messages, each after its length.

Source of the messages and of the attributes' names: ``schema/protobuf/et_def.proto``, ``src/third_party/utils`` and
``src/feeder`` of github.com/mlcommons/chakra, and ``astra-sim/workload/Workload.cc`` of github.com/astra-sim/astra-sim.
All dependencies are written as data dependencies: feeders resolve those, and some resolve no others.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Final

from perfscope.frozen import dataclass
from perfscope.trace.protobuf import integer, message, text, varint

SCHEMA_VERSION: Final = "0.0.4"
"""The version that Chakra's own converter writes into the files of this schema."""

_VERSION, _METADATA_ATTR = 1, 2
_ID, _NAME, _TYPE, _DATA_DEPS, _START, _DURATION, _ATTR = 1, 2, 3, 5, 6, 7, 10
_ATTR_NAME, _INT32, _INT64, _UINT64, _BOOL, _STRING = 1, 7, 9, 13, 27, 29


class NodeType(enum.IntEnum):
    """``NodeType`` of the schema, as far as it is written."""

    COMP = 4
    SEND = 5
    RECV = 6
    COLLECTIVE = 7


class CollectiveType(enum.IntEnum):
    """``CollectiveCommType`` of the schema."""

    ALL_REDUCE = 0
    REDUCE = 1
    ALL_GATHER = 2
    GATHER = 3
    SCATTER = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7
    REDUCE_SCATTER_BLOCK = 8
    BARRIER = 9


Value = int | bool | str

_WIRE: Final[Mapping[str, int]] = {
    "comm_type": _INT64, "comm_size": _INT64, "num_ops": _INT64, "step": _INT64, "stream": _INT64,
    "tensor_size": _UINT64, "comm_src": _INT32, "comm_dst": _INT32, "comm_tag": _INT32,
}  # fmt: skip
"""Attribute -> the field that the feeder reads it from; truth values and texts have one of their own."""


@dataclass(frozen=True)
class Node:
    """One node. Times are whole µs; ``deps`` are ids of nodes that must have ended."""

    id: int
    name: str
    type: NodeType
    start_us: int
    duration_us: int
    deps: Sequence[int]
    attributes: Mapping[str, Value] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The message, after its length."""
        deps = b"".join(varint(dep) for dep in self.deps)
        return _delimited(
            integer(_ID, self.id)
            + text(_NAME, self.name)
            + integer(_TYPE, self.type)
            + (message(_DATA_DEPS, deps) if deps else b"")
            + integer(_START, self.start_us)
            + integer(_DURATION, self.duration_us)
            + b"".join(message(_ATTR, _attribute(name, value)) for name, value in self.attributes.items())
        )


def header(attributes: Mapping[str, Value]) -> bytes:
    """``GlobalMetadata``, with which a file begins."""
    attrs = b"".join(message(_METADATA_ATTR, _attribute(name, value)) for name, value in attributes.items())
    return _delimited(text(_VERSION, SCHEMA_VERSION) + attrs)


def _attribute(name: str, value: Value) -> bytes:
    if isinstance(value, str):
        return text(_ATTR_NAME, name) + text(_STRING, value)
    return text(_ATTR_NAME, name) + integer(_BOOL if isinstance(value, bool) else _WIRE.get(name, _INT64), value)


def _delimited(content: bytes) -> bytes:
    return varint(len(content)) + content
