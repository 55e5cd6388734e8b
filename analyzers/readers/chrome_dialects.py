"""Chrome traces of tools that mark what an event is by its process and thread rather than by a category.

TensorFlow's and JAX's profilers (``*.trace.json.gz``) name a process after its device (``/device:GPU:0``) and a thread
after what its events are (``Stream #13(Compute)``, ``XLA Ops``, ``Steps``). Horovod's timeline has a process for each
tensor, whose collectives are ranges such as ``NEGOTIATE_ALLREDUCE`` and ``ALLREDUCE``. Both leave ``cat`` out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from perfscope.analyzers.readers.chrome_columns import ChromeStrings
from perfscope.errors import TraceError
from perfscope.frozen import dataclass
from perfscope.recording.vocabulary import PROFILER_STEP_PREFIX
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NONE, Category, Int64, Thread

_DEVICE_PROCESS = re.compile(r"^/device:(?:GPU|TPU|CUSTOM:[\w.]+):(\d+)")
_HOST_PROCESS = re.compile(r"^/host:")
_STREAM_THREAD = re.compile(r"^Stream #(\d+)")
_OP_THREADS = ("XLA Ops", "Async XLA Ops")
"""The work itself on a TPU; on a GPU the same work is on the streams' threads, and these repeat it by operation."""
_STEP_THREAD = "Steps"
_STEP_NUMBER = re.compile(r"(\d+)$")
_COPY = re.compile(r"^mem(?:cpy|copy)", re.IGNORECASE)
_FILL = re.compile(r"^memset", re.IGNORECASE)
_DRIVER_CALL = re.compile(r"^(?:cu|cuda|hip|nccl)[A-Z]\w*$")
_PYTHON_CALL = re.compile(r"^\$\S")
"""How the profiler writes a Python function: ``$module.py:12 name``, ``$<unknown> __exit__``."""

_SEVERAL_DEVICES = (
    "one process used {count} devices: they are analyzed as one, busy while any of them is; record one process per "
    "device to see them separately"
)

_HOROVOD_NEGOTIATION = "NEGOTIATE_"
_HOROVOD_ACTIVITY = re.compile(r"^[A-Z][A-Z0-9_]+$")


@dataclass(frozen=True)
class _Track:
    """Category and device of the events of one thread."""

    category: Category
    device: int = NONE
    stream: int = NONE
    is_steps: bool = False


def rows_of_steps(numbers: Mapping[int, int], order: Int64) -> dict[int, int]:
    """Rows of the trace to step numbers, from rows of the file; ``order`` holds the row of the file of each row."""
    if not numbers:
        return {}
    there = np.flatnonzero(np.isin(order, list(numbers))).tolist()
    return {row: numbers[int(order[row])] for row in there}


def settle(
    columns: dict[str, Any],
    threads: Sequence[Thread],
    processes: Mapping[str, str],
    steps: Mapping[int, int],
    strings: ChromeStrings,
) -> list[str]:
    """Give the events without a category that of their track; returns notes for the parse report.

    ``columns`` are changed in place. ``processes`` maps a process id to its name, ``steps`` the row of an event that
    has a step number to that number.
    """
    notes = _settle_devices(columns, threads, processes, strings)
    for row, number in steps.items():
        if columns["category"][row] == Category.CPU_OP:
            columns["category"][row] = Category.ANNOTATION
            columns["name"][row] = strings.ids[f"{PROFILER_STEP_PREFIX}{number}"]
    _settle_horovod(columns, threads, strings)
    return notes


def refuse_merged(source: str, columns: Mapping[str, Any], threads: Sequence[Thread], names: Sequence[str]) -> None:
    """Raise TraceError where several processes have steps of their own: ranks merged into one file.

    Device work names no process, so it cannot be assigned to a rank.
    """
    is_step = np.fromiter((name.startswith(PROFILER_STEP_PREFIX) for name in names), dtype=np.bool_, count=len(names))
    marks = is_step[columns["name"]] & (columns["category"] == Category.ANNOTATION)
    owners = sorted({threads[at].pid for at in distinct(columns["thread"][marks]).tolist()})
    if len(owners) > 1:
        some = ", ".join(owners[:4]) + (", …" if len(owners) > 4 else "")
        raise TraceError(
            f"{source}: holds the training steps of {len(owners)} processes ({some}), so the traces of several ranks "
            "were merged into it, and device work cannot be assigned to a rank; analyze the folder of the ranks' own "
            "files instead"
        )


def _settle_devices(
    columns: dict[str, Any], threads: Sequence[Thread], processes: Mapping[str, str], strings: ChromeStrings
) -> list[str]:
    tracks = _tracks(threads, processes)
    if not tracks:
        return []
    category, thread = columns["category"], columns["thread"]
    uncategorized = category == Category.OTHER
    for at, track in tracks.items():
        rows = np.flatnonzero(uncategorized & (thread == at))
        category[rows] = track.category
        columns["device"][rows], columns["stream"][rows] = track.device, track.stream
        if track.is_steps:
            columns["name"][rows] = [_step_name(int(name), strings) for name in columns["name"][rows]]
        elif track.category == Category.KERNEL:
            _rename_category(columns, rows, strings, _COPY, Category.MEMCPY)
            _rename_category(columns, rows, strings, _FILL, Category.MEMSET)
        elif track.category == Category.CPU_OP:
            _rename_category(columns, rows, strings, _DRIVER_CALL, Category.RUNTIME)
            _rename_category(columns, rows, strings, _PYTHON_CALL, Category.PYTHON)
    devices = {track.device for track in tracks.values() if track.device != NONE}
    if len(devices) > 1:
        return [_SEVERAL_DEVICES.format(count=len(devices))]
    return []


def _tracks(threads: Sequence[Thread], processes: Mapping[str, str]) -> dict[int, _Track]:
    """Index of each thread of a process that is named as TensorFlow and JAX do, to what its events are."""
    with_streams = {thread.pid for thread in threads if _STREAM_THREAD.match(thread.name)}
    tracks: dict[int, _Track] = {}
    for at, thread in enumerate(threads):
        process = processes.get(thread.pid, "")
        if (match := _DEVICE_PROCESS.match(process)) is not None:
            tracks[at] = _device_track(thread, int(match[1]), has_streams=thread.pid in with_streams)
        elif _HOST_PROCESS.match(process):
            tracks[at] = _Track(Category.CPU_OP)
    return tracks


def _device_track(thread: Thread, device: int, *, has_streams: bool) -> _Track:
    if (match := _STREAM_THREAD.match(thread.name)) is not None:
        return _Track(Category.KERNEL, device, int(match[1]))
    stream = int(thread.tid) if thread.tid.isdigit() else NONE
    if thread.name in _OP_THREADS and not has_streams:
        return _Track(Category.KERNEL, device, stream)
    return _Track(Category.GPU_ANNOTATION, device, stream, is_steps=thread.name == _STEP_THREAD)


def _step_name(name: int, strings: ChromeStrings) -> int:
    """The id of the step's name as torch writes it, which the analyses know; without a number, its own name's."""
    match = _STEP_NUMBER.search(strings.values[name])
    return strings.ids[f"{PROFILER_STEP_PREFIX}{int(match[1])}"] if match else name


def _rename_category(
    columns: dict[str, Any], rows: Any, strings: ChromeStrings, pattern: re.Pattern[str], category: Category
) -> None:
    hits = [name for name in distinct(columns["name"][rows]).tolist() if pattern.match(strings.values[name])]
    columns["category"][rows[np.isin(columns["name"][rows], hits)]] = category


def _settle_horovod(columns: dict[str, Any], threads: Sequence[Thread], strings: ChromeStrings) -> None:
    negotiations = [at for at, text in enumerate(strings.values) if text.startswith(_HOROVOD_NEGOTIATION)]
    if not negotiations:
        return
    category, thread, name = columns["category"], columns["thread"], columns["name"]
    uncategorized = category == Category.OTHER
    processes = {threads[at].pid for at in distinct(thread[uncategorized & np.isin(name, negotiations)]).tolist()}
    theirs = [at for at, entry in enumerate(threads) if entry.pid in processes]
    rows = np.flatnonzero(uncategorized & np.isin(thread, theirs))
    # What is left are ticks named after a rank, at which it was ready.
    _rename_category(columns, rows, strings, _HOROVOD_ACTIVITY, Category.ANNOTATION)
