"""Communication kernels of one rank as collectives, by what describes them."""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from perfscope.analyzers.collectives.communication import (
    DTYPE_BYTES,
    Group,
    Messages,
    device_communication,
    dtype_of,
    is_known_kind,
    kind_of,
    kind_of_kernel,
    parse_ranks,
)
from perfscope.analyzers.collectives.found import Found, What, assumed_group, group_of, listed_groups, looked_up
from perfscope.analyzers.collectives.sources import Sources, find_sources
from perfscope.analyzers.launches import DeviceWork
from perfscope.trace import NONE, Int32, Int64, Trace

_LARGER: Final = ("all_gather", "reduce_scatter", "gather", "scatter")
"""Kinds whose size is that of the larger of the two buffers (nccl-tests)."""

_PEER: Final = re.compile(r" \d+(?:->|<-)(\d+)$")
"""In ``nccl:send 0->1`` and ``nccl:recv 1<-0``: the other side's number within the group."""


def on_device(trace: Trace, work: DeviceWork) -> Found:
    """The communication kernels among a rank's device work."""
    chosen = np.flatnonzero(device_communication(trace, work))
    kernels, calls = work.row[chosen], work.launch[chosen]
    sources = find_sources(trace, kernels, calls)
    entry = sources.entry
    what, described = _describe(trace, kernels, sources)
    size = _sizes(trace, entry, what, described)
    messages = _messages(trace, sources, what, described, size)
    several = np.bincount(sources.batch_kernel, minlength=len(kernels)) > 0
    size[several] = _exchanged(messages, len(kernels))[several]
    return Found(
        start_ns=work.start_ns[chosen],
        end_ns=work.end_ns[chosen],
        stream=trace.stream[kernels],
        issued_ns=np.where(calls == NONE, NONE, trace.start_ns[calls]),
        what=what,
        bytes=size,
        sequence=_taken(trace.collectives.sequence, entry),
        described=described,
        messages=messages,
    )


def _describe(trace: Trace, kernels: Int64, sources: Sources) -> tuple[Int64, list[What]]:
    """(which of the descriptions each kernel has, the descriptions)."""
    args = trace.collectives
    several = np.bincount(sources.batch_kernel, minlength=len(kernels)) > 1
    columns: tuple[Int32 | Int64, ...] = (args.kind, args.group, args.ranks, args.dtype, args.group_size)
    keys: Int64 = np.stack(
        (*(_taken(column, sources.entry) for column in columns), sources.title, trace.name[kernels], several), axis=1
    )
    distinct, what = np.unique(keys, axis=0, return_inverse=True)
    reader = _Reader(trace)
    return what.ravel().astype(np.int64), [reader.read(*key) for key in distinct.tolist()]


class _Reader:
    """Gives what a trace says of a collective its meaning."""

    def __init__(self, trace: Trace) -> None:
        self._strings = trace.strings
        self._listed = listed_groups(trace)
        self._assumed = assumed_group(trace)

    def read(
        self, kind: int, group: int, ranks: int, dtype: int, group_size: int, title: int, kernel: int, several: int
    ) -> What:
        """All arguments but the last and ``group_size`` are indices of strings, NONE where nothing is said."""
        return What(
            self._group(self._text(group), self._text(ranks), group_size),
            "send_recv" if several else self._kind(self._text(kind), self._text(title), self._text(kernel)),
            dtype_of(self._text(dtype)),
        )

    def _text(self, index: int) -> str:
        return "" if index == NONE else self._strings[index]

    def _group(self, name: str, listed: str, size: int) -> Group:
        known = self._listed.get(name)
        ranks = parse_ranks(listed) or (known.ranks if known else ())
        if not name and not ranks:
            return self._assumed
        return group_of(name, ranks, len(ranks) or (size if size > 0 else None), known.description if known else "")

    @staticmethod
    def _kind(said: str, title: str, kernel: str) -> str:
        by_name = kind_of_kernel(kernel)
        # A title may go on to name the ranks.
        for text in (said, title.partition(" ")[0]):
            kind = kind_of(text) if text else ""
            if is_known_kind(kind) and kind != "coalesced":
                return kind
        return kind_of(said) if said and by_name == "unknown" else by_name


def _taken(column: Int32 | Int64, entry: Int64) -> Int64:
    """The column's values at the entries; NONE where there is none."""
    if len(column) == 0:
        return np.full(len(entry), NONE, dtype=np.int64)
    return np.where(entry == NONE, NONE, column[entry]).astype(np.int64)


def _sizes(trace: Trace, entry: Int64, what: Int64, described: list[What]) -> Int64:
    """Bytes by the conventions of nccl-tests; NONE where not said."""
    element = np.array([DTYPE_BYTES.get(each.dtype or "", 0) for each in described] or [0], dtype=np.int64)[what]
    larger = np.array([each.kind in _LARGER for each in described] or [False], dtype=np.bool_)[what]
    moved, received = _taken(trace.collectives.elements_in, entry), _taken(trace.collectives.elements_out, entry)
    elements = np.where(larger | (moved <= 0), np.maximum(moved, received), moved)
    return np.where((elements > 0) & (element > 0), elements * element, NONE)


def _messages(trace: Trace, sources: Sources, what: Int64, described: list[What], size: Int64) -> Messages:
    """The messages of all kernels that are sends or receipts, alone or in a batch, in the order of issue."""
    kinds = np.array([each.kind for each in described] or [""], dtype=np.str_)[what]
    batched = np.bincount(sources.batch_kernel, minlength=len(what)) > 0
    alone = np.flatnonzero(np.isin(kinds, ("send", "recv")) & ~batched)
    peer = _taken(trace.collectives.peer, sources.entry[alone])
    for place in np.flatnonzero((peer == NONE) & (sources.title[alone] != NONE)).tolist():
        kernel = alone[place]
        peer[place] = _peer_in_title(trace.strings[sources.title[kernel]], described[what[kernel]].group)
    entry, args = sources.batch_entry, trace.collectives
    # Each is described by its own operator, whose type may be another than that of the batch's first.
    element = looked_up(trace, args.dtype[entry], lambda text: DTYPE_BYTES.get(dtype_of(text) or "", 0))
    length = args.elements_in[entry] * np.array(element, dtype=np.int64)
    sent = looked_up(trace, args.kind[entry], lambda text: kind_of(text) == "send")
    return Messages(
        collective=np.concatenate((alone, sources.batch_kernel)),
        peer=np.concatenate((peer, args.peer[entry])),
        sends=np.concatenate((kinds[alone] == "send", np.array(sent, dtype=np.bool_))),
        bytes=np.concatenate((size[alone], np.where(length > 0, length, NONE))),
    )


def _peer_in_title(title: str, group: Group) -> int:
    match = _PEER.search(title)
    number = int(match[1]) if match else len(group.ranks)
    return group.ranks[number] if number < len(group.ranks) else NONE


def _exchanged(messages: Messages, kernels: int) -> Int64:
    """Bytes of each kernel's busier direction; NONE where a length is not said."""
    sums = [
        np.bincount(messages.collective[way], weights=np.maximum(messages.bytes[way], 0), minlength=kernels)
        for way in (messages.sends, ~messages.sends)
    ]
    silent = np.bincount(messages.collective[messages.bytes == NONE], minlength=kernels) > 0
    return np.where(silent, NONE, np.maximum(*sums).astype(np.int64))
