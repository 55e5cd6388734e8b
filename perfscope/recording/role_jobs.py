"""Folders of several roles: each role's files as a job of its own, never several in one job.

``open_main`` opens what is to be analyzed, like ``job.open_job``; where names (``roles``) or the ranks' metadata state
several roles, the job of the one that trains, with all of them in ``Job.roles``. ``unnamed_jobs`` are jobs of which
only their times can say whether they ran together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from perfscope.errors import UnusableInput
from perfscope.grouping import grouped
from perfscope.recording import paths
from perfscope.recording.captures import captures_of_files, last_full, natural
from perfscope.recording.job import (
    NSYS_EXPORT_SUFFIX,
    NSYS_REPORT_SUFFIXES,
    TRACE_SUFFIXES,
    Job,
    RoleJob,
    files_in,
    is_recording_file,
    open_job,
    traces_in,
)
from perfscope.recording.roles import instances, main_role, role_in_name, roles_of_files, roles_of_folders

_SUFFIXES = (*TRACE_SUFFIXES, *NSYS_REPORT_SUFFIXES, NSYS_EXPORT_SUFFIX)


def open_main(path: Path, capture: int | None = None, role: str | None = None) -> Job:
    """The job to analyze in ``path``: of several roles the one that trains, unless ``role`` names another.

    Raises UnusableInput, naming the path and the remedy, when there is nothing to read or no such role.
    """
    roles = named_roles(path, capture) if path.is_dir() else []
    if role is not None and not any(role in (each.name, each.role) for each in roles):
        there = ", ".join(each.name for each in roles)
        raise UnusableInput(f"{path}: no role {role}; {f'choose from {there}' if there else 'no file states a role'}")
    if not roles:
        return open_job(path, capture)
    trains = main_role(each.role for each in roles)
    wanted = [each for each in roles if (role or trains) in (each.name, each.role)]
    main = max(wanted, key=lambda each: len(each.job.sources))
    return replace(main.job, role=main.name, roles=tuple(roles) if role is None else ())


def named_roles(folder: Path, capture: int | None = None) -> list[RoleJob]:
    """The jobs of a folder whose names or metadata state two roles or more; empty where they do not."""
    entries = sorted(folder.iterdir(), key=lambda entry: natural(entry.name))
    files = [entry for entry in entries if entry.name.endswith(_SUFFIXES)]
    below = [entry for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    if any(map(is_recording_file, entries)):
        return _recorded([folder, *paths.further_jobs(folder)], capture)
    if files:
        return _in_files(folder) if roles_of_files(files) else []
    if len(below) == 1:
        return named_roles(below[0], capture)
    by_role = roles_of_folders(entry.name for entry in below if _holds_traces(entry))
    if by_role is None:
        return _recorded([entry for entry in below if _is_recording(entry)], capture)
    return _named(_in_folders(folder, by_role, capture))


def unnamed_jobs(folder: Path, capture: int | None = None) -> list[RoleJob]:
    """Further trainings of a command, or sub-folders with traces, of which no name says how they belong together.

    Each is named after its folder; the first is the one that ``open_job`` takes where there is one.
    """
    further = paths.further_jobs(folder)
    if not further and any(map(is_recording_file, folder.iterdir())):
        return []
    folders = [folder, *further] if further else sorted(entry for entry in folder.iterdir() if entry.is_dir())
    opened = _opened(folders, capture)
    return [RoleJob("job-0" if place == folder else place.name, "", job) for place, job in opened]


def _recorded(folders: Sequence[Path], capture: int | None) -> list[RoleJob]:
    """Recordings whose ranks wrote their role into their metadata."""
    if len(folders) < 2:
        return []
    jobs = [(_role_of(job), job) for _, job in _opened(folders, capture)]
    return _named(jobs) if len({role for role, _ in jobs if role}) > 1 else []


def _role_of(job: Job) -> str:
    return next((run.role for run in job.runs.values() if run.role), "")


def _in_files(folder: Path) -> list[RoleJob]:
    """Roles in the names of one folder's files."""
    names = [entry for entry in files_in(folder) if not is_recording_file(entry)]
    by_role = roles_of_files(traces_in(folder, names)) or {}
    jobs = ((role, Job(folder, last_full(captures_of_files(files)).sources)) for role, files in by_role.items())
    return _named(jobs)


def _in_folders(folder: Path, by_role: dict[str, list[str]], capture: int | None) -> Iterable[tuple[str, Job]]:
    for role, names in by_role.items():
        for steps in instances(names):
            # Of folders that differ by the number of a step alone the last.
            place = folder / max(steps, key=natural)
            inside = _in_files(place) if not role or role == "e2e" else []
            if inside:
                yield from ((each.role, each.job) for each in inside)
            else:
                yield from ((role or place.name, job) for _, job in _opened([place], capture))


def _named(jobs: Iterable[tuple[str, Job]]) -> list[RoleJob]:
    """Each with a name of its own: its role, and a number where it has several instances."""
    named = []
    for role, mine in grouped(jobs).items():
        shown = role or "other"
        numbers = [f"-{number}" for number in range(len(mine))] if len(mine) > 1 else [""]
        named += [RoleJob(f"{shown}{number}", shown, job) for number, job in zip(numbers, mine, strict=True)]
    return named


def _opened(folders: Iterable[Path], capture: int | None) -> list[tuple[Path, Job]]:
    """Those of the folders that hold traces."""
    opened = []
    for folder in folders:
        with suppress(UnusableInput):
            job = open_job(folder, capture)
            opened.append((folder, job))
    return [(folder, job) for folder, job in opened if job.sources]


def _holds_traces(folder: Path) -> bool:
    return any(entry.name.endswith(_SUFFIXES) for entry in folder.iterdir()) or bool(role_in_name(folder.name))


def _is_recording(folder: Path) -> bool:
    return any(map(is_recording_file, folder.iterdir()))
