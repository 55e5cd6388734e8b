"""A run to compare: a recording or traces to analyze, or the summary that an analysis has written."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from perfscope import remote
from perfscope.analyzers.analyze import analyze
from perfscope.summary import Summary
from perfscope.summary_file import load_summary

_MARK: Final = b'"perfscope.summary/'


@dataclass(frozen=True)
class Run:
    """A summary and where it came from."""

    summary: Summary
    path: str | None
    """Traces that can be played again; None where only the summary is at hand."""
    name: str


def load(recording: str | Path | Summary, *, capture: int | None = None, workers: int | None = None) -> Run:
    """Analyze a recording, or read the summary that ``analyze --json`` wrote of it.

    Raises UnusableInput, naming the path and the remedy.
    """
    if isinstance(recording, Summary):
        return Run(recording, None, recording.source)
    path = str(recording)
    if not remote.is_url(path) and is_summary(Path(path)):
        return Run(load_summary(path), None, path)
    return Run(analyze(path, capture=capture, workers=workers), path, path)


def is_summary(path: Path) -> bool:
    """Is this file a summary, rather than a trace? Both may end in .json; only one names the schema."""
    if path.suffix != ".json" or not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(_MARK) >= 0


def labels(runs: Sequence[Run]) -> list[str]:
    """A short name for each run, all different: the end of its path, as much of it as it takes."""
    paths = [PurePosixPath(run.name.rstrip("/").replace("\\", "/")) for run in runs]
    parts = [(path.with_suffix("") if path.suffix == ".json" else path).parts or ("run",) for path in paths]
    for depth in range(1, max(len(part) for part in parts) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, start=1)]
