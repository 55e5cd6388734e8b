"""Job: every rank of one run, by path. Opening one reads metadata and names, no trace."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from perfscope import metadata, paths
from perfscope.errors import UnusableInput
from perfscope.metadata import LaunchRecord, RunMetadata

TRACE_SUFFIXES: Final = (".json", ".json.gz", ".json.zip", ".zip", ".gz")
NSYS_SUFFIXES: Final = (".nsys-rep", ".qdrep", ".sqlite")

_RANK_IN_NAME = re.compile(r"(?:^|[^a-z])rank[-_.]?(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class TraceSource:
    """One file that should hold one rank's trace. ``named_rank`` is what its name says; content goes before it."""

    path: Path
    named_rank: int | None


@dataclass(frozen=True)
class Problem:
    """A file that cannot be used, and why; ``rank`` None when not known."""

    rank: int | None
    path: Path
    error: str


@dataclass(frozen=True)
class Job:
    """The files of one run."""

    path: Path
    sources: tuple[TraceSource, ...]
    runs: dict[int, RunMetadata] = field(default_factory=dict)
    """Rank -> what it wrote beside its trace; empty for traces of other tools."""
    launch: LaunchRecord | None = None
    captures: tuple[int, ...] = ()
    """Captures found in a recording; ``capture`` is the one whose files ``sources`` lists."""
    capture: int | None = None
    problems: tuple[Problem, ...] = ()


def open_job(path: Path, capture: int | None = None) -> Job:
    """Find the files of a run: a recording's folder, any folder of traces, or one trace file.

    ``capture`` chooses among the captures of a recording; the last one that most ranks wrote is the default.
    Raises UnusableInput, naming the path and the remedy, when there is nothing to read.
    """
    if not path.exists():
        raise UnusableInput(f"{path}: no such file or folder")
    if path.is_file():
        return Job(path, (TraceSource(path, rank_in_name(path)),))
    names = sorted(
        entry for entry in path.iterdir() if entry.is_file() and not _is_partial(entry) and not _is_own_result(entry)
    )
    if any(_is_recording_file(entry) for entry in names):
        return _open_recording(path, names, capture)
    return _open_folder(path, names)


def rank_in_name(path: Path) -> int | None:
    """The rank that a file's name states (``rank3.json``, ``trace_rank-3.json.gz``); None when it states none."""
    named = paths.rank_and_capture_of_trace_file(path)
    if named is not None:
        return named[0]
    match = _RANK_IN_NAME.search(path.name)
    return int(match[1]) if match else None


def _is_partial(entry: Path) -> bool:
    return entry.name.endswith(paths.PARTIAL_SUFFIX)


def _is_own_result(entry: Path) -> bool:
    """A result that ``perfscope analyze --json`` wrote among the traces."""
    if not entry.name.endswith(".json"):
        return False
    with entry.open("rb") as stream:
        return b'"perfscope.summary/' in stream.read(64)


def _is_recording_file(entry: Path) -> bool:
    return (
        entry.name == paths.LAUNCH_FILE
        or paths.rank_of_run_file(entry) is not None
        or paths.rank_and_capture_of_trace_file(entry) is not None
    )


def _open_recording(folder: Path, names: list[Path], capture: int | None) -> Job:
    problems: list[Problem] = []
    launch = _launch(folder, problems)
    runs: dict[int, RunMetadata] = {}
    for entry in names:
        rank = paths.rank_of_run_file(entry)
        if rank is not None:
            try:
                runs[rank] = metadata.load_run(entry)
            except ValueError as error:
                problems.append(Problem(rank, entry, str(error)))
    captures: dict[int, dict[int, Path]] = {}
    for entry in names:
        found = paths.rank_and_capture_of_trace_file(entry)
        if found is not None:
            # The compressed file replaces the plain one; where a kill left both, they hold the same.
            captures.setdefault(found[1], {}).setdefault(found[0], entry)
    if not captures:
        raise UnusableInput(_nothing_recorded(folder, launch, runs))
    chosen = _choose_capture(folder, captures, capture)
    sources = tuple(TraceSource(entry, rank) for rank, entry in sorted(captures[chosen].items()))
    return Job(folder, sources, runs, launch, tuple(sorted(captures)), chosen, tuple(problems))


def _launch(folder: Path, problems: list[Problem]) -> LaunchRecord | None:
    path = folder / paths.LAUNCH_FILE
    if not path.exists():
        return None
    try:
        return metadata.load_launch(path)
    except ValueError as error:
        problems.append(Problem(None, path, str(error)))
        return None


def _choose_capture(folder: Path, captures: dict[int, dict[int, Path]], wanted: int | None) -> int:
    if wanted is None:
        return max(captures, key=lambda index: (len(captures[index]), index))
    if wanted not in captures:
        there = ", ".join(str(index) for index in sorted(captures))
        raise UnusableInput(f"{folder}: no capture {wanted}; the recording has {there}")
    return wanted


def _nothing_recorded(folder: Path, launch: LaunchRecord | None, runs: dict[int, RunMetadata]) -> str:
    """Why a recording holds no trace, from what its ranks wrote, and what to do."""
    if not runs:
        ended = f" (the command ended with {launch.exit_code})" if launch and launch.exit_code else ""
        return (
            f"{folder}: no rank recorded anything{ended}: no process took an optimizer step under perfscope run. If "
            "the training loop does not use torch.optim, call perfscope.step() at the end of every step"
        )
    steps = max(run.steps.seen for run in runs.values())
    problems = sorted({problem for run in runs.values() for problem in run.problems})
    told = f" The ranks reported: {' '.join(problems)}" if problems else ""
    if steps == 0:
        return (
            f"{folder}: the ranks never took an optimizer step. Call perfscope.step() at the end of every step.{told}"
        )
    return (
        f"{folder}: the job ended after {steps} steps, before a step was recorded; record earlier: "
        f"perfscope run --wait 1 --warmup 0 --active {max(steps - 1, 1)} …{told}"
    )


def _open_folder(folder: Path, names: list[Path]) -> Job:
    problems = [
        Problem(
            rank_in_name(entry),
            entry,
            "an Nsight Systems file: this version reads Chrome traces only; record with torch.profiler or "
            "perfscope run",
        )
        for entry in names
        if entry.name.endswith(NSYS_SUFFIXES)
    ]
    sources = tuple(TraceSource(entry, rank_in_name(entry)) for entry in names if entry.name.endswith(TRACE_SUFFIXES))
    if sources:
        return Job(folder, sources, problems=tuple(problems))
    if problems:
        raise UnusableInput(f"{problems[0].path}: {problems[0].error}")
    below = sorted({entry.parent for suffix in TRACE_SUFFIXES for entry in folder.glob(f"*/*{suffix}")})
    hint = f"; traces lie in {', '.join(str(entry) for entry in below[:5])}: name one of these" if below else ""
    raise UnusableInput(
        f"{folder}: no trace in this folder (looked for {', '.join(TRACE_SUFFIXES)})"
        f"{hint or '; record one: perfscope run'}"
    )
