"""The recordings in the folder that is served: found by their files, named by their place, never outside of it."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from perfscope.errors import UnusableInput, did_you_mean
from perfscope.frozen import dataclass
from perfscope.recording import remote
from perfscope.recording.job import Job
from perfscope.recording.role_jobs import open_main

_MOST_FOLDERS: Final = 20_000
"""Folders that a search looks into: a whole file system is no folder of recordings."""
_HEAD_BYTES: Final = 1 << 16
_TRACE: Final = re.compile(rb'"(?:traceEvents|schemaVersion|distributedInfo|deviceProperties|displayTimeUnit)"')
_SUMMARY: Final = b'"perfscope.summary/'


@dataclass(frozen=True)
class Recording:
    """A recording in the folder."""

    name: str
    """As tools name it: its path in the folder, ``.`` for the folder itself; ``recording-1`` … where names are
    hidden."""
    path: Path

    @property
    def is_summary(self) -> bool:
        """Whether it is a result of ``perfscope analyze``, its JSON or its page, which needs no traces."""
        return self.path.is_file() and (self.path.suffix == ".html" or _is_summary(self.path))


class Folder:
    """A folder of recordings. ``anonymize``: their names are numbers."""

    def __init__(self, root: Path, *, anonymize: bool = False) -> None:
        if not root.is_dir():
            raise UnusableInput(f"{root}: no such folder; give the folder that holds the recordings")
        self.root = root.resolve()
        self.anonymize = anonymize

    def recordings(self) -> list[Recording]:
        """Every recording in the folder, by path."""
        found = sorted(self._found(), key=lambda path: (path != self.root, str(path)))
        return [
            Recording(f"recording-{number}" if self.anonymize else self._name(path), path)
            for number, path in enumerate(found, start=1)
        ]

    def find(self, name: str) -> Recording:
        """The recording of that name. Raises UnusableInput where there is none, or where it lies outside."""
        if self.anonymize:
            known = {recording.name: recording for recording in self.recordings()}
            if name not in known:
                raise UnusableInput(f"{name}: no such recording; list_recordings names those that there are")
            return self._inside(known[name])
        try:
            path = (self.root / name).resolve()
        except (OSError, ValueError, RuntimeError) as error:  # a loop of links, a character that no name can have
            raise UnusableInput(f"{name!r}: no name of a recording; list_recordings names them") from error
        if not path.is_relative_to(self.root):
            raise UnusableInput(
                f"{name}: lies outside of the folder that is served; list_recordings names the recordings in it"
            )
        if not path.exists():
            similar = did_you_mean(name, [recording.name for recording in self.recordings()])
            raise UnusableInput(f"{name}: no such recording{similar}; list_recordings names those that there are")
        return self._inside(Recording(self._name(path), path))

    def plain(self, text: str) -> str:
        """A message without the place of the folder: recordings in it as the tools name them."""
        if self.anonymize:
            for recording in reversed(self.recordings()):  # those below a folder come after it
                text = re.sub(rf"{re.escape(str(recording.path))}[^\s:;,'\"]*", recording.name, text)
        return text.replace(f"{self.root}{os.sep}", "").replace(str(self.root), ".")

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _inside(self, recording: Recording) -> Recording:
        """The recording, unless a link among its files leads outside."""
        if any(self._leads_outside(path) for path in files_of(recording.path)):
            raise UnusableInput(
                f"{recording.name}: holds a link to a file outside of the folder that is served; copy what it leads "
                "to, or serve the folder that has both"
            )
        return recording

    def _leads_outside(self, path: Path) -> bool:
        return path.is_symlink() and not path.resolve().is_relative_to(self.root)

    def _found(self) -> Iterator[Path]:
        for place, folders, files in itertools.islice(os.walk(self.root), _MOST_FOLDERS):
            folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
            path = Path(place)
            if any(self._leads_outside(path / name) for name in (*folders, *files)):
                continue
            if _holds_recording(path):
                yield path
            yield from (path / name for name in sorted(files) if name.endswith(".json") and _is_summary(path / name))


def files_of(path: Path) -> Iterator[Path]:
    """The files of a recording: those in its folder and in the folders below; a file is its own."""
    if path.is_file():
        yield path
        return
    for place, folders, files in os.walk(path):
        folders[:] = [folder for folder in folders if not folder.startswith(".")]
        for name in (*files, *(folder for folder in folders if (Path(place) / folder).is_symlink())):
            yield Path(place) / name


def _holds_recording(folder: Path) -> bool:
    try:
        job = open_main(folder)
    except (UnusableInput, OSError):
        return False
    # A folder around a single one is not a recording of its own.
    below = {source.path.parent for source in job.sources}
    return job.path == folder and (folder in below or len(below) != 1) and _is_of_training(job)


def _is_of_training(job: Job) -> bool:
    """Has the job a file that is surely one of a recording? Many a folder holds JSON of another kind."""
    if job.launch is not None or job.runs or job.histories or job.stuck:
        return True
    return any(_is_trace(source.path) for source in job.sources[:3])


def _is_trace(path: Path) -> bool:
    if not path.name.endswith(".json"):
        return True
    try:
        return _TRACE.search(remote.read_head(path, _HEAD_BYTES)) is not None
    except OSError:
        return False


def _is_summary(path: Path) -> bool:
    try:
        return _SUMMARY in remote.read_head(path, 64)
    except OSError:
        return False
