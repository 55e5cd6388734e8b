"""Which ranks share a host: by the host's name where recorded, else by how their devices are numbered."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import field
from pathlib import Path
from typing import Final

from perfscope.analyzers.rank.partial import RankPartial
from perfscope.frozen import dataclass
from perfscope.recording.metadata import RunMetadata

NAMELESS: Final = "host of ranks "
"""How hosts are called whose names are not recorded."""

_NAMELESS: Final = re.compile(r"^(localhost(\..*)?|127\..*|::1|\(none\))?$")
"""Names that every machine has for itself."""

_HANDLER: Final = re.compile(r"^(?P<host>.+)_(?P<process>\d+)\.\d{10,}\.pt\.trace\.json(?:\.\w+)?$")
"""torch.profiler.tensorboard_trace_handler writes ``{host}_{process id}.{time}.pt.trace.json``, unless its user names
the worker: ``worker0_step_12.{time}.pt.trace.json`` has the same form. So the name counts only where the trace's own
events come from that process."""

_NO_HOST: Final = re.compile(r"(.*[-_.])?rank[-_.]?\d*|worker|r", re.IGNORECASE)
"""Names that users give to workers: ``rank3``, ``worker_3``. A host may be called ``job-worker-3``."""


@dataclass(frozen=True)
class Hosts:
    """Rank -> its host, and how that is known. Ranks with an unknown host are left out."""

    names: Mapping[int, str] = field(default_factory=dict)
    source: str = ""
    """``recorded``, ``file names``, ``device numbers``; empty: not known."""


def find_hosts(partials: Mapping[int, RankPartial], runs: Mapping[int, RunMetadata], world_size: int | None) -> Hosts:
    """The hosts of all ranks, by the first source that has every rank's; else those that are recorded."""
    recorded = {rank: _name(rank, partial, runs) for rank, partial in partials.items()}
    if all(recorded.values()):
        return Hosts(recorded, "recorded")
    devices = {rank: partial.devices[0].index for rank, partial in partials.items() if len(partial.devices) == 1}
    numbered = hosts_by_device(devices, world_size) if len(devices) == len(partials) else {}
    by_file = {rank: host_in_file_name(partial.source, partial.processes) for rank, partial in partials.items()}
    if all(by_file.values()) and not _splits(by_file, numbered):
        return Hosts(by_file, "file names")
    if numbered and not any(recorded.values()):
        return Hosts(numbered, "device numbers")
    named = {rank: host for rank, host in recorded.items() if host}
    return Hosts(named, "recorded" if named else "")


def _name(rank: int, partial: RankPartial, runs: Mapping[int, RunMetadata]) -> str:
    recorded = (runs[rank].host if rank in runs else "") or partial.host
    return "" if _NAMELESS.match(recorded) else recorded


def _splits(by_file: Mapping[int, str], numbered: Mapping[int, str]) -> bool:
    """Do the names of files part ranks whose devices count up as on one host? Then they name workers, not hosts."""
    return len(set(zip(numbered.values(), (by_file[rank] for rank in numbered), strict=True))) > len(
        set(numbered.values())
    )


def host_in_file_name(path: str, processes: Collection[int]) -> str:
    """The host in a file's name as torch's own handler writes it; ``processes`` are the ids of those in the trace.

    Empty where the name has another form, its process is none of them, or it names no host.
    """
    match = _HANDLER.match(Path(path).name)
    host = match["host"] if match is not None and int(match["process"]) in processes else ""
    return "" if _NAMELESS.match(host) or _NO_HOST.fullmatch(host) else host


def hosts_by_device(devices: Mapping[int, int], world_size: int | None) -> dict[int, str]:
    """Rank -> a name for its host, where the ranks' devices count up and begin again: 0 1 2 3 0 1 2 3 are two hosts.

    Empty where they do not, where the number at which they begin again is not visible, and where all ranks have the
    same number: each may see only its own device.
    """
    lowest = min(devices.values(), default=0)
    each = max(devices.values(), default=0) - lowest + 1
    if each < 2 or any(index - lowest != rank % each for rank, index in devices.items()):
        return {}
    turns = any(all(first + place in devices for place in range(each + 1)) for first in devices if first % each == 0)
    if not turns and not set(devices) <= set(range(each)):
        return {}
    size = world_size or max(devices) + 1
    return {rank: f"{NAMELESS}{rank // each * each}-{min(rank // each * each + each, size) - 1}" for rank in devices}
