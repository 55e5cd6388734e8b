"""Turns Nsight Systems reports into SQLite exports with the user's own ``nsys``, the only tool that reads them."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from perfscope.errors import TraceError
from perfscope.execution.cache import Cache
from perfscope.recording.job import NSYS_REPORT_SUFFIXES

_UNFINISHED_SUFFIX: Final = ".qdstrm"
"""The raw stream of a session that has no report yet."""
_SUBFOLDER: Final = "nsys"
"""In the cache: exports have a limit of their own, because one may be as large as everything else."""
_SHOWN_CHARACTERS: Final = 500


def is_report(path: Path) -> bool:
    """Whether it is a report (by its name, because the format is ``nsys``'s own), not an export."""
    return path.name.endswith(NSYS_REPORT_SUFFIXES) and path.is_file()


def find_nsys() -> str | None:
    """The user's ``nsys``: ``PERFSCOPE_NSYS``, else the one on the path; None where there is none."""
    named = os.environ.get("PERFSCOPE_NSYS")
    return shutil.which(named or "nsys")


def export_of(report: Path) -> Path:
    """The SQLite export of a report, made now unless this very file was exported before.

    Exports are in the user's cache (``perfscope.execution.cache``); where that is off, in a temporary folder until this
    process ends. Raises TraceError where there is no ``nsys``, or where it fails, with its output.
    """
    if report.name.endswith(_UNFINISHED_SUFFIX):
        raise TraceError(
            f"{report}: the session ended before its report was made; make it with QdstrmImporter from the host folder "
            "of Nsight Systems, then analyze the .nsys-rep"
        )
    cache = Cache.from_environment()
    folder = _folder(report, cache)
    export = folder / f"{report.name}-{_key(report)}.sqlite"
    if export.exists():
        os.utime(export)
        return export
    _run(report, export)
    if cache is not None:
        _forget_oldest(folder, export, cache.limit_bytes)
    else:
        atexit.register(_remove, export, os.getpid())
    return export


def _folder(report: Path, cache: Cache | None) -> Path:
    """Where exports go: one place for all processes of a user, so that they find each other's exports."""
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "")
    temporary = Path(tempfile.gettempdir()) / f"perfscope-nsys-{user}"
    for folder in (temporary,) if cache is None else (cache.folder / _SUBFOLDER, temporary):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK) and (not hasattr(os, "getuid") or folder.stat().st_uid == os.getuid()):
            return folder
    raise TraceError(
        f"{report}: no folder to write its export to; set PERFSCOPE_CACHE or TMPDIR to a folder that you can write to"
    )


def _key(report: Path) -> str:
    state = report.stat()
    text = f"{report.resolve()}\n{state.st_size}\n{state.st_mtime_ns}"
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _run(report: Path, export: Path) -> None:
    nsys = find_nsys()
    if nsys is None:
        raise TraceError(
            f"{report}: reading a report needs nsys, which is not on this machine's path; where Nsight Systems is "
            f"installed, run nsys export --type sqlite {report.name} and analyze the .sqlite, or set PERFSCOPE_NSYS to "
            "the program"
        )
    # Complete or not at all, whatever other processes do.
    partial = export.with_name(f"{export.stem}.{os.getpid()}.partial.sqlite")
    command = [nsys, "export", "--type", "sqlite", "--force-overwrite", "true", "--output", str(partial), str(report)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode != 0 or not partial.exists():
            output = " ".join((done.stderr.strip() or done.stdout.strip()).split())[-_SHOWN_CHARACTERS:]
            raise TraceError(
                f"{report}: {nsys} export failed with {done.returncode} ({output or 'no output'}); a report needs "
                "an nsys at least as new as the one that recorded it"
            )
        partial.replace(export)
    except OSError as error:
        raise TraceError(
            f"{report}: {nsys} cannot be run ({error.strerror or error}); check PERFSCOPE_NSYS and the path"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def _forget_oldest(folder: Path, kept: Path, limit_bytes: int) -> None:
    """Remove the exports that were unused for longest, until the rest is within the limit."""
    exports = [(path.stat().st_mtime_ns, path.stat().st_size, path) for path in folder.glob("*.sqlite")]
    total = sum(size for _, size, _ in exports)
    for _, size, path in sorted(exports):
        if total <= limit_bytes:
            break
        if path != kept:
            path.unlink(missing_ok=True)
            total -= size


def _remove(export: Path, owner: int) -> None:
    """Remove an export when the process that made it ends; a forked child that ends is not that process."""
    if os.getpid() == owner:
        export.unlink(missing_ok=True)
