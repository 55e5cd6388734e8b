"""The training processes of an Nsight Systems report, and their ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import numpy as np

from perfscope.analyzers.readers.nsys_names import rank_of
from perfscope.analyzers.readers.nsys_tables import STRINGS_TABLE, Prefix, Tables, pid_of, process_key, read_rows
from perfscope.frozen import dataclass
from perfscope.recording.vocabulary import NVTX_RANK_PREFIX
from perfscope.trace.distinct import distinct
from perfscope.typed import MOST_RANKS

KERNELS: Final = "CUPTI_ACTIVITY_KIND_KERNEL"
GRAPHS: Final = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
COPIES: Final = "CUPTI_ACTIVITY_KIND_MEMCPY"
FILLS: Final = "CUPTI_ACTIVITY_KIND_MEMSET"
RANGES: Final = "NVTX_EVENTS"

PUSH_POP: Final = 59
START_END: Final = 60
PUSH_POP_TEXT: Final = 70
START_END_TEXT: Final = 71
"""Ranges imported from a text file of NVTX events."""
RANGE_EVENTS: Final = (PUSH_POP, START_END, PUSH_POP_TEXT, START_END_TEXT)

_VARIABLES: Final = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMIX_RANK", "PMIX_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
"""Environment variables of launchers with rank and world size, the one nearest to the process first."""

_NUMBER: Final = re.compile(r"[0-9]{1,6}")
"""Of ranks; a longer one is none."""
_TORCHRUN: Final = re.compile(r"(?:^|/)torchrun$|^torch\.distributed\.(?:run|launch)$")
_COUNT_OPTION: Final = re.compile(r"^--?(nnodes|nproc[-_]per[-_]node)(?:=(.*))?$")


@dataclass(frozen=True)
class RankSlice:
    """One training process of a report."""

    part: str
    """Names the process among those of its report."""
    pid: int
    name: str
    """The process's name as recorded; empty where it is not."""
    rank: int | None
    """None where it is not recorded."""
    world_size: int | None
    rank_source: str
    """Where the rank is from: ``NVTX``, ``MPI``, an environment variable's name; empty where there is no rank."""

    @property
    def key(self) -> int:
        """The process's ``process_key``."""
        return int(self.part)


def slices(tables: Tables) -> tuple[RankSlice, ...]:
    """The training processes, by process id: those with kernels, else with copies, else with NVTX ranges.

    The rank of a process is in an NVTX mark or known to MPI. The environment in a report is that of ``nsys`` itself, so
    it holds for a process only if there is just one.
    """
    marked = _marked_ranks(tables)
    keys = _training(tables, marked)
    by_mpi = _mpi_ranks(tables)
    names = _process_names(tables)
    launched = _launched_world(tables)
    by_variable = _variable_rank(tables) if len(keys) == 1 else None
    found = []
    for key in keys:
        rank, world_size, rank_source = None, launched, ""
        if key in marked:
            (rank, size), rank_source = marked[key], "NVTX"
            world_size = size or launched
        elif key in by_mpi:
            rank, rank_source = by_mpi[key], "MPI"
            world_size = len(by_mpi) if len(by_mpi) > max(by_mpi.values()) else launched
        elif by_variable is not None:
            rank, size, rank_source = by_variable
            world_size = size or launched
        found.append(RankSlice(str(key), pid_of(key), names.get(key, ""), rank, world_size, rank_source))
    return tuple(found)


def _training(tables: Tables, marked: dict[int, tuple[int, int | None]]) -> list[int]:
    for group in ((KERNELS, GRAPHS), (COPIES, FILLS)):
        busy = {key for table in group for key in tables.count_by(table, "globalPid")}
        if busy:
            return sorted(busy)
    with_ranges: set[int] = set()
    for chunk in tables.read(RANGES, ["eventType", "globalTid"]):
        is_range = np.isin(chunk.integers["eventType"], RANGE_EVENTS)
        with_ranges |= {process_key(tid) for tid in distinct(chunk.integers["globalTid"][is_range]).tolist()}
    # Launchers and loaders may have ranges too; where processes have marked their ranks, only those are ranks.
    return sorted(with_ranges & marked.keys() or with_ranges)


def _marked_ranks(tables: Tables) -> dict[int, tuple[int, int | None]]:
    """Process key -> (rank, world size) by the processes' NVTX marks."""
    marked: dict[int, tuple[int, int | None]] = {}
    for tid, text in read_rows(tables, RANGES, ["globalTid"], ["text"], Prefix("text", NVTX_RANK_PREFIX)):
        if text is not None and (rank := rank_of(text)) is not None:
            marked.setdefault(process_key(tid), rank)
    prefixed = read_rows(tables, STRINGS_TABLE, ["id"], ["value"], Prefix("value", NVTX_RANK_PREFIX))
    registered = {number: rank for number, text in prefixed if text is not None and (rank := rank_of(text)) is not None}
    for chunk in tables.read(RANGES, ["globalTid", "textId"]) if registered else ():
        tids, text_ids = chunk.integers["globalTid"], chunk.integers["textId"]
        hit = np.isin(text_ids, list(registered))
        for tid, text_id in zip(tids[hit].tolist(), text_ids[hit].tolist(), strict=True):
            marked.setdefault(process_key(tid), registered[text_id])
    return marked


def _mpi_ranks(tables: Tables) -> dict[int, int]:
    """Process key -> rank in MPI_COMM_WORLD, in reports of ``nsys profile -t mpi``."""
    rows = read_rows(tables, "MPI_RANKS", ["globalTid", "rank"])
    return {process_key(tid): rank for tid, rank in rows if 0 <= rank < MOST_RANKS}


def _process_names(tables: Tables) -> dict[int, str]:
    return {process_key(pid): name or "" for pid, name in read_rows(tables, "PROCESSES", ["globalPid"], ["name"])}


def _variable_rank(tables: Tables) -> tuple[int, int | None, str] | None:
    """(rank, world size or None, variable) of the environment that ``nsys`` was started in."""
    environment = dict(_environment(tables))
    for variable, size in _VARIABLES:
        rank, world_size = (_NUMBER.fullmatch(environment.get(name, "")) for name in (variable, size))
        if rank:
            return int(rank[0]), int(world_size[0]) if world_size else None, variable
    return None


def _environment(tables: Tables) -> Iterator[tuple[str, str]]:
    for name, value in read_rows(tables, "META_DATA_CAPTURE", [], ["name", "value"]):
        if name is not None and name.endswith(":ENVIRONMENT_VARIABLE"):
            variable, _, text = (value or "").partition("=")
            yield variable, text.strip('"')
    for entry in target_property(tables, "DeviceEnvironment").split(";"):
        variable, _, text = entry.partition("=")
        yield variable, text


def target_property(tables: Tables, name: str) -> str:
    """The machine's property ``name``; empty where the report does not have it."""
    rows = read_rows(tables, "TARGET_INFO_SYSTEM_ENV", [], ["name", "value"], Prefix("name", name))
    return next((value for recorded, value in rows if recorded == name and value), "")


def _launched_world(tables: Tables) -> int | None:
    """World size by the recorded command line of ``torchrun``; None for other commands and for elastic counts."""
    words = [
        value or ""
        for name, value in read_rows(tables, "META_DATA_CAPTURE", [], ["name", "value"], Prefix("name", "PROCESS_0:"))
        if name == "PROCESS_0:COMMAND" or name.startswith("PROCESS_0:ARGUMENT_")
    ]
    start = next((at for at, word in enumerate(words) if _TORCHRUN.search(word)), None)
    if start is None:
        return None
    counts = {"nnodes": "1", "nproc_per_node": "1"}
    for at, word in enumerate(words[start + 1 :], start + 1):
        option = _COUNT_OPTION.match(word)
        if option is None:
            if word.endswith(".py"):
                break  # what follows are the script's own arguments
            continue
        following = words[at + 1] if at + 1 < len(words) else ""
        counts[option[1].replace("-", "_")] = option[2] if option[2] is not None else following
    if not all(_NUMBER.fullmatch(count) for count in counts.values()):
        return None
    world_size = int(counts["nnodes"]) * int(counts["nproc_per_node"])
    return world_size if world_size <= MOST_RANKS else None
