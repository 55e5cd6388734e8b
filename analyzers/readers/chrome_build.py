"""Builds a trace: times its events, joins begins with ends, orders the rows, and reports what was dropped."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from perfscope.analyzers.readers import chrome_dialects, chrome_metadata, chrome_times
from perfscope.analyzers.readers.chrome_columns import ChromeColumns, MemoryColumns
from perfscope.analyzers.readers.chrome_events import (
    ALLOCATOR,
    UNREAD,
    Begin,
    Complete,
    CompleteAsText,
    End,
    EventBatch,
    Instant,
    InstantAsText,
    Metadata,
)
from perfscope.analyzers.readers.chrome_metadata import FileMetadata
from perfscope.analyzers.readers.chrome_scan import ScannedBatch, ScannedColumns
from perfscope.errors import TraceError
from perfscope.execution.memory_bound import MemoryBound
from perfscope.recording.vocabulary import PROFILER_STEP_PREFIX
from perfscope.redact import redact_names
from perfscope.trace.columns import by_start_longer_first, near_in_time, put_in_order
from perfscope.trace.trace import (
    DEVICE_WORK,
    NEVER,
    NONE,
    Bool,
    Category,
    CollectiveArgs,
    GraphNodes,
    Int32,
    Int64,
    ParseReport,
    ProcessGroup,
    Thread,
    Trace,
)
from perfscope.typed import clean

_RARE = frozenset({End, Metadata, *UNREAD})
_THREAD_NAME = "thread_name"
_PROCESS_NAME = "process_name"
_LATEST_NS = -NEVER - 1
"""Of times, the base added: those beyond are damage."""
_EARLIEST_EPOCH_NS = 10**18
"""2001. Times before it count from a base, not from the epoch."""

_ELISION = "..."
"""torch leaves out the middle of long lists of ranks."""


class Builder:
    """Takes batches of events, then builds the trace."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._columns = ChromeColumns()
        self._memory_bound = MemoryBound(source)
        self._scanned = ScannedColumns(self._columns)
        self._ranges = chrome_times.SplitRanges()
        self._thread_names: dict[tuple[str, str], list[str]] = {}
        self._process_names: dict[str, str] = {}
        self._memory = MemoryColumns()
        self._seen = 0
        self._dropped = 0
        self._repaired = 0
        self._notes: list[str] = []
        self._unread: Counter[str] = Counter()

    def take(self, batch: EventBatch) -> bool:
        """Add a batch of events. False, and nothing added, where they must be decoded with their times as text.

        Raises TooLittleMemory where there are more events than memory holds.
        """
        self._memory_bound.check(self._scanned.rows)
        events = batch.events
        kinds = set(map(type, events))
        count = len(events)
        if isinstance(batch, ScannedBatch):
            count = batch.count
            self._scanned.add(batch)
            self._memory.add(batch.instants, batch.instants_ns)
        else:
            self._scanned.settle()
            if batch.times_as_text:
                self._add_with_text(events)
            elif Begin in kinds or not self._add_with_numbers(events, kinds):
                return False
        if kinds & _RARE:
            for place, event in enumerate(events):
                if type(event) in _RARE:
                    self._add_rare(event, self._seen + place)
        self._seen += count
        self._dropped += batch.dropped
        self._repaired += batch.repaired
        self._unread.update(batch.other_phases)
        return True

    def _add_with_numbers(self, events: list[Any], kinds: set[type[Any]]) -> bool:
        """Add complete events and the allocator's; False where a time needs its text or cannot be a time."""
        complete = events if kinds == {Complete} else [event for event in events if type(event) is Complete]
        start_ns = chrome_times.from_numbers([event.ts for event in complete])
        duration_ns = chrome_times.from_numbers([event.dur for event in complete])
        if start_ns is None or duration_ns is None or (len(duration_ns) and duration_ns.min() < 0):
            return False
        if Instant in kinds:
            instants = [event for event in events if type(event) is Instant and event.name == ALLOCATOR]
            time_ns = chrome_times.from_numbers([event.ts for event in instants])
            if time_ns is None:
                return False
            self._memory.add(instants, time_ns)
        self._columns.add(complete, start_ns, duration_ns)
        return True

    def _add_with_text(self, events: list[Any]) -> None:
        """Add complete, begin and the allocator's events, in the order of the file, if their times are valid."""
        places = [place for place, event in enumerate(events) if type(event) in (CompleteAsText, Begin)]
        starts = chrome_times.from_texts([bytes(events[place].ts) for place in places])
        durations = chrome_times.from_texts([bytes(events[place].dur) or b"0" for place in places])
        kept: list[Any] = []
        start_ns: list[int] = []
        duration_ns: list[int] = []
        for place, start, duration in zip(places, starts, durations, strict=True):
            if start is None or duration is None or duration < 0:
                continue
            event = events[place]
            if type(event) is Begin:
                self._ranges.begin(_thread_key(event), start, self._seen + place, self._columns.rows + len(kept))
            kept.append(event)
            start_ns.append(start)
            duration_ns.append(duration)
        self._dropped += len(places) - len(kept)
        self._columns.add(kept, np.array(start_ns, dtype=np.int64), np.array(duration_ns, dtype=np.int64))
        instants = [event for event in events if type(event) is InstantAsText and event.name == ALLOCATOR]
        timed = [(event, time_ns) for event in instants if (time_ns := self._time(event.ts)) is not None]
        self._memory.add([event for event, _ in timed], np.array([time_ns for _, time_ns in timed], dtype=np.int64))

    def _add_rare(self, event: Any, place: int) -> None:
        kind = type(event)
        if kind is End and (time_ns := self._time(event.ts)) is not None:
            self._ranges.end(_thread_key(event), time_ns, place)
        elif kind is Metadata and event.name == _THREAD_NAME:
            self._add_thread_name(event)
        elif kind is Metadata and event.name == _PROCESS_NAME:
            self._process_names[str(event.pid)] = chrome_metadata.text_of(bytes(event.args.name)).strip()
        elif kind in UNREAD:
            self._unread[UNREAD[kind]] += 1

    def _time(self, text: msgspec.Raw) -> int | None:
        time_ns = chrome_times.from_text(bytes(text))
        self._dropped += time_ns is None
        return time_ns

    def _add_thread_name(self, event: Metadata) -> None:
        """A thread may change its name, as torch's autograd threads do: all names are recorded."""
        labels = self._thread_names.setdefault(_thread_key(event), [])
        label = chrome_metadata.text_of(bytes(event.args.name)).strip()
        if label and label not in labels:
            labels.append(label)

    def note(self, text: str) -> None:
        """Add a note to the parse report."""
        self._notes.append(text)

    def build(self, metadata: FileMetadata, *, truncated: bool, repaired_metadata: bool) -> Trace:
        """The trace of all batches. Raises TraceError if they have no event at all."""
        base_ns = metadata.base_ns or 0
        self._scanned.settle()
        columns = self._columns.finish()
        rows = self._rows_in_order(columns, base_ns)
        if not len(rows):
            raise TraceError(f"{self._source}: no event can be read ({self._dropped} were dropped); record it again")
        put_in_order(columns, rows)
        if truncated and metadata.base_ns is None and columns["start_ns"][0] < _EARLIEST_EPOCH_NS:
            self.note("the file ends before its time base: this rank's clock cannot be aligned with other ranks'")
        columns["start_ns"] += base_ns
        self._make_steps_annotations(columns)
        threads = self._threads()
        steps = chrome_dialects.rows_of_steps(self._columns.step_numbers, rows)
        for note in chrome_dialects.settle(columns, threads, self._process_names, steps, self._columns.strings):
            self.note(note)
        chrome_dialects.refuse_merged(self._source, columns, threads, self._columns.strings.values)
        collectives, groups = _collectives(self._columns, rows, metadata.groups)
        return Trace(
            source=self._source,
            **columns,
            threads=threads,
            collectives=collectives,
            memory=self._memory.finish(base_ns),
            graph_nodes=_graph_nodes(self._columns, rows),
            strings=redact_names(tuple(map(clean, self._columns.strings.values))),
            rank=metadata.rank,
            world_size=metadata.world_size,
            backend=metadata.backend,
            host=metadata.host,
            devices=metadata.devices,
            groups=groups,
            has_shapes=self._columns.has_shapes if metadata.records_shapes is None else metadata.records_shapes,
            versions=metadata.versions,
            parse_report=self._report(
                repaired_metadata=repaired_metadata,
                cut=_cut(columns, rows) if truncated else None,
                unread_processes=chrome_dialects.unread_processes(columns, threads, self._process_names),
            ),
        )

    def _threads(self) -> tuple[Thread, ...]:
        """Threads with their names; a thread without an id has the name of its process."""
        named = {
            (pid, tid): " / ".join(self._thread_names.get((pid, tid), ()))
            or ("" if tid else self._process_names.get(pid, ""))
            for pid, tid in self._columns.threads
        }
        return tuple(Thread(pid, tid, name) for (pid, tid), name in named.items())

    def _rows_in_order(self, columns: dict[str, Any], base_ns: int) -> Int64:
        """Rows by start, longer first, without those that must be dropped; gives split ranges their durations."""
        start_ns, duration_ns = columns["start_ns"], columns["duration_ns"]
        keep = self._join_ranges(duration_ns)
        in_time = start_ns <= min(_LATEST_NS, _LATEST_NS - base_ns) - duration_ns
        in_time &= start_ns >= max(-_LATEST_NS, -_LATEST_NS - base_ns)
        in_time &= near_in_time(start_ns, duration_ns)
        self._dropped += int((keep & ~in_time).sum())
        keep &= in_time
        order = by_start_longer_first(start_ns, duration_ns)
        return order if keep.all() else order[keep[order]]

    def _join_ranges(self, duration_ns: Int64) -> Bool:
        durations, endless, unopened = self._ranges.join()
        for row, duration in durations.items():
            duration_ns[row] = duration
        keep = np.ones(len(duration_ns), dtype=np.bool_)
        keep[endless] = False
        self._dropped += len(endless) + unopened
        if endless or unopened:
            self.note(f"{len(endless)} ranges never end, {unopened} ends have no beginning")
        return keep

    def _make_steps_annotations(self, columns: dict[str, Any]) -> None:
        """Old profilers wrote steps as operators."""
        steps = [at for at, name in enumerate(self._columns.strings.values) if name.startswith(PROFILER_STEP_PREFIX)]
        category = columns["category"]
        category[np.isin(columns["name"], steps) & (category == Category.CPU_OP)] = Category.ANNOTATION

    def _report(
        self, *, repaired_metadata: bool, cut: tuple[int, bool] | None, unread_processes: tuple[str, ...]
    ) -> ParseReport:
        if self._unread:
            kinds = ", ".join(f"{count} of phase {phase!r}" for phase, count in sorted(self._unread.items()))
            self.note(f"events of kinds that are not read: {kinds}")
        until_ns, all_operators = cut or (None, True)
        return ParseReport(
            self._dropped, self._repaired + repaired_metadata, cut is not None, tuple(self._notes), until_ns,
            all_operators, tuple(map(clean, unread_processes)),
        )  # fmt: skip


def _cut(columns: Mapping[str, Any], order: Int64) -> tuple[int, bool]:
    """(when the last event in the file began, of the operators or of the devices and the calls to them: the earlier
    one; whether all operators are there, since devices' events come after them). ``order`` holds the place in the file
    of each row.
    """
    category, start_ns = columns["category"], columns["start_ns"]
    operators, of_devices = (
        np.flatnonzero(np.isin(category, kinds)) for kinds in ((Category.CPU_OP,), (Category.RUNTIME, *DEVICE_WORK))
    )
    begun = [int(start_ns[there[np.argmax(order[there])]]) for there in (operators, of_devices) if len(there)]
    apart = len(of_devices) > 0 and order[operators].max(initial=-1) < order[of_devices].min()
    return min(begun, default=int(start_ns.max())), bool(apart)


def _thread_key(event: Begin | End | Metadata) -> tuple[str, str]:
    return str(event.pid), str(event.tid)


def _collectives(
    columns: ChromeColumns, rows: Int64, groups: tuple[ProcessGroup, ...]
) -> tuple[CollectiveArgs, tuple[ProcessGroup, ...]]:
    """(collectives of the events at ``rows`` of the file, in that order; groups, completed from the events)."""
    table = columns.finish_collectives()
    place = np.full(columns.rows, NONE, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    row = place[table["row"]]
    order = np.argsort(row, kind="stable")
    order = order[row[order] != NONE]
    groups = groups + _groups_of_events(columns, table, {group.name for group in groups})
    ranks = _complete_ranks(columns, table["group"], table["ranks"], {group.name: group.ranks for group in groups})
    texts = {name: table[name][order].astype(np.int32) for name in ("kind", "group", "dtype")}
    numbers = ("elements_in", "elements_out", "group_size", "sequence", "peer")
    others = {name: table[name][order] for name in numbers}
    return CollectiveArgs(row=row[order], ranks=ranks[order], **texts, **others), groups


def _graph_nodes(columns: ChromeColumns, rows: Int64) -> GraphNodes:
    """The kernels of CUDA graphs among the events at ``rows`` of the file, in that order."""
    row, node, annotation = columns.finish_graph_nodes()
    place = np.full(columns.rows, NONE, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    row = place[row]
    order = np.argsort(row, kind="stable")
    order = order[row[order] != NONE]
    return GraphNodes(row[order], node[order], annotation[order])


def _groups_of_events(columns: ChromeColumns, table: dict[str, Int64], known: set[str]) -> tuple[ProcessGroup, ...]:
    """Groups that only the events name: the list of groups may be missing, or older than the groups."""
    strings = columns.strings.values
    groups: dict[str, ProcessGroup] = {}
    described = zip(table["group"].tolist(), table["description"].tolist(), table["ranks"].tolist(), strict=True)
    for group, description, ranks in sorted(set(described)):
        name = strings[group] if group != NONE else ""
        if name and name not in known and name not in groups:
            listed = chrome_metadata.ranks_of(strings[ranks]) if ranks != NONE else ()
            groups[name] = ProcessGroup(name, strings[description] if description != NONE else "", listed)
    return tuple(groups.values())


def _complete_ranks(columns: ChromeColumns, group: Int64, ranks: Int64, known: dict[str, tuple[int, ...]]) -> Int32:
    """Lists of ranks; shortened ones are replaced by the group's own list, where there is one."""
    strings = columns.strings
    completed = ranks.astype(np.int32)
    for group_id, ranks_id in set(zip(group.tolist(), ranks.tolist(), strict=True)):
        if NONE in (group_id, ranks_id) or _ELISION not in strings.values[ranks_id]:
            continue
        if whole := known.get(strings.values[group_id]):
            completed[(group == group_id) & (ranks == ranks_id)] = strings.ids[json.dumps(list(whole))]
    return completed
