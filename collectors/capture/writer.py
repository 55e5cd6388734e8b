"""Writes traces so that a killed job leaves whole files or none, and compresses them while the training goes on."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from perfscope.collectors.problems import Problems
from perfscope.recording.paths import (
    execution_trace_file,
    execution_trace_in_progress,
    partial,
    rank_and_capture_of_trace_file,
    trace_file,
)
from perfscope.redact import redacted_lines, redacted_trace

GZIP_LEVEL: Final = 3
"""Traces repeat themselves so much that higher levels cost several times the time for a tenth of the size."""

CHUNK: Final = 1 << 20

NICENESS: Final = 15
"""Of the compressing thread: the training's own threads come first."""

_PROFILERS_OWN: Final = ".tmp"
"""Ending under which the profiler writes a file before it gives it the name that it was asked for."""

_GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS


class TraceWriter:
    """Writes the traces of one rank."""

    def __init__(self, folder: Path, rank: int, problems: Problems) -> None:
        self._folder = folder
        self._rank = rank
        self._problems = problems
        self._threads: list[threading.Thread] = []

    def write(self, capture: int, export: Callable[[str], object]) -> str:
        """Have ``export`` write capture number ``capture`` and start compressing it; the name that the file will have.

        Raises OSError when the trace did not reach the disk whole.
        """
        plain = trace_file(self._folder, self._rank, capture, compressed=False)
        temporary = partial(plain)
        try:
            export(_as_seen_from_here(temporary))
            _check_whole(temporary)
            temporary.replace(plain)
        except BaseException:
            for left in (temporary, temporary.with_name(temporary.name + _PROFILERS_OWN)):
                with suppress(OSError):
                    left.unlink()
            raise
        compressed = trace_file(self._folder, self._rank, capture)
        self._compress_meanwhile(plain, compressed)
        return compressed.name

    def write_execution_trace(self, capture: int, written: Path) -> None:
        """Take over what PyTorch has written of capture number ``capture``, and compress it. Raises OSError."""
        plain = execution_trace_file(self._folder, self._rank, capture, compressed=False)
        _check_whole(written)
        written.replace(plain)
        self._compress_meanwhile(plain, execution_trace_file(self._folder, self._rank, capture))

    def _compress_meanwhile(self, plain: Path, compressed: Path) -> None:
        # Not a daemon: the interpreter waits for it at its end, wherever that comes from.
        thread = threading.Thread(target=self._compress, args=(plain, compressed), name="perfscope-compress")
        try:
            thread.start()
            self._threads.append(thread)
        except RuntimeError:  # from Python 3.12 an interpreter that is ending starts no threads
            self._compress(plain, compressed)

    def remove_unfinished(self) -> None:
        """Remove what PyTorch wrote of captures that came to nothing. Raises OSError."""
        for left in self._folder.glob(execution_trace_in_progress(Path(), self._rank, "*").name):
            left.unlink()

    def busy(self) -> bool:
        """Is a trace still being compressed? Steps meanwhile are not undisturbed ones."""
        return bool(self._threads) and any(thread.is_alive() for thread in self._threads)

    def join(self) -> None:
        """Wait until every trace is compressed."""
        for thread in self._threads:
            thread.join()

    def _compress(self, plain: Path, compressed: Path) -> None:
        if threading.current_thread() is not threading.main_thread():
            with suppress(OSError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        temporary = partial(compressed)
        try:
            _gzip(plain, temporary)
            temporary.replace(compressed)
            plain.unlink()
        except OSError as error:
            self._problems.add(f"{plain.name} could not be compressed and stays as it is ({error})")
            with suppress(OSError):
                temporary.unlink()


def _as_seen_from_here(path: Path) -> str:
    """Relative to the working folder where it lies below: the profiler writes the name it is given into the trace."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (OSError, ValueError):
        return str(path)


def _gzip(source: Path, target: Path) -> None:
    """Compress a trace, without the secrets in it."""
    compressor = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, _GZIP_WINDOW)
    with source.open("rb") as reader, target.open("wb") as writer:
        is_trace = rank_and_capture_of_trace_file(source) is not None
        for piece in (redacted_trace if is_trace else redacted_lines)(reader, CHUNK):
            writer.write(compressor.compress(piece))
        writer.write(compressor.flush())


def _check_whole(path: Path) -> None:
    """The profiler writes without looking at errors; a trace that was cut (disk full) does not end in a brace."""
    if not path.exists():
        raise OSError(f"{path.name} could not be written; is the disk full?")
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - 64, 0))
        if not file.read().rstrip().endswith(b"}"):
            raise OSError(f"{path.name} was cut while it was written; is the disk full?")
