"""Which processes of an Nsight Systems report trained, and which rank each of them says it is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.analyzers.readers.nsys_names import rank_of
from perfscope.analyzers.readers.nsys_tables import STRINGS_TABLE, Prefix, Tables, pid_of, process_key
from perfscope.trace import Int64
from perfscope.vocabulary import NVTX_RANK_PREFIX

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
"""Where launchers say rank and world size, the one nearest to the process first."""

_TORCHRUN: Final = re.compile(r"(?:^|/)torchrun$|^torch\.distributed\.(?:run|launch)$")
_COUNT_OPTION: Final = re.compile(r"^--?(nnodes|nproc[-_]per[-_]node)(?:=(.*))?$")


@dataclass(frozen=True)
class RankSlice:
    """One process of a report that trained."""

    part: str
    """Names the process among those of its report."""
    pid: int
    name: str
    """The process's name as recorded; empty where it is not."""
    rank: int | None
    """None where nothing recorded says it."""
    world_size: int | None
    said_by: str
    """What said the rank: ``NVTX``, ``MPI``, an environment variable's name; empty where nothing did."""

    @property
    def key(self) -> int:
        """The process's ``process_key``."""
        return int(self.part)


def slices(tables: Tables) -> tuple[RankSlice, ...]:
    """The processes that trained, by process id: those with kernels, else with copies, else with NVTX ranges.

    A process says its rank in an NVTX mark or to MPI. The environment that a report records is the one that ``nsys``
    itself was started in, so it speaks for a process only where that is the only one.
    """
    marked = _marked_ranks(tables)
    keys = _training(tables, marked)
    by_mpi = _mpi_ranks(tables)
    names = _process_names(tables)
    launched = _launched_world(tables)
    by_variable = _variable_rank(tables) if len(keys) == 1 else None
    found = []
    for key in keys:
        rank, world_size, said_by = None, launched, ""
        if key in marked:
            (rank, size), said_by = marked[key], "NVTX"
            world_size = size or launched
        elif key in by_mpi:
            rank, said_by = by_mpi[key], "MPI"
            world_size = len(by_mpi) if len(by_mpi) > max(by_mpi.values()) else launched
        elif by_variable is not None:
            rank, size, said_by = by_variable
            world_size = size or launched
        found.append(RankSlice(str(key), pid_of(key), names.get(key, ""), rank, world_size, said_by))
    return tuple(found)


def _training(tables: Tables, marked: dict[int, tuple[int, int | None]]) -> list[int]:
    for group in ((KERNELS, GRAPHS), (COPIES, FILLS)):
        busy = {key for table in group for key in tables.count_by(table, "globalPid")}
        if busy:
            return sorted(busy)
    with_ranges: set[int] = set()
    for chunk in tables.read(RANGES, ["eventType", "globalTid"]):
        is_range = np.isin(chunk.integers["eventType"], RANGE_EVENTS)
        with_ranges |= {process_key(tid) for tid in np.unique(chunk.integers["globalTid"][is_range]).tolist()}
    # Launchers and loaders may have ranges of their own; where ranks have made themselves known, these are the ranks.
    return sorted(with_ranges & marked.keys() or with_ranges)


def _marked_ranks(tables: Tables) -> dict[int, tuple[int, int | None]]:
    """Process key -> (rank, world size) as processes say in NVTX."""
    said: dict[int, tuple[int, int | None]] = {}
    for chunk in tables.read(RANGES, ["globalTid"], ["text"], Prefix("text", NVTX_RANK_PREFIX)):
        for tid, text in zip(chunk.integers["globalTid"].tolist(), chunk.texts["text"], strict=True):
            if text is not None and (rank := rank_of(text)) is not None:
                said.setdefault(process_key(tid), rank)
    registered: dict[int, tuple[int, int | None]] = {}
    for chunk in tables.read(STRINGS_TABLE, ["id"], ["value"], Prefix("value", NVTX_RANK_PREFIX)):
        for number, text in zip(chunk.integers["id"].tolist(), chunk.texts["value"], strict=True):
            if text is not None and (rank := rank_of(text)) is not None:
                registered[number] = rank
    if registered:
        for chunk in tables.read(RANGES, ["globalTid", "textId"]):
            for tid, text_id in _rows(chunk.integers["globalTid"], chunk.integers["textId"], registered):
                said.setdefault(process_key(tid), registered[text_id])
    return said


def _rows(tids: Int64, text_ids: Int64, wanted: dict[int, tuple[int, int | None]]) -> Iterator[tuple[int, int]]:
    hit = np.isin(text_ids, list(wanted))
    yield from zip(tids[hit].tolist(), text_ids[hit].tolist(), strict=True)


def _mpi_ranks(tables: Tables) -> dict[int, int]:
    """Process key -> rank in MPI_COMM_WORLD, in reports of ``nsys profile -t mpi``."""
    ranks: dict[int, int] = {}
    for chunk in tables.read("MPI_RANKS", ["globalTid", "rank"]):
        for tid, rank in zip(chunk.integers["globalTid"].tolist(), chunk.integers["rank"].tolist(), strict=True):
            if rank >= 0:
                ranks[process_key(tid)] = rank
    return ranks


def _process_names(tables: Tables) -> dict[int, str]:
    names: dict[int, str] = {}
    for chunk in tables.read("PROCESSES", ["globalPid"], ["name"]):
        for number, name in zip(chunk.integers["globalPid"].tolist(), chunk.texts["name"], strict=True):
            names[process_key(number)] = name or ""
    return names


def _variable_rank(tables: Tables) -> tuple[int, int | None, str] | None:
    """(rank, world size if said, variable) of the environment that ``nsys`` was started in."""
    environment = dict(_environment(tables))
    for variable, size in _VARIABLES:
        if environment.get(variable, "").isdecimal():
            world_size = environment.get(size, "")
            return int(environment[variable]), int(world_size) if world_size.isdecimal() else None, variable
    return None


def _environment(tables: Tables) -> Iterator[tuple[str, str]]:
    for chunk in tables.read("META_DATA_CAPTURE", [], ["name", "value"]):
        for name, value in zip(chunk.texts["name"], chunk.texts["value"], strict=True):
            if name is not None and name.endswith(":ENVIRONMENT_VARIABLE"):
                variable, _, text = (value or "").partition("=")
                yield variable, text.strip('"')
    for entry in target_property(tables, "DeviceEnvironment").split(";"):
        variable, _, text = entry.partition("=")
        yield variable, text


def target_property(tables: Tables, name: str) -> str:
    """What the report says of the machine under ``name``; empty where it does not."""
    for chunk in tables.read("TARGET_INFO_SYSTEM_ENV", [], ["name", "value"], Prefix("name", name)):
        for found, value in zip(chunk.texts["name"], chunk.texts["value"], strict=True):
            if found == name and value:
                return value
    return ""


def _launched_world(tables: Tables) -> int | None:
    """World size that the recorded command line asked ``torchrun`` for; None for any other, and for elastic counts."""
    words = []
    for chunk in tables.read("META_DATA_CAPTURE", [], ["name", "value"], Prefix("name", "PROCESS_0:")):
        for name, value in zip(chunk.texts["name"], chunk.texts["value"], strict=True):
            if name is not None and (name == "PROCESS_0:COMMAND" or name.startswith("PROCESS_0:ARGUMENT_")):
                words.append(value or "")
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
    if not all(count.isdecimal() for count in counts.values()):
        return None
    return int(counts["nnodes"]) * int(counts["nproc_per_node"])
