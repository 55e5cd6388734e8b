"""What torch's flight recorder of a rank writes (version 2.9, of torch 2.6 to 2.8), as a pickle.

Layout of entries and the numbers in them as in torch's csrc/distributed/c10d/FlightRecorderDetail.hpp and
ProcessGroupNCCL.cpp: messages that are issued as one share a ``p2p_seq_id``, have an entry each without events, whose
state is never known, and one more, ``nccl:coalesced``, for all.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.stuck.machine import Issued, Machine
from tests.stuck.program import Collective

EPOCH_NS = 1_758_580_000_000_000_000


@dataclass(frozen=True)
class Recorder:
    """How the flight recorders of a job are set."""

    entries: int = 2000
    timing: bool = False
    """Events of the start are recorded, too."""
    only_active: bool = False
    frames: bool = True


def dump(
    machine: Machine,
    rank: int,
    recorder: Recorder,
    *,
    at_ns: int | None = None,
    offset_ns: int = 0,
    failed_ns: int | None = None,
) -> bytes:
    """The dump of a rank at a time (the end, where there is none), by a clock that is off by ``offset_ns``.

    ``failed_ns``: since then its device gives no events; what ended later looks as if it had not.
    """
    seen_ns = min((time for time in (at_ns, failed_ns) if time is not None), default=None)
    issued = [each for each in machine.ranks[rank].issued if at_ns is None or each.created_ns <= at_ns]
    shift_ns = EPOCH_NS + offset_ns
    groups = [group for group in machine.job.groups if rank in group.ranks]
    numbers = {group.name: number for number, group in enumerate(groups)}
    entries: list[dict[str, Any]] = []
    counts: dict[str, int] = defaultdict(int)
    record = 0
    for each in issued:
        ended = each.ended_ns is not None and (seen_ns is None or each.ended_ns <= seen_ns)
        started = each.started_ns is not None and (seen_ns is None or each.started_ns <= seen_ns)
        for name, sizes, known in _rows(each):
            counts[each.group.name] += 1
            state = (
                "completed" if ended and known else "started" if started and known and recorder.timing else "scheduled"
            )
            entry = {
                "record_id": record,
                "pg_id": numbers[each.group.name],
                "process_group": (each.group.name, each.group.description),
                "thread_name": "python3",
                "thread_id": "23456244340032",
                "collective_seq_id": each.collectives,
                "p2p_seq_id": 0 if isinstance(each.action, Collective) else each.sequence,
                "op_id": counts[each.group.name],
                "profiling_name": f"nccl:{name}",
                "time_created_ns": each.created_ns + shift_ns,
                "input_sizes": [list(size) for size in sizes[:1]],
                "input_dtypes": [each.action.dtype for _ in sizes[:1]],
                "output_sizes": [list(size) for size in sizes[1:]],
                "output_dtypes": [each.action.dtype for _ in sizes[1:]],
                "state": state,
                "time_discovered_started_ns": (each.started_ns or 0) + shift_ns
                if started and recorder.timing
                else None,
                "time_discovered_completed_ns": (each.ended_ns or 0) + shift_ns if ended and known else None,
                "retired": bool(ended and known),
                "timeout_ms": 600_000,
                "is_p2p": not isinstance(each.action, Collective),
            }
            if recorder.frames:
                entry["frames"] = [
                    {"name": "wrapper", "filename": "/opt/torch/distributed/c10d_logger.py", "line": 83},
                    {"name": "train", "filename": "/job/train.py", "line": each.action.line},
                ]
            record += 1
            entries.append(entry)
    entries = entries[-recorder.entries :]
    if recorder.only_active:
        entries = [entry for entry in entries if entry["state"] != "completed"]
    status = {
        str(numbers[group.name]): _status([each for each in issued if each.group == group], seen_ns) for group in groups
    }
    config = {
        group.name: {"name": group.name, "desc": group.description, "ranks": str(list(group.ranks))} for group in groups
    }
    content = {
        "version": "2.9", "nccl_version": "2.27.3", "pg_config": config, "pg_status": status, "entries": entries
    }  # fmt: skip
    return pickle.dumps(content, protocol=2)


def _rows(each: Issued) -> Iterator[tuple[str, list[tuple[int, ...]], bool]]:
    """(name, sizes in and out, whether it has events) of every entry that one call makes."""
    if isinstance(each.action, Collective):
        yield each.action.kind, [each.action.sizes_in, each.action.sizes_out], True
        return
    own = each.group.ranks.index(each.rank)
    for part in each.action.parts:
        arrow = "->" if part.send else "<-"
        name = f"{'send' if part.send else 'recv'} {own}{arrow}{each.group.ranks.index(part.peer)}"
        yield name, [part.size, part.size], not each.action.batched
    if each.action.batched:
        yield "coalesced", [], True


def _status(issued: list[Issued], at_ns: int | None) -> dict[str, int]:
    """Of one group. Numbers of whatever was last, as torch has them: of collectives or of messages."""
    ended = [each for each in issued if each.ended_ns is not None and (at_ns is None or each.ended_ns <= at_ns)]
    return {
        "last_enqueued_collective": issued[-1].sequence if issued else -1,
        "last_started_collective": -1,
        "last_completed_collective": ended[-1].sequence if ended else -1,
    }
