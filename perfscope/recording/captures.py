"""Which trace files belong to one capture, from how tools and frameworks name them; opening none.

One folder may hold several captures of every rank::

    rank0_step10.json rank1_step10.json rank0_step20.json      a number besides the rank's
    node1_4242.1717000000123.pt.trace.json.gz                  torch's tensorboard_trace_handler: worker.time
    iteration_10/rank0_trace.json iteration_20/rank0_trace.json   torchtitan and others: a folder each
    node0/rank0.json node0/rank1.json node1/rank0.json node1/rank1.json   a folder for each host, with its own numbers

Content goes before name: names only decide which files to read together. The rank comes from the trace.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from perfscope.frozen import dataclass
from perfscope.grouping import grouped
from perfscope.recording import paths

_RANK: Final = re.compile(
    r"(?:^|[^a-z]|global)(?<!local[-_.])(?:(?:rank|worker)[-_.=]?(?P<rank>\d{1,6})(?!\d)"
    r"|(?<![^-_.])r(?P<r>\d{1,6})(?![a-z\d]))",
    re.IGNORECASE,
)
"""``rank3``, ``global_rank-3``, ``GlobalRank3``, ``worker_3``, ``r3``; not ``local_rank3``, ``frank3``, ``r3x``."""
_HANDLER: Final = re.compile(r"^(?P<worker>.+)\.(?P<time>\d{10,})\.pt\.trace\.json(?:\.gz)?$")
"""torch.profiler.tensorboard_trace_handler: worker, and the time of writing in ms or ns."""
_HOST: Final = re.compile(r"(?<![a-z])(?:host|node|machine|server)s?[-_.]?(?P<host>\d{1,6})(?!\d)", re.IGNORECASE)
_LOCAL: Final = re.compile(
    r"(?<![a-z])(?:local[-_.]?rank|local|gpu|cuda|device|rank)[-_.=]?(?P<local>\d{1,4})(?!\d)", re.IGNORECASE
)
"""A host's number, and that of one of its ranks or devices, as in ``host0.gpu1.json`` and ``node-0-local-1.json``."""
_HOST_FOLDER: Final = re.compile(
    r"(?:^|[-_.])(?:host|node|machine|server)s?(?:[-_.]|\d|$)|^ip-\d|^\d{1,3}(?:\.\d{1,3}){3}$", re.IGNORECASE
)
"""Names of folders that are hosts': ``node0``, ``host-a``, ``ip-10-0-0-7``, ``10.0.0.7``."""
_NUMBER: Final = re.compile(r"\d+")
_OF_TIME: Final = re.compile(r"(?:step|iter|iteration|epoch|batch|cycle|capture)s?[-_.=]?$", re.IGNORECASE)
"""What stands before a number that counts captures, as in ``trace_step100.json``, and not ranks."""


@dataclass(frozen=True)
class TraceSource:
    """One file that should hold a rank's trace. ``named_rank`` is from its name; content goes before it.

    ``path`` may be remote: an object of universal-pathlib, which behaves like a Path.
    """

    path: Path
    named_rank: int | None
    part: str | None = None
    """Which of the ranks in a file that may hold several (a report of Nsight Systems); None until that is known."""
    execution: Path | None = None
    """PyTorch's execution trace of the same rank and time, where there is one."""


@dataclass(frozen=True)
class Capture:
    """Files that were recorded together, and what their names have in common."""

    label: str
    sources: tuple[TraceSource, ...]


def rank_in_name(path: Path) -> int | None:
    """The rank that a file's name states (``rank3.json``, ``trace_rank-3.json.gz``); None when it states none."""
    named = paths.rank_and_capture_of_trace_file(path)
    if named is not None:
        return named[0]
    match = _RANK.search(path.name)
    return int(match["rank"] or match["r"]) if match else None


def worker_in_name(path: Path) -> str | None:
    """Who wrote a file, host and process, where ``tensorboard_trace_handler`` named it."""
    match = _HANDLER.match(path.name)
    return match["worker"] if match else None


def captures_of_files(files: Sequence[Path]) -> list[Capture]:
    """The captures that the files of one folder belong to, in order. One, without a label, where names show none."""
    sources = _with_ranks(files)
    if all(source.named_rank is None for source in sources) and _number_steps(files):
        in_order = sorted(sources, key=lambda source: natural(source.path.name))
        return [Capture(source.path.name, (source,)) for source in in_order]
    by_owner = grouped((_owner(source), source) for source in sources)
    if all(len(owned) == 1 for owned in by_owner.values()):
        return [Capture("", tuple(sources))]
    by_template = grouped((_template(source), source) for source in sources)
    if len(by_template) == len(sources):  # times of writing differ from rank to rank: count them off
        return _counted_off(by_owner)
    return [Capture(label, tuple(by_template[label])) for label in sorted(by_template, key=natural)]


def captures_of_folders(folders: dict[str, list[Path]]) -> list[Capture] | None:
    """The captures in sub-folders, by the folders' names; None where names do not show how they belong together.

    Folders of ranks or nodes (no rank in two of them) are one capture, and so are folders of hosts that each number
    their own ranks; others that are named alike but for a number are one each.
    """
    if len(folders) == 1:
        return captures_of_files(next(iter(folders.values())))
    ranks = [_ranks_in(Path(name), files) for name, files in folders.items()]
    if all(known is not None for known in ranks):
        every = [rank for known in ranks for rank in known or ()]
        if len(every) == len(set(every)):
            together = [
                TraceSource(path, rank)
                for (_, files), known in zip(folders.items(), ranks, strict=True)
                for path, rank in zip(files, known or (), strict=True)
            ]
            return [Capture("", tuple(together))]
    if all(_HOST_FOLDER.search(name) for name in folders) and (hosts := _of_host_folders(folders)):
        return hosts
    if len({_NUMBER.sub("#", name) for name in folders}) == 1:
        return [
            Capture(name, capture.sources)
            for name in sorted(folders, key=natural)
            # Several in one folder: the last whole one stands for it.
            for capture in [last_full(captures_of_files(folders[name]))]
        ]
    return None


def last_full(captures: Sequence[Capture]) -> Capture:
    """The last of the captures that most ranks wrote."""
    most = max(len(capture.sources) for capture in captures)
    return [capture for capture in captures if len(capture.sources) == most][-1]


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts ``iteration_9`` before ``iteration_10``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _with_ranks(files: Sequence[Path]) -> list[TraceSource]:
    """The files with the ranks that their names state, or that they number from 0 without a gap: ``profile_3.json``
    (accelerate), ``gpu3_trace.json.gz``, ``3.json``.
    """
    ranks = [rank_in_name(path) for path in files]
    if (of_hosts := _ranks_on_hosts(files)) is not None:
        ranks = list(of_hosts)
    elif all(rank is None for rank in ranks):
        counted = _counted(files)
        # Others number something else, such as processes.
        if counted is not None and not _number_steps(files) and sorted(counted[1]) == list(range(len(files))):
            ranks = list(counted[1])
    return [TraceSource(path, rank) for path, rank in zip(files, ranks, strict=True)]


def _ranks_on_hosts(files: Sequence[Path]) -> list[int] | None:
    """The files' ranks where each name has the number of a host and of one of its ranks, which several hosts have."""
    found = [(_HOST.search(path.name), _LOCAL.search(path.name)) for path in files]
    places = [(int(host["host"]), int(local["local"])) for host, local in found if host and local]
    if len(places) < len(files) or len({local for _, local in places}) == len(set(places)):
        return None
    return across_hosts([host for host, _ in places], [local for _, local in places])


def across_hosts(hosts: Sequence[int], locals_: Sequence[int]) -> list[int]:
    """Ranks of the job in the order of hosts, and of their own ranks on each, which are as many on all.

    Example: hosts 3, 3, 5, 5 with their ranks 0, 1, 0, 1 have ranks 0, 1, 2, 3.
    """
    places = {host: place for place, host in enumerate(sorted(set(hosts)))}
    first, size = min(locals_), max(locals_) - min(locals_) + 1
    return [places[host] * size + local - first for host, local in zip(hosts, locals_, strict=True)]


def _of_host_folders(folders: dict[str, list[Path]]) -> list[Capture] | None:
    """The captures in folders of hosts, each with the ranks of one host; None where a file's rank is not known."""
    by_host = [captures_of_files(folders[name]) for name in sorted(folders, key=natural)]
    if len({len(captures) for captures in by_host}) > 1:
        by_host = [[last_full(captures)] for captures in by_host]
    found = []
    for of_all in zip(*by_host, strict=True):
        owned = [
            (host, 0 if source.named_rank is None and len(capture.sources) == 1 else source.named_rank, source.path)
            for host, capture in enumerate(of_all)
            for source in capture.sources
        ]
        known = [(host, local, path) for host, local, path in owned if local is not None]
        if len(known) < len(owned):
            return None
        ranks = across_hosts([host for host, _, _ in known], [local for _, local, _ in known])
        sources = tuple(TraceSource(path, rank) for rank, (_, _, path) in zip(ranks, known, strict=True))
        found.append(Capture(of_all[0].label, sources))
    return found


def _counted(files: Sequence[Path]) -> tuple[str, list[int]] | None:
    """(what stands before it, the number of each file), where names differ in one number; None for others."""
    if len(files) < 2:
        return None
    parts = [re.split(r"(\d+)", path.name) for path in files]
    if len({len(each) for each in parts}) > 1:
        return None
    differing = [place for place, column in enumerate(zip(*parts, strict=True)) if len(set(column)) > 1]
    if len(differing) != 1 or differing[0] % 2 == 0:
        return None
    (place,) = differing
    return "".join(parts[0][:place]), [int(each[place]) for each in parts]


def _number_steps(files: Sequence[Path]) -> bool:
    """Do their names differ in the number of a step, or of another time at which one rank was recorded?"""
    counted = _counted(files)
    return counted is not None and _OF_TIME.search(counted[0]) is not None


def _owner(source: TraceSource) -> str:
    """Who wrote a file, as far as its name shows; two files of one owner are two captures."""
    if source.named_rank is not None:
        return f"rank {source.named_rank}"
    return worker_in_name(source.path) or source.path.name


def _template(source: TraceSource) -> str:
    """A file's name without its rank."""
    return _RANK.sub(lambda match: _NUMBER.sub("N", match[0]), source.path.name)


def _counted_off(by_owner: dict[str, list[TraceSource]]) -> list[Capture]:
    """Every owner's first file, every owner's second …; who has fewer is missing from the later ones."""
    rows = [sorted(owned, key=lambda source: natural(source.path.name)) for owned in by_owner.values()]
    return [
        Capture(f"file {index + 1} of each", tuple(row[index] for row in rows if index < len(row)))
        for index in range(max(map(len, rows)))
    ]


def _ranks_in(folder: Path, files: Sequence[Path]) -> list[int] | None:
    """The files' ranks by their own names, or by the folder's where it holds one file; None where neither holds it."""
    ranks = [source.named_rank for source in _with_ranks(files)]
    if len(files) == 1 and ranks[0] is None:
        ranks = [rank_in_name(folder)]
    return None if any(rank is None for rank in ranks) else [rank for rank in ranks if rank is not None]
