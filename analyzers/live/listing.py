"""Which files of a recording a folder holds: each name is looked at once, however often the folder is listed."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import field
from pathlib import Path
from typing import NamedTuple

from perfscope.frozen import dataclass
from perfscope.recording import paths


@dataclass(frozen=True)
class Listing:
    """The files of a recording, by what they are."""

    steps: dict[str, int] = field(default_factory=dict)
    """Name -> rank, as are the others."""
    runs: dict[str, int] = field(default_factory=dict)
    stuck: dict[str, int] = field(default_factory=dict)
    """Stacks and dumps of ranks that stood still."""
    captures: dict[str, int] = field(default_factory=dict)
    """Name of a trace -> number of its capture."""
    samples: dict[str, int] = field(default_factory=dict)
    """Name -> 0."""
    further: dict[str, int] = field(default_factory=dict)
    """Folder of a further training of the command -> its number."""


class _Known(NamedTuple):
    kind: str
    """A field of :class:`Listing`."""
    number: int


def listing(names: Iterable[str]) -> Listing:
    """Sort out the names in a folder; all others are left out."""
    found = Listing()
    for name in names:
        if (known := _known(name)) is not None:
            getattr(found, known.kind)[name] = known.number
    return found


@functools.lru_cache(maxsize=1 << 18)
def _known(name: str) -> _Known | None:
    path = Path(name)
    if name.startswith("job-") and name[4:].isdecimal():
        return _Known("further", int(name[4:]))
    if paths.is_samples_file(path):
        return _Known("samples", 0)
    if (capture := paths.rank_and_capture_of_trace_file(path)) is not None:
        return _Known("captures", capture[1])
    numbered = (
        ("steps", paths.rank_of_steps_file),
        ("runs", paths.rank_of_run_file),
        ("stuck", paths.rank_of_stacks_file),
        ("stuck", paths.rank_of_flight_file),
    )
    for kind, rank_of in numbered:
        if (rank := rank_of(path)) is not None:
            return _Known(kind, rank)
    return None
