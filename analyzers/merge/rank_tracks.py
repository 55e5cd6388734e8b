"""One rank's tracks: its trace and its part of the analysis, as packets. Runs where the trace is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.cached import read_trace
from perfscope.analyzers.merge.pftrace import BYTES, COUNT, Args, PacketSequence, Slices
from perfscope.analyzers.merge.rank_view import Counter, RankView
from perfscope.analyzers.rank.collectives.communication import (
    device_communication,
    host_communication_rows,
    in_order_of_collectives,
)
from perfscope.analyzers.rank.host_activity import loader_rows, training_threads
from perfscope.analyzers.rank.launches import DeviceWork, device_work
from perfscope.frozen import dataclass
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import NONE, Bool, Category, Float64, Int64, Trace

RANK_UUIDS: Final = 20
"""Bits of a track's id below those of its rank."""
_TRACK_UUIDS: Final = 10
"""Bits of a track's id for its lanes."""
_LAUNCH_FLOWS: Final = 40
"""Bits of a launch arrow's id below those of its rank."""

_POINTS: Final = 2_000
"""Values of a counter in the time shown: more than the pixels of a screen."""

_HOST: Final = (Category.CPU_OP, Category.ANNOTATION, Category.RUNTIME)


@dataclass(frozen=True)
class RankPackets:
    """A rank's part of the file, and the number of its slices."""

    rank: int
    data: bytes
    slices: int


def first_uuid(rank: int) -> int:
    """Id of a rank's outermost track; the ids of its other tracks follow."""
    return (rank + 1) << RANK_UUIDS


def rank_packets(view: RankView) -> RankPackets:
    """Read a rank's trace and write its tracks. Raises TraceError where the trace can no longer be read."""
    trace = read_trace(view.path, view.part)
    writer = _TrackWriter(view, trace)
    writer.write()
    return RankPackets(view.rank, b"".join(writer.packets.chunks()), writer.slices)


class _TrackWriter:
    """Writes one rank's tracks in the order in which they are shown."""

    def __init__(self, view: RankView, trace: Trace) -> None:
        self.packets = PacketSequence(view.rank + 2)
        self.slices = 0
        self._view = view
        self._trace = trace
        self._work = device_work(trace)
        self._start = view.shown_ns(trace.start_ns)
        # Over the length of an event the drift of a clock is negligible.
        self._end = self._start + trace.duration_ns
        self._shown = view.windows.shows(self._start, self._end)
        self._group = first_uuid(view.rank)
        self._tracks = 0

    def write(self) -> None:
        view = self._view
        self.packets.track(self._group, view.title, place=view.rank + 1, description=view.summary)
        self._steps()
        self._breakdown()
        if "comm" in view.lanes:
            self._communication()
        launched = self._device_tracks()
        if "loader" in view.lanes:
            self._loader()
        if view.lanes & {"host", "python"}:
            self._host_tracks(launched)
        if "counters" in view.lanes:
            self._counters()

    def _add(self, name: str, slices: Slices, description: str = "") -> None:
        if len(slices):
            uuid = self._next_uuid()
            self.packets.slice_track(
                uuid, name, slices, parent=self._group, place=self._tracks, description=description
            )
            self.slices += len(slices)

    def _next_uuid(self) -> int:
        self._tracks += 1
        return self._group + (self._tracks << _TRACK_UUIDS)

    def _steps(self) -> None:
        steps = self._view.steps
        bounds = np.array(list(steps.values()), dtype=np.int64).reshape(-1, 2)
        args: list[Args] = [{"step_us": (end - start) / 1e3} for start, end in bounds.tolist()]
        shown = self._view.windows.clipped(bounds[:, 0], bounds[:, 1])
        self._add("steps", Slices(*shown, list(steps), args=args), "The windows of the time breakdown.")

    def _breakdown(self) -> None:
        view = self._view
        names = [TimeCategory(row).id for row in view.breakdown_category.tolist()]
        self._add(
            "time breakdown",
            Slices(view.breakdown_start_ns, view.breakdown_end_ns, names),
            "Where the step went: every nanosecond in exactly one category.",
        )

    def _communication(self) -> None:
        shown = self._view.communication
        kernels = self._kernel_names()
        args: list[Args] = [
            {**each, "kernel": kernels[row]} if row in kernels else each
            for row, each in zip(shown.row.tolist(), shown.args, strict=True)
        ]
        waited = np.flatnonzero(shown.last_arrival_ns > shown.start_ns)
        moved = waited[shown.done_ns[waited] > shown.last_arrival_ns[waited]]
        size, more = len(shown.row), len(waited) + len(moved)
        waiting = [
            f"waiting for rank {rank}" if rank != NONE else "waiting" for rank in shown.waited_for[waited].tolist()
        ]
        slices = Slices(
            np.concatenate((shown.start_ns, shown.start_ns[waited], shown.last_arrival_ns[moved])),
            np.concatenate((shown.end_ns, shown.last_arrival_ns[waited], shown.done_ns[moved])),
            [*shown.names, *waiting, *(["transfer"] * len(moved))],
            args=[*args, *({} for _ in range(more))],
            begin_flows=[*shown.begin_flows, *(() for _ in range(more))],
            end_flows=[*shown.end_flows, *(() for _ in range(more))],
            around=np.concatenate((np.full(size, -1, dtype=np.int64), waited, moved)),
        )
        self._add("communication", slices, "Collectives and messages. Arrows lead to the last arrival.")

    def _kernel_names(self) -> dict[int, str]:
        """Row of the rank's ``Collectives`` -> name of the kernel; empty without a device."""
        work, trace = self._work, self._trace
        order = np.empty(0, dtype=np.int64)
        if len(work):
            order = in_order_of_collectives(work, device_communication(trace, work))
        wanted = self._view.communication.row
        return {row: trace.name_of(int(work.row[order[row]])) for row in wanted.tolist() if row < len(order)}

    def _device_tracks(self) -> Bool:
        """Kernels and copies, one track for each stream; returns which rows of the trace launched them."""
        launched = np.zeros(len(self._trace), dtype=np.bool_)
        work, trace = self._work, self._trace
        if len(work) == 0:
            return launched
        is_kernel = trace.category[work.row] == Category.KERNEL
        lanes = {
            "compute": is_kernel & ~device_communication(trace, work),
            "copy": ~is_kernel,
        }
        # An arrow cannot fork, so it leads to the first kernel of a launch; the launch has to be shown.
        first = np.zeros(len(work), dtype=np.bool_)
        first[np.unique(work.launch, return_index=True)[1]] = True
        first &= (work.launch != NONE) & self._shown[work.launch] & ("host" in self._view.lanes)
        for lane, chosen in lanes.items():
            if lane not in self._view.lanes:
                continue
            shown = np.flatnonzero(chosen & self._shown[work.row])
            launched[work.launch[shown[first[shown]]]] = True
            several = len(np.unique(trace.device[work.row[shown]])) > 1
            for device, stream, own in self._streams(work, shown):
                on = f"device {device} stream {stream}" if several else f"stream {stream}"
                rows = work.row[own]
                flows = [
                    (self._launch_flow(call),) if leads else ()
                    for call, leads in zip(work.launch[own].tolist(), first[own].tolist(), strict=True)
                ]
                self._add(f"{lane}: {on}", self._slices(rows, begin_flows=flows))
        return launched

    def _streams(self, work: DeviceWork, shown: Int64) -> Iterator[tuple[int, int, Int64]]:
        rows = work.row[shown]
        places = np.stack((self._trace.device[rows].astype(np.int64), self._trace.stream[rows]), axis=1)
        distinct, which = np.unique(places, axis=0, return_inverse=True)
        for index, (device, stream) in enumerate(distinct.tolist()):
            yield device, stream, shown[which.ravel() == index]

    def _launch_flow(self, row: int) -> int:
        return (self._view.rank + 1) << _LAUNCH_FLOWS | (row + 1)

    def _slices(
        self, rows: Int64, begin_flows: Sequence[Sequence[int]] | None = None, *, shapes: bool = False
    ) -> Slices:
        trace = self._trace
        start, end = self._view.windows.clipped(self._start[rows], self._end[rows])
        args: list[Args] | None = None
        if shapes and (trace.shapes[rows] != NONE).any():
            args = [{"shapes": trace.strings[shape]} if shape != NONE else {} for shape in trace.shapes[rows].tolist()]
        return Slices(
            start,
            end,
            [trace.strings[name] for name in trace.name[rows].tolist()],
            args=args,
            begin_flows=begin_flows if begin_flows is not None and any(begin_flows) else None,
        )

    def _loader(self) -> None:
        rows = loader_rows(self._trace, training_threads(self._trace, self._work))
        self._add("data loader", self._slices(rows[self._shown[rows]]), "Inside a loader's __next__.")

    def _host_tracks(self, launched: Bool) -> None:
        trace, lanes = self._trace, self._view.lanes
        wanted = [*(_HOST if "host" in lanes else ()), *((Category.PYTHON,) if "python" in lanes else ())]
        rows = trace.rows(*wanted)
        if len(self._work) == 0 and "comm" in lanes:
            rows = np.setdiff1d(rows, host_communication_rows(trace))
        rows = rows[self._shown[rows]]
        training = set(training_threads(trace, self._work).tolist())
        for thread in sorted(np.unique(trace.thread[rows]).tolist(), key=lambda thread: thread not in training):
            own = rows[trace.thread[rows] == thread]
            flows = [(self._launch_flow(row),) if launched[row] else () for row in own.tolist()]
            about = trace.threads[thread]
            self._add(f"host: {about.name or about.tid}", self._slices(own, begin_flows=flows, shapes=True))

    def _counters(self) -> None:
        for counter in (*self._view.counters, *_memory(self._trace, self._view), *_queue(self._work, self._start)):
            time, values = _thinned(counter, self._view)
            if values.any():  # for example the host's allocator reserves nothing
                uuid = self._next_uuid()
                self.packets.counter_track(
                    uuid, counter.name, parent=self._group, place=self._tracks, unit=counter.unit
                )
                self.packets.counter(uuid, time, values)


def _memory(trace: Trace, view: RankView) -> Iterator[Counter]:
    """Memory allocated and reserved on each device."""
    memory = trace.memory
    time = view.shown_ns(memory.time_ns)
    for device in np.unique(memory.device).tolist():
        of = "host" if device == NONE else f"device {device}"
        for what, column in (("allocated", memory.allocated), ("reserved", memory.reserved)):
            known = (memory.device == device) & (column != NONE)
            yield Counter(f"memory {what}, {of}", BYTES, time[known], column[known].astype(np.float64))


def _queue(work: DeviceWork, shown_ns: Int64) -> Iterator[Counter]:
    """Number of kernels and copies that are launched and have not started."""
    known = np.flatnonzero(work.launch != NONE)
    moments = np.concatenate((shown_ns[work.launch[known]], shown_ns[work.row[known]]))
    change = np.repeat(np.array([1.0, -1.0]), len(known))
    order = np.argsort(moments, kind="stable")
    yield Counter("launch queue depth", COUNT, moments[order], np.cumsum(change[order]))


def _thinned(counter: Counter, view: RankView) -> tuple[Int64, Float64]:
    """The values in the time shown; of too many values, the largest in each interval."""
    first, last = view.windows.hull
    time, values = counter.time_ns, counter.values
    begin = max(int(np.searchsorted(time, first, side="right")) - 1, 0)
    time, values = time[begin : np.searchsorted(time, last)], values[begin : np.searchsorted(time, last)]
    if len(time) == 0:
        return time, values
    time = np.maximum(time, first)
    cell = (time - first) // max((last - first) // _POINTS, 1)
    starts = np.flatnonzero(np.concatenate(([True], np.diff(cell) > 0)))
    return time[starts], np.maximum.reduceat(values, starts)
