"""Flight-recorder dumps made by hand: entries as torch writes them, of a few operations each."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perfscope.analyzers.readers import flight
from perfscope.analyzers.readers.flight import FlightDump

START_NS = 1_800_000_000_000_000_000
MS = 1_000_000

Groups = dict[str, tuple[str, Sequence[int]]]
"""Name -> (description, ranks)."""


def op(
    group: str,
    number: int,
    name: str = "all_reduce",
    *,
    at_ms: float = 0.0,
    state: str = "completed",
    size: Sequence[int] = (1024,),
    dtype: str = "Float",
    **more: Any,
) -> dict[str, Any]:
    """One entry; ``number`` is its collective's, or a send's or recv's. Ends 1 ms after it was issued."""
    p2p = name.split(" ", maxsplit=1)[0] in ("send", "recv") or more.pop("p2p", False)
    created = START_NS + round(at_ms * MS)
    return {
        "pg_id": int(group),
        "process_group": group,
        "thread_id": "1",
        "collective_seq_id": 0 if p2p else number,
        "p2p_seq_id": number if p2p else 0,
        "op_id": number,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": created,
        "input_sizes": [list(size)],
        "input_dtypes": [dtype],
        "output_sizes": [list(size)],
        "output_dtypes": [dtype],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": created + MS if state == "completed" else None,
        "retired": state == "completed",
        "timeout_ms": 600_000,
        "is_p2p": p2p,
        **more,
    }


def document(groups: Groups, entries: Sequence[dict[str, Any]], rank: int = 0, **more: Any) -> dict[str, Any]:
    """What torch dumps on ``rank``: it knows the groups that it is in."""
    own = {name: group for name, group in groups.items() if rank in group[1]}
    return {
        "version": "2.10",
        "pg_config": {
            name: {"name": name, "desc": description, "ranks": str(list(ranks))}
            for name, (description, ranks) in own.items()
        },
        "entries": [
            {**entry, "record_id": index, "process_group": (entry["process_group"], groups[entry["process_group"]][0])}
            for index, entry in enumerate(entries)
        ],
        **more,
    }


def dump(groups: Groups, entries: Sequence[dict[str, Any]], rank: int = 0, **more: Any) -> FlightDump:
    """The same, read."""
    return flight.parse(pickle.dumps(document(groups, entries, rank, **more), 2))


def dumps(groups: Groups, entries: dict[int, list[dict[str, Any]]], **more: Any) -> dict[int, FlightDump]:
    """The dumps of several ranks."""
    return {rank: dump(groups, own, rank, **more) for rank, own in entries.items()}


def write(
    folder: Path, groups: Groups, entries: dict[int, list[dict[str, Any]]], name: str = "nccl_trace_rank_{}"
) -> None:
    """Files of several ranks, under names as torch gives them; JSON where the name ends so."""
    for rank, own in entries.items():
        path = folder / name.format(rank)
        made = document(groups, own, rank)
        path.write_bytes(json.dumps(made).encode() if path.suffix == ".json" else pickle.dumps(made, 2))
