"""The last collectives of this process as one dump in the format of torch's flight recorder.

Torch's own dump holds nearly all of it. Added are what :mod:`perfscope.collectors.hang.log` noted, the members of
groups where the backend does not report them (gloo), and under a key of its own which rank this is and since when it
makes no step.
"""

from __future__ import annotations

import pickle
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from perfscope.collectors.describe.groups import describe_groups
from perfscope.collectors.hang.log import CollectiveLog, Entry

RECORDERS: Final = ("_dump_nccl_trace", "_dump_fr_trace")
"""Functions of torch that dump: of NCCL, and of all other backends."""

FORMAT: Final = "2.10"
"""The version that is written where torch writes none."""

SECOND: Final = 1000
"""Added to the groups' numbers of a second recorder, which counts from 0 as well."""

_TYPES: Final = {
    "float32": "Float", "float64": "Double", "float16": "Half", "bfloat16": "BFloat16", "int64": "Long", "int32": "Int",
    "int16": "Short", "int8": "Char", "uint8": "Byte", "bool": "Bool",
}  # fmt: skip
"""Python's names of types -> C++'s."""


class Moment(NamedTuple):
    """Which rank stands still, and how long."""

    rank: int
    world_size: int
    steps: int
    """Optimizer steps that it made."""
    idle_s: float
    """Since the last one, or since the process began to train."""


def dump(log: CollectiveLog, moment: Moment) -> bytes:
    """The dump, pickled as torch does."""
    found: dict[str, Any] = {"version": FORMAT, "pg_config": {}, "pg_status": {}, "entries": []}
    for number, each in enumerate(_recorded()):
        _add(found, each, number * SECOND)
    groups = {group.name: group for group in describe_groups()}
    config = {name: each for name, each in found["pg_config"].items() if each.get("name")}
    for name, group in groups.items():
        described = {"name": name, "desc": group.description, "ranks": str(list(group.ranks))}
        config.setdefault(name, described)
    found["pg_config"] = config
    backends = {name: group.backend for name, group in groups.items()}
    _add_logged(found["entries"], log, backends)
    now_ns = time.time_ns()
    found["perfscope"] = {
        "rank": moment.rank,
        "world_size": moment.world_size,
        "steps": moment.steps,
        "written_ns": now_ns,
        "idle_since_ns": now_ns - int(moment.idle_s * 1e9),
    }
    return pickle.dumps(found, protocol=2)


def _recorded() -> Iterator[dict[str, Any]]:
    """What torch's recorders dump, of those that recorded anything."""
    module = sys.modules.get("torch._C._distributed_c10d")
    for name in RECORDERS:
        recorder = getattr(module, name, None)
        if recorder is not None:
            dumped = pickle.loads(recorder())  # noqa: S301 - this process has just made it
            if dumped.get("entries") or dumped.get("pg_status"):
                yield dumped


def _add(found: dict[str, Any], dumped: dict[str, Any], shift: int) -> None:
    """Put one recorder's dump to the others'."""
    for entry in dumped.pop("entries", ()):
        found["entries"].append({**entry, "pg_id": entry["pg_id"] + shift})
    for number, status in dumped.pop("pg_status", {}).items():
        found["pg_status"][str(int(number) + shift)] = status
    found["pg_config"].update(dumped.pop("pg_config", {}))
    found.update(dumped)


def _add_logged(entries: list[dict[str, Any]], log: CollectiveLog, backends: dict[str, str]) -> None:
    """Put what was noted among what torch recorded, by time."""
    logged = log.entries()
    if not logged:
        return
    numbers = {entry["process_group"][0]: entry["pg_id"] for entry in entries}
    names = {thread.ident: thread.name for thread in threading.enumerate() if thread.ident is not None}
    added = []
    for each in logged:
        number = numbers.setdefault(each.group[0], max(numbers.values(), default=-1) + 1)
        made = _as_torch(each, number, backends.get(each.group[0], "gloo"), names)
        if log.complete and not made["is_p2p"]:
            made["collective_seq_id"] = each.count
        added.append(made)
    entries.extend(added)
    entries.sort(key=lambda entry: entry["time_created_ns"])
    last: dict[str, int] = {}
    for place, entry in enumerate(entries):
        entry["record_id"] = place
        name = entry["process_group"][0]
        if entry["collective_seq_id"] is None:  # in torch messages do not count, a monitored barrier does
            entry["collective_seq_id"] = last.get(name, 0) + (not entry["is_p2p"])
        last[name] = entry["collective_seq_id"]


def _as_torch(entry: Entry, group: int, backend: str, names: dict[int, str]) -> dict[str, Any]:
    call = entry.call
    name = f"{backend}:{call.kind}"
    if call.is_message:
        arrow, peer = ("->" if call.kind == "send" else "<-"), "any" if entry.peer is None else entry.peer
        name += f" {entry.rank}{arrow}{peer}"
    tensors = {"input": entry.inputs or entry.outputs, "output": entry.outputs or entry.inputs}
    return {
        "frames": [{"name": code.co_name, "filename": code.co_filename, "line": line} for code, line in entry.frames],
        "record_id": 0,
        "pg_id": group,
        "process_group": entry.group,
        "thread_name": names.get(entry.thread, ""),
        "thread_id": str(entry.thread),
        "collective_seq_id": None,
        "p2p_seq_id": entry.count if call.is_message else 0,
        "op_id": entry.count,
        "profiling_name": name,
        "time_created_ns": entry.time_ns,
        **{f"{side}_sizes": [list(shape) for shape, _ in each] for side, each in tensors.items()},
        **{f"{side}_dtypes": [_type_name(dtype) for _, dtype in each] for side, each in tensors.items()},
        "state": "completed" if entry.done else "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": entry.done,
        "timeout_ms": 0,
        "is_p2p": call.is_message,
    }


def _type_name(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    return _TYPES.get(name, name)
