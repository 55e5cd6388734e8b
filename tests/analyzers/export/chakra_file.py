"""Reads Chakra files with Google's protobuf runtime, and replays them as a feeder and a simulator do.

The messages are declared here from ``schema/protobuf/et_def.proto`` of mlcommons/chakra, apart from the product, which
writes bytes without a schema. The replay has ASTRA-sim's rules: a node runs when all it depends on has ended; of a
rank one node of the host and one computation of the device run at a time, of those that may the lowest id first; a
collective begins when all of its group have come to it, a message when both its ends have.
"""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

COMP, SEND, RECV, COLLECTIVE = 4, 5, 6, 7

_TYPES = descriptor_pb2.FieldDescriptorProto
_VALUES = {
    "double_val": (3, _TYPES.TYPE_DOUBLE), "int32_val": (7, _TYPES.TYPE_INT32), "int64_val": (9, _TYPES.TYPE_INT64),
    "uint32_val": (11, _TYPES.TYPE_UINT32), "uint64_val": (13, _TYPES.TYPE_UINT64), "bool_val": (27, _TYPES.TYPE_BOOL),
    "string_val": (29, _TYPES.TYPE_STRING),
}  # fmt: skip


def _messages() -> tuple[Any, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package="ChakraProtoMsg", syntax="proto3")
    attribute = file.message_type.add(name="AttributeProto")
    attribute.field.add(name="name", number=1, type=_TYPES.TYPE_STRING, label=1)
    attribute.oneof_decl.add(name="value")
    for name, (number, kind) in _VALUES.items():
        attribute.field.add(name=name, number=number, type=kind, label=1, oneof_index=0)
    attributes = {"type": _TYPES.TYPE_MESSAGE, "type_name": ".ChakraProtoMsg.AttributeProto", "label": 3}
    metadata = file.message_type.add(name="GlobalMetadata")
    metadata.field.add(name="version", number=1, type=_TYPES.TYPE_STRING, label=1)
    metadata.field.add(name="attr", number=2, **attributes)
    node = file.message_type.add(name="Node")
    for name, number, kind, label in (
        ("id", 1, _TYPES.TYPE_UINT64, 1), ("name", 2, _TYPES.TYPE_STRING, 1), ("type", 3, _TYPES.TYPE_INT32, 1),
        ("ctrl_deps", 4, _TYPES.TYPE_UINT64, 3), ("data_deps", 5, _TYPES.TYPE_UINT64, 3),
        ("start_time_micros", 6, _TYPES.TYPE_UINT64, 1), ("duration_micros", 7, _TYPES.TYPE_UINT64, 1),
    ):  # fmt: skip
        node.field.add(name=name, number=number, type=kind, label=label)
    node.field.add(name="attr", number=10, **attributes)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = (pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}") for name in ("GlobalMetadata", "Node"))
    metadata_type, node_type = (message_factory.GetMessageClass(each) for each in found)
    return metadata_type, node_type


_METADATA, _NODE = _messages()


@dataclass(frozen=True)
class ReadNode:
    id: int
    name: str
    type: int
    deps: frozenset[int]
    start_us: int
    us: int
    attributes: Mapping[str, Any]

    @property
    def on_host(self) -> bool:
        return bool(self.attributes["is_cpu_op"])


@dataclass(frozen=True)
class ChakraFile:
    version: str
    about: Mapping[str, Any]
    nodes: tuple[ReadNode, ...]

    def of_type(self, *types: int) -> list[ReadNode]:
        return [node for node in self.nodes if node.type in types]


def read(path: Path) -> ChakraFile:
    """One file. Fails where a message holds a field that the schema does not have."""
    pieces = list(_delimited(path.read_bytes()))
    about = _METADATA.FromString(pieces[0])
    nodes = [_NODE.FromString(piece) for piece in pieces[1:]]
    for message in (about, *nodes):
        assert not _unknown(message), message
    return ChakraFile(about.version, _attributes(about.attr), tuple(map(_read_node, nodes)))


def read_job(folder: Path, name: str = "perfscope") -> tuple[dict[int, ChakraFile], dict[str, list[int]]]:
    """The files of all ranks, and ``comm_group.json``."""
    files = {int(path.name.split(".")[-2]): read(path) for path in folder.glob(f"{name}.*.et")}
    return dict(sorted(files.items())), json.loads((folder / "comm_group.json").read_text())


def _unknown(message: Any) -> int:
    from google.protobuf.unknown_fields import UnknownFieldSet

    return len(UnknownFieldSet(message)) + sum(len(UnknownFieldSet(each)) for each in message.attr)


def _read_node(node: Any) -> ReadNode:
    assert not node.ctrl_deps
    return ReadNode(
        node.id, node.name, node.type, frozenset(node.data_deps), node.start_time_micros, node.duration_micros,
        _attributes(node.attr),
    )  # fmt: skip


def _attributes(attributes: Any) -> dict[str, Any]:
    return {each.name: getattr(each, each.WhichOneof("value")) for each in attributes}


def _delimited(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        size, shift = 0, 0
        while True:
            byte, at = data[at], at + 1
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        assert at + size <= len(data)
        yield data[at : at + size]
        at += size


@dataclass
class _Rank:
    waiting: dict[int, int]
    children: dict[int, list[int]]
    ready: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    busy: set[str] = field(default_factory=set)


class Replay:
    """Runs all ranks to their ends: ``ends_us`` of every node by rank and id. Ranks without a file do not take part."""

    def __init__(self, files: Mapping[int, ChakraFile], groups: Mapping[str, list[int]]) -> None:
        self._nodes = {rank: {node.id: node for node in file.nodes} for rank, file in files.items()}
        self._groups = {name: (name, *(rank for rank in ranks if rank in files)) for name, ranks in groups.items()}
        self._world = ("", *sorted(files))
        self._ranks = {}
        self._arrived: dict[Any, list[tuple[int, int]]] = defaultdict(list)
        self._numbers: dict[Any, int] = defaultdict(int)
        self._events: list[tuple[int, int, int]] = []
        self.ends_us: dict[int, dict[int, int]] = {rank: {} for rank in files}
        for rank, nodes in self._nodes.items():
            children: dict[int, list[int]] = defaultdict(list)
            for node in nodes.values():
                for dep in node.deps:
                    assert dep in nodes
                    children[dep].append(node.id)
            self._ranks[rank] = _Rank({node.id: len(node.deps) for node in nodes.values()}, children)

    def run(self) -> Replay:
        for rank, state in self._ranks.items():
            for node, deps in state.waiting.items():
                if not deps:
                    self._able(rank, node)
            self._start(rank, 0)
        while self._events:
            now, rank, node = heapq.heappop(self._events)
            self._end(rank, node, now)
        for rank, nodes in self._nodes.items():
            assert len(self.ends_us[rank]) == len(nodes), f"rank {rank} stands still"
        return self

    def span_us(self) -> int:
        """From when the last rank begins its first step to when the last one ends its last: the sum of the job's steps.

        Communication that nobody waited for may end later.
        """
        begins, ends = [], []
        for rank, nodes in self._nodes.items():
            own = [node for node in nodes.values() if node.type == COMP]
            begins.append(sum(node.us for node in own if node.name == "before the first step"))
            ends.append(max(self.ends_us[rank][node.id] for node in own))
        return max(ends) - max(begins)

    def _able(self, rank: int, node: int) -> None:
        heapq.heappush(self._ranks[rank].ready[self._lane(rank, node)], node)

    def _lane(self, rank: int, node: int) -> str:
        found = self._nodes[rank][node]
        return "comm" if found.type != COMP else "host" if found.on_host else "device"

    def _start(self, rank: int, now: int) -> None:
        state = self._ranks[rank]
        for lane in ("host", "device"):
            if lane not in state.busy and state.ready[lane]:
                node = heapq.heappop(state.ready[lane])
                state.busy.add(lane)
                heapq.heappush(self._events, (now + self._nodes[rank][node].us, rank, node))
        while state.ready["comm"]:
            self._meet(rank, heapq.heappop(state.ready["comm"]), now)

    def _meet(self, rank: int, node: int, now: int) -> None:
        found = self._nodes[rank][node]
        about = found.attributes
        if found.type == COLLECTIVE:
            ranks = self._groups[about["pg_name"]] if "pg_name" in about else self._world
            assert rank in ranks
            counted = (ranks, rank)
            key: Any = (ranks, self._numbers[counted])
            self._numbers[counted] += 1
            wanted = len(ranks) - 1
        else:
            assert rank == about["comm_src" if found.type == SEND else "comm_dst"]
            key, wanted = (about["comm_src"], about["comm_dst"], about["comm_tag"]), 2
        self._arrived[key].append((rank, node))
        if len(self._arrived[key]) == wanted:
            kinds = {self._nodes[each][one].attributes.get("comm_type") for each, one in self._arrived[key]}
            assert len(kinds) == 1, f"unlike collectives met: {kinds}"
            for each, one in self._arrived.pop(key):
                heapq.heappush(self._events, (now + self._nodes[each][one].us, each, one))

    def _end(self, rank: int, node: int, now: int) -> None:
        state = self._ranks[rank]
        self.ends_us[rank][node] = now
        lane = self._lane(rank, node)
        state.busy.discard(lane)
        for child in state.children[node]:
            state.waiting[child] -= 1
            if not state.waiting[child]:
                self._able(rank, child)
        self._start(rank, now)
