"""Chrome traces of tools that mark what an event is by its process and thread rather than by a category.

TensorFlow's and JAX's profilers (``*.trace.json.gz``) name a process after its device (``/device:GPU:0``) and a thread
after what its events are (``Stream #13(Compute)``, ``XLA Ops``, ``Steps``). Horovod's timeline has a process for each
tensor, whose collectives are ranges such as ``NEGOTIATE_ALLREDUCE`` and ``ALLREDUCE``. Both leave ``cat`` out.
Ascend's profiler (``trace_view.json``) has a process for the device, one for its collectives and one for the calls of
its runtime. torch's autograd profiler without Kineto has one named ``CPU functions``. Intel's unitrace has categories
of its own. Of other events without a category their names, their streams and their process's name tell what they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from perfscope.analyzers.readers.chrome_columns import ABSENT, ChromeStrings
from perfscope.analyzers.readers.chrome_metadata import integer_id
from perfscope.errors import TraceError
from perfscope.frozen import dataclass
from perfscope.recording.vocabulary import PROFILER_STEP_PREFIX
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import DEVICE_WORK, NONE, Category, Int64, Thread

_DEVICE_PROCESS = re.compile(r"^/device:(?:GPU|TPU|CUSTOM:[\w.]+):(\d+)")
_HOST_PROCESS = re.compile(r"^/host:")
_STREAM_THREAD = re.compile(r"^Stream #(\d+)")
_OP_THREADS = ("XLA Ops", "Async XLA Ops")
"""The work itself on a TPU; on a GPU the same work is on the streams' threads, and these repeat it by operation."""
_STEP_THREAD = "Steps"
_STEP_NUMBER = re.compile(r"(\d+)$")
_COPY = re.compile(r"^mem(?:cpy|copy)", re.IGNORECASE)
_FILL = re.compile(r"^memset", re.IGNORECASE)

_ASCEND_DEVICE = "Ascend Hardware"
_ASCEND_COLLECTIVES = ("Communication", "HCCL")
"""In this process a thread per group has whole collectives, and one per plane the tasks that they consist of."""
_ASCEND_CALLS = "CANN"
"""Calls of the runtime, on threads of this process whose ids are those of the program's own."""
_ASCEND_REPEATED = "Overlap Analysis"
"""The same work once more, by kind."""
_ASCEND_STREAM = re.compile(r"^Stream (\d+)$")
_ASCEND_GROUP = re.compile(r"^Group (\d+) Communication$")
_ASCEND_WAIT = re.compile(r"^(?:EVENT|NOTIFY)_|^PROFILING_|^\w*(?:Synchronize|WaitEvent)", re.IGNORECASE)
"""Tasks of a stream that compute nothing: they wait, signal, or are the profiler's."""

_ASCEND_PROGRAM = "Python"
_COLLECTIVES_STREAM = 1 << 32
"""Added to a group's number: its collectives are no stream's of the device."""

_CPU_FUNCTIONS = "CPU functions"
_CUDA_FUNCTIONS = "CUDA functions"
"""Processes of torch's autograd profiler, which names them by their ids; the second one has a thread per device."""

_DRIVER_CALL = re.compile(r"^(?:cu|cuda|hip|nccl)[A-Z]\w*$")
_PYTHON_CALL = re.compile(r"^\$\S")
"""How the profiler writes a Python function: ``$module.py:12 name``, ``$<unknown> __exit__``."""

_ENOUGH = 10
"""Least events of a process that may be a device: kineto has one or two that describe the recording."""

_SEVERAL_DEVICES = (
    "one process used {count} devices: they are analyzed as one, busy while any of them is; record one process per "
    "device to see them separately"
)

_LEVEL_ZERO_CALL = re.compile(r"^ze[A-Z]\w*$")
_LEVEL_ZERO_COPY = re.compile(r"^zeCommandListAppend(?:Memory|Image)Copy\w*\(")
_LEVEL_ZERO_FILL = re.compile(r"^zeCommandListAppendMemoryFill")
"""What Intel's unitrace calls copies on a device: after the calls that ask for them."""

_HOROVOD_NEGOTIATION = "NEGOTIATE_"
_HOROVOD_ACTIVITY = re.compile(r"^[A-Z][A-Z0-9_]+$")

_RANGE = re.compile(r"^(?:ProfilerStep#\d|enumerate\(DataLoader\)#|Optimizer\.\w+#|(?:nccl|gloo):)")
_NAMED: Final = (
    (_RANGE, Category.ANNOTATION),
    (re.compile(r"^(?:aten|c10d|autograd|torch)::"), Category.CPU_OP),
    (_DRIVER_CALL, Category.RUNTIME),
    (_PYTHON_CALL, Category.PYTHON),
)
"""What an event of a host is, by its name."""
_MOST_DEVICES = int(np.iinfo(np.int32).max)
_NCCL_KERNEL = re.compile(r"^(?:nccl|rccl)(?:Dev)?Kernel_")
_DEVICE_NAME = re.compile(r"^(?:GPU|CUDA|ROCm|XPU)\b[ :#_-]*(\d{1,4})?(?!\w)", re.IGNORECASE)
_STREAM_NAME = re.compile(r"^stream\b[ :#_-]*(\d{1,9})?(?!\w)", re.IGNORECASE)
"""Processes and threads of devices, as kineto and programs that make such files label them: ``GPU 0``, ``stream 7``."""


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
    absent = np.flatnonzero(columns["category"] == ABSENT)
    device, stream = columns["device"][absent], columns["stream"][absent]
    columns["category"][absent], columns["device"][absent], columns["stream"][absent] = Category.OTHER, NONE, NONE
    notes = _settle_devices(columns, threads, processes, strings)
    for row, number in steps.items():
        if columns["category"][row] == Category.CPU_OP:
            columns["category"][row] = Category.ANNOTATION
            columns["name"][row] = strings.ids[f"{PROFILER_STEP_PREFIX}{number}"]
    _settle_level_zero(columns, strings)
    _settle_horovod(columns, threads, strings)
    left = columns["category"][absent] == Category.OTHER
    if left.any():
        rows = absent[left]
        _settle_uncategorized(columns, rows, device[left], stream[left], threads, processes, strings)
    return notes


def _settle_uncategorized(
    columns: dict[str, Any],
    rows: Int64,
    device: Any,
    stream: Int64,
    threads: Sequence[Thread],
    processes: Mapping[str, str],
    strings: ChromeStrings,
) -> None:
    """Infer what the events at ``rows`` are. ``device`` and ``stream`` are those among their arguments.

    A known name of the host's goes first, unless the event is on a device's track; what is on a stream, of a device
    or of NCCL by its name is the device's. The others stay as they are.
    """
    places = {at: place for at, thread in enumerate(threads) if (place := _place_of_track(thread, processes))}
    names, thread = columns["name"][rows], columns["thread"][rows]
    on_track = np.isin(thread, list(places))
    work = on_track | (device != NONE) | (stream != NONE)
    kinds = np.full(len(rows), Category.OTHER, dtype=np.int8)
    kinds[work] = Category.KERNEL
    for name in distinct(names).tolist():
        text, of_name = strings.values[name], names == name
        if _NCCL_KERNEL.match(text):
            kinds[of_name] = Category.KERNEL
        elif (host := next((kind for pattern, kind in _NAMED if pattern.match(text)), None)) is not None:
            kinds[of_name & ~on_track] = host
            if host == Category.ANNOTATION and text.startswith(PROFILER_STEP_PREFIX):
                kinds[of_name & on_track] = Category.GPU_ANNOTATION
        elif _COPY.match(text) or _FILL.match(text):
            kinds[of_name] = Category.MEMCPY if _COPY.match(text) else Category.MEMSET
    columns["category"][rows] = kinds
    for at in np.flatnonzero(np.isin(kinds, (*DEVICE_WORK, Category.GPU_ANNOTATION))).tolist():
        own = threads[thread[at]]
        of_device, of_stream = places.get(int(thread[at]), (integer_id(own.pid), integer_id(own.tid)))
        columns["device"][rows[at]] = device[at] if device[at] != NONE else min(of_device, _MOST_DEVICES)
        columns["stream"][rows[at]] = stream[at] if stream[at] != NONE else of_stream


def _place_of_track(thread: Thread, processes: Mapping[str, str]) -> tuple[int, int] | None:
    """(device, stream) of a thread whose process or own name or id is that of a device or a stream."""
    texts = processes.get(thread.pid, ""), thread.pid
    device = next((match for text in texts if (match := _DEVICE_NAME.match(text))), None)
    stream = next((match for text in (thread.name, thread.tid) if (match := _STREAM_NAME.match(text))), None)
    if device is None and stream is None:
        return None
    return (
        int(device[1]) if device and device[1] else integer_id(thread.pid),
        int(stream[1]) if stream and stream[1] else integer_id(thread.tid),
    )


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


def unread_processes(
    columns: Mapping[str, Any], threads: Sequence[Thread], processes: Mapping[str, str]
) -> tuple[str, ...]:
    """Names of the processes of which no event is of a known kind, where nothing is known to be a device's work."""
    category = columns["category"]
    if np.isin(category, DEVICE_WORK).any():
        return ()
    places = {pid: place for place, pid in enumerate(dict.fromkeys(thread.pid for thread in threads))}
    process = np.array([places[thread.pid] for thread in threads], dtype=np.int64)[columns["thread"]]
    known = category != Category.OTHER
    unknown = ~known & (columns["duration_ns"] > 0)
    read, unread = (np.bincount(process[rows], minlength=len(places)) for rows in (known, unknown))
    return tuple(
        processes.get(pid, pid) for pid, at in places.items() if unread[at] >= _ENOUGH and not read[at] and read.any()
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
            _rename_category(columns, rows, strings, _ASCEND_WAIT, Category.SYNC)
        elif track.category == Category.CPU_OP:
            _rename_category(columns, rows, strings, _DRIVER_CALL, Category.RUNTIME)
            _rename_category(columns, rows, strings, _PYTHON_CALL, Category.PYTHON)
    _join_calls(columns, threads, processes)
    devices = {track.device for track in tracks.values() if track.device != NONE}
    if len(devices) > 1:
        return [_SEVERAL_DEVICES.format(count=len(devices))]
    return []


def _tracks(threads: Sequence[Thread], processes: Mapping[str, str]) -> dict[int, _Track]:
    """Index of each thread of a process whose name says what its events are, to what they are."""
    with_streams = {thread.pid for thread in threads if _STREAM_THREAD.match(thread.name)}
    tracks: dict[int, _Track] = {}
    for at, thread in enumerate(threads):
        process = processes.get(thread.pid, thread.pid)
        if (match := _DEVICE_PROCESS.match(process)) is not None:
            tracks[at] = _device_track(thread, int(match[1]), has_streams=thread.pid in with_streams)
        elif _HOST_PROCESS.match(process) or process == _CPU_FUNCTIONS:
            tracks[at] = _Track(Category.CPU_OP)
        elif process == _CUDA_FUNCTIONS:
            tracks[at] = _Track(Category.KERNEL, int(thread.tid) if thread.tid.isdigit() else 0, 0)
        elif (track := _ascend_track(thread, process)) is not None:
            tracks[at] = track
    return tracks


def _ascend_track(thread: Thread, process: str) -> _Track | None:
    """A thread of Ascend's profiler; None of the program's own, whose events have categories."""
    if process == _ASCEND_CALLS:
        return _Track(Category.RUNTIME)
    if process == _ASCEND_DEVICE and (match := _ASCEND_STREAM.match(thread.name)) is not None:
        return _Track(Category.KERNEL, 0, int(match[1]))
    if process in _ASCEND_COLLECTIVES and (match := _ASCEND_GROUP.match(thread.name)) is not None:
        return _Track(Category.KERNEL, 0, _COLLECTIVES_STREAM + int(match[1]))
    if process in (_ASCEND_DEVICE, *_ASCEND_COLLECTIVES, _ASCEND_REPEATED):
        return _Track(Category.GPU_ANNOTATION, 0)
    return None


def _device_track(thread: Thread, device: int, *, has_streams: bool) -> _Track:
    if (match := _STREAM_THREAD.match(thread.name)) is not None:
        return _Track(Category.KERNEL, device, int(match[1]))
    stream = int(thread.tid) if thread.tid.isdigit() else NONE
    if thread.name in _OP_THREADS and not has_streams:
        return _Track(Category.KERNEL, device, stream)
    return _Track(Category.GPU_ANNOTATION, device, stream, is_steps=thread.name == _STEP_THREAD)


def _join_calls(columns: dict[str, Any], threads: Sequence[Thread], processes: Mapping[str, str]) -> None:
    """Put the calls of Ascend's runtime on the program's threads, which made them."""
    own = {thread.tid: at for at, thread in enumerate(threads) if processes.get(thread.pid) == _ASCEND_PROGRAM}
    for at, thread in enumerate(threads):
        if processes.get(thread.pid) == _ASCEND_CALLS and thread.tid in own:
            columns["thread"][columns["thread"] == at] = own[thread.tid]


def _step_name(name: int, strings: ChromeStrings) -> int:
    """The id of the step's name as torch writes it, which the analyses know; without a number, its own name's."""
    match = _STEP_NUMBER.search(strings.values[name])
    return strings.ids[f"{PROFILER_STEP_PREFIX}{int(match[1])}"] if match else name


def _rename_category(
    columns: dict[str, Any], rows: Any, strings: ChromeStrings, pattern: re.Pattern[str], category: Category
) -> None:
    hits = [name for name in distinct(columns["name"][rows]).tolist() if pattern.match(strings.values[name])]
    columns["category"][rows[np.isin(columns["name"][rows], hits)]] = category


def _settle_level_zero(columns: dict[str, Any], strings: ChromeStrings) -> None:
    if not any(text.startswith("zeCommand") for text in strings.values):
        return
    for pattern, was, category in (
        (_LEVEL_ZERO_CALL, Category.CPU_OP, Category.RUNTIME),
        (_LEVEL_ZERO_COPY, Category.KERNEL, Category.MEMCPY),
        (_LEVEL_ZERO_FILL, Category.KERNEL, Category.MEMSET),
    ):
        rows = np.flatnonzero(columns["category"] == was)
        _rename_category(columns, rows, strings, pattern, category)


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
