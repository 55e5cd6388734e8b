"""The communication kernels of one rank as collectives.

What a kernel carries out is described by the first of these that the trace has: the kernel's own metadata; the
``record_param_comms`` operator around its launch (ROCm's kernels have no metadata); for a batch of sends and recvs, the
operators before its launch; the backend's range around the launch, which names the kind and, for a single send or recv,
the ranks.
"""

from __future__ import annotations

import json
import re
from typing import Final

import numpy as np

from perfscope.analyzers.rank.collectives import raw
from perfscope.analyzers.rank.collectives.autograd import after_backward, in_backward, in_norms, in_parameters
from perfscope.analyzers.rank.collectives.collectives import Group, Messages
from perfscope.analyzers.rank.collectives.communication import (
    DTYPE_BYTES,
    device_communication,
    dtype_of,
    dtype_of_kernel,
    host_communication_rows,
    is_known_kind,
    kind_of,
    kind_of_kernel,
)
from perfscope.analyzers.rank.launches import DeviceWork
from perfscope.analyzers.rank.nesting import Nested, taken
from perfscope.frozen import dataclass
from perfscope.trace.trace import NONE, Bool, Category, Int32, Int64, Trace

_ALL_TO_ALL: Final = "all_to_all"
_LARGER: Final = ("all_gather", "reduce_scatter", "gather", "scatter", _ALL_TO_ALL)
"""Kinds whose size is the larger of the two buffers (nccl-tests; those of an all-to-all differ where its ranks send and
receive different amounts, and it takes as long as the busiest direction)."""

_PEER: Final = re.compile(r" \d+(?:->|<-)(\d+)$")
"""In ``nccl:send 0->1`` and ``nccl:recv 1<-0``: the peer's number within the group."""

_TITLE_PREFIX: Final = "nccl:"
"""Range of torch's ProcessGroupNCCL around a launch: ``nccl:all_to_all``, ``nccl:send 0->1``."""


def on_device(trace: Trace, work: DeviceWork) -> raw.RawCollectives:
    """The communication kernels among a rank's device work."""
    chosen = np.flatnonzero(device_communication(trace, work))
    kernels, calls = work.row[chosen], work.launch[chosen]
    descriptions = _find_descriptions(trace, kernels, calls)
    entry = descriptions.entry
    key, keys = _describe(trace, kernels, descriptions)
    size, mean = _sizes(trace, entry, key, keys)
    messages = _messages(trace, descriptions, key, keys, size)
    several = np.bincount(descriptions.batch_kernel, minlength=len(kernels)) > 0
    size[several] = mean[several] = _exchanged(messages, len(kernels))[several]
    issued = np.where(calls == NONE, NONE, trace.start_ns[calls])
    return raw.RawCollectives(
        start_ns=work.start_ns[chosen],
        end_ns=work.end_ns[chosen],
        stream=trace.stream[kernels],
        issued_ns=issued,
        key=key,
        bytes=size,
        mean_bytes=mean,
        sequence=taken(trace.collectives.sequence, entry),
        keys=keys,
        backward=in_backward(trace, issued, calls),
        after_backward=after_backward(trace, issued),
        in_parameters=in_parameters(trace, issued),
        in_norms=in_norms(trace, issued),
        messages=messages,
        on_host=bool(len(kernels)) and bool(np.isin(kernels, host_communication_rows(trace, Category.KERNEL)).all()),
    )


def _describe(trace: Trace, kernels: Int64, descriptions: _Descriptions) -> tuple[Int64, list[raw.CollectiveKey]]:
    """(index of each kernel's key, the keys)."""
    args = trace.collectives
    several = np.bincount(descriptions.batch_kernel, minlength=len(kernels)) > 1
    columns: tuple[Int32 | Int64, ...] = (args.kind, args.group, args.ranks, args.dtype, args.group_size)
    labels: Int64 = np.stack(
        (*(taken(column, descriptions.entry) for column in columns), descriptions.title, trace.name[kernels], several),
        axis=1,
    )
    distinct, key = np.unique(labels, axis=0, return_inverse=True)
    reader = _KeyReader(trace)
    return key.ravel().astype(np.int64), [reader.read(*label) for label in distinct.tolist()]


class _KeyReader:
    """Turns the texts by which a trace describes a collective into a key."""

    def __init__(self, trace: Trace) -> None:
        self._strings = trace.strings
        self._listed = raw.listed_groups(trace)
        self._assumed = raw.assumed_group(trace)

    def read(
        self, kind: int, group: int, ranks: int, dtype: int, group_size: int, title: int, kernel: int, several: int
    ) -> raw.CollectiveKey:
        """All arguments but ``several`` and ``group_size`` are indices of strings, NONE where not recorded."""
        return raw.CollectiveKey(
            self._group(self._text(group), self._text(ranks), group_size),
            "send_recv" if several else self._kind(self._text(kind), self._text(title), self._text(kernel)),
            dtype_of(self._text(dtype)) or dtype_of_kernel(self._text(kernel)),
        )

    def _text(self, index: int) -> str:
        return "" if index == NONE else self._strings[index]

    def _group(self, name: str, listed: str, size: int) -> Group:
        known = self._listed.get(name)
        ranks = _parse_ranks(listed) or (known.ranks if known else ())
        if not name and not ranks:
            return self._assumed
        return raw.group_of(name, ranks, len(ranks) or (size if size > 0 else None), known.description if known else "")

    @staticmethod
    def _kind(recorded: str, title: str, kernel: str) -> str:
        by_name = kind_of_kernel(kernel)
        # A title may name the ranks too.
        for text in (recorded, title.partition(" ")[0]):
            kind = kind_of(text) if text else ""
            if is_known_kind(kind) and kind != "coalesced":
                return kind
        return kind_of(recorded) if recorded and by_name == "unknown" else by_name


def _sizes(trace: Trace, entry: Int64, key: Int64, keys: list[raw.CollectiveKey]) -> tuple[Int64, Int64]:
    """(``bytes``, ``mean_bytes``) of ``Collectives``; NONE where not recorded."""
    element = np.array([DTYPE_BYTES.get(each.dtype or "", 0) for each in keys] or [0], dtype=np.int64)[key]
    larger = np.array([each.kind in _LARGER for each in keys] or [False], dtype=np.bool_)[key]
    args = trace.collectives
    elements_in, elements_out = taken(args.elements_in, entry), taken(args.elements_out, entry)
    elements = np.where(larger | (elements_in <= 0), np.maximum(elements_in, elements_out), elements_in)
    both = np.array([each.kind == _ALL_TO_ALL for each in keys] or [False], dtype=np.bool_)[key]
    both &= (elements_in > 0) & (elements_out > 0)
    mean = np.where(both, (elements_in + elements_out) // 2, elements)
    known = (elements > 0) & (element > 0)
    return np.where(known, elements * element, NONE), np.where(known, mean * element, NONE)


def _messages(
    trace: Trace, descriptions: _Descriptions, key: Int64, keys: list[raw.CollectiveKey], size: Int64
) -> Messages:
    """The messages of all kernels that are sends or recvs, alone or in a batch, in the order of issue."""
    kinds = np.array([each.kind for each in keys] or [""], dtype=np.str_)[key]
    batched = np.bincount(descriptions.batch_kernel, minlength=len(key)) > 0
    alone = np.flatnonzero(np.isin(kinds, ("send", "recv")) & ~batched)
    peer = taken(trace.collectives.peer, descriptions.entry[alone])
    for place in np.flatnonzero((peer == NONE) & (descriptions.title[alone] != NONE)).tolist():
        kernel = alone[place]
        peer[place] = _peer_in_title(trace.strings[descriptions.title[kernel]], keys[key[kernel]].group)
    entry, args = descriptions.batch_entry, trace.collectives
    # Each has its own operator, whose type may differ from that of the batch's first.
    element = raw.looked_up(trace, args.dtype[entry], lambda text: DTYPE_BYTES.get(dtype_of(text) or "", 0))
    length = args.elements_in[entry] * np.array(element, dtype=np.int64)
    sent = raw.looked_up(trace, args.kind[entry], lambda text: kind_of(text) == "send")
    return Messages(
        collective=np.concatenate((alone, descriptions.batch_kernel)),
        peer=np.concatenate((peer, args.peer[entry])),
        sends=np.concatenate((kinds[alone] == "send", np.array(sent, dtype=np.bool_))),
        bytes=np.concatenate((size[alone], np.where(length > 0, length, NONE))),
    )


def _peer_in_title(title: str, group: Group) -> int:
    match = _PEER.search(title)
    number = int(match[1]) if match else len(group.ranks)
    return group.ranks[number] if number < len(group.ranks) else NONE


def _exchanged(messages: Messages, kernels: int) -> Int64:
    """Bytes of each kernel's busier direction; NONE where a length is not recorded."""
    sums = [
        np.bincount(messages.collective[way], weights=np.maximum(messages.bytes[way], 0), minlength=kernels)
        for way in (messages.sends, ~messages.sends)
    ]
    incomplete = np.bincount(messages.collective[messages.bytes == NONE], minlength=kernels) > 0
    return np.where(incomplete, NONE, np.maximum(*sums).astype(np.int64))


def _parse_ranks(text: str) -> tuple[int, ...]:
    """Ranks from a recorded list such as ``[0, 1]``; empty if it is shortened (``...``) or no list."""
    try:
        values = json.loads(text)
    except ValueError:
        return ()
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        return ()
    return tuple(values)


@dataclass(frozen=True, eq=False)
class _Descriptions:
    """What describes each kernel.

    ``entry`` is the kernel's entry in ``trace.collectives``; where it has none, ``title`` is the name (index of a
    string) of the backend's range around its launch. NONE where there is none.

    ``batch_kernel`` (index of a kernel) and ``batch_entry`` are pairs: one kernel carries out the sends and recvs of
    several operators; its ``entry`` is the first of them.
    """

    entry: Int64
    title: Int64
    batch_kernel: Int64
    batch_entry: Int64


def _find_descriptions(trace: Trace, kernels: Int64, calls: Int64) -> _Descriptions:
    """Find what describes the ``kernels`` (rows), which ``calls`` (rows, NONE: not recorded) launched."""
    operators = _CommunicationOperators(trace)
    around = operators.around(calls)
    own = _own_entries(trace, kernels)
    entry = np.where(own == NONE, around, own)
    open_ = (entry == NONE) | operators.is_coalesced(entry)
    kernel, pair = operators.batches(calls, around, open_ & _may_be_batch(trace, kernels))
    first, place = np.unique(kernel, return_index=True)
    entry[first] = pair[place]
    return _Descriptions(entry, _titles(trace, calls, entry), kernel, pair)


def _own_entries(trace: Trace, kernels: Int64) -> Int64:
    rows = trace.collectives.row
    if len(rows) == 0:
        return np.full(len(kernels), NONE, dtype=np.int64)
    place = np.minimum(np.searchsorted(rows, kernels), len(rows) - 1)
    return np.where(rows[place] == kernels, place, NONE)


def _may_be_batch(trace: Trace, kernels: Int64) -> Bool:
    """By their names: a kernel for sends and recvs, or one for all collectives (RCCL's)."""
    may = raw.looked_up(trace, trace.name[kernels], lambda name: kind_of_kernel(name) in ("send_recv", "unknown"))
    return np.array(may, dtype=np.bool_)


def _titles(trace: Trace, calls: Int64, entry: Int64) -> Int64:
    """Names of the backend's ranges around the launches of kernels without an entry."""
    wanted = np.where(entry == NONE, calls, NONE)
    if (wanted == NONE).all():
        return wanted
    titles = trace.rows(Category.ANNOTATION, Category.CPU_OP, named=lambda name: name.startswith(_TITLE_PREFIX))
    nested = Nested.of(trace, titles)
    return taken(trace.name[nested.row], nested.around(trace, wanted))


class _CommunicationOperators:
    """The host operators that describe collectives."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        args = trace.collectives
        self._one_way = np.array(
            raw.looked_up(trace, args.kind, lambda text: kind_of(text) in ("send", "recv")), np.bool_
        )
        self._coalesced = np.array(raw.looked_up(trace, args.kind, lambda text: kind_of(text) == "coalesced"), np.bool_)
        self._entries = np.flatnonzero(trace.category[args.row] == Category.CPU_OP)

    def is_coalesced(self, entry: Int64) -> Bool:
        """Which entries describe only a batch, without its contents; False where there is no entry."""
        return np.append(self._coalesced, False)[entry]

    def around(self, calls: Int64) -> Int64:
        """The entry of the innermost operator around each launch; NONE where there is none."""
        rows = self._trace.collectives.row
        nested = Nested.of(self._trace, rows[self._entries])
        return taken(np.searchsorted(rows, nested.row), nested.around(self._trace, calls))

    def batches(self, calls: Int64, around: Int64, may_be: Bool) -> tuple[Int64, Int64]:
        """(kernel, entry) of every send and recv that was issued before the launch of a batch.

        Inside a batch (``batch_isend_irecv``, ``ncclGroupStart``) an operator launches nothing. When the batch ends,
        one kernel carries out all of it, launched on the same thread before any other.
        """
        trace = self._trace
        rows = trace.collectives.row[self._entries]
        waiting = self._one_way[self._entries] & ~np.isin(self._entries, around)
        entries, rows = self._entries[waiting], rows[waiting]
        launched = np.flatnonzero(calls != NONE)
        if len(entries) == 0 or len(launched) == 0:
            nothing = np.empty(0, dtype=np.int64)
            return nothing, nothing
        origin, span = int(trace.start_ns[0]), int(trace.end_ns.max() - trace.start_ns[0]) + 1
        launch = trace.thread[calls[launched]].astype(np.int64) * span + trace.start_ns[calls[launched]] - origin
        asked = trace.thread[rows].astype(np.int64) * span + trace.start_ns[rows] - origin
        order = np.argsort(launch, kind="stable")
        launched, launch = launched[order], launch[order]
        after = np.searchsorted(launch, asked)
        place = np.minimum(after, len(launched) - 1)
        kernel = launched[place]
        fits = (after < len(launched)) & (trace.thread[calls[kernel]] == trace.thread[rows]) & may_be[kernel]
        return kernel[fits], entries[fits]
