"""Adds to each collective of a CPU job what gloo's events lack: kind, group, number within it, peer, type, bytes.

Device libraries describe their kernels themselves; gloo's events have a name and shapes, no more. Every collective,
whoever calls it (Python, DDP's C++ reducer, functional collectives in eager or compiled code), passes through an
operator ``c10d::*`` of torch's dispatcher. While a capture runs, each of these operators has a kernel of ours at a key
that no backend uses; it opens a range and hands the call on with the same arguments.
"""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from perfscope.collectors.annotate import Annotator
from perfscope.collectors.problems import Problems
from perfscope.recording.vocabulary import COLLECTIVE_PREFIX

KINDS: Final = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "barrier": "barrier",
    "broadcast_": "broadcast",
    "gather_": "gather",
    "monitored_barrier_": "barrier",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "reduce_": "reduce",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "scatter_": "scatter",
    "send": "send",
}
"""Operators of the dispatcher (torch's csrc/distributed/c10d/Ops.cpp) -> what they carry out."""

_KEY: Final = "BackendSelect"
"""Every call passes this key first, whatever its tensors, where the operator has a kernel there; below are backends."""

_INPUTS: Final = ("tensors", "inputs", "input_tensors", "input_tensor", "input_list", "input")
_OUTPUTS: Final = ("outputs", "output_tensors", "output_tensor", "output_lists", "output")


class CollectiveRanges:
    """The ranges around one process's collectives; installed for each capture of a job without accelerators."""

    def __init__(self, annotator: Annotator, problems: Problems) -> None:
        self._annotator = annotator
        self._problems = problems
        self._library: Any = None
        self._active = False
        self._pid = os.getpid()
        self._issued: Counter[tuple[str, tuple[Any, ...]]] = Counter()

    def install(self) -> None:
        """Begin to write ranges. Does nothing where the process is in no group or torch is too old.

        Between two steps on the training thread: the dispatcher bears no change while another thread calls the very
        operator, and on the CPU nothing else calls these then.
        """
        import torch

        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return
        if "with_keyset" not in inspect.signature(torch.library.Library.impl).parameters:
            return  # without the keys of the call, it cannot be handed on
        self._issued.clear()
        self._active = True
        self._library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        below = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, _KEY))
        for name, kind in KINDS.items():
            operator = getattr(torch.ops.c10d, name, None)
            if operator is not None:
                ranged = self._around(operator.default, kind, below)
                self._library.impl(name, ranged, _KEY, with_keyset=True)

    def remove(self) -> None:
        """Stop writing ranges; the operators are as they were.

        In a forked child they are left as they are, and hand every call on: the dispatcher's lock may be held there.
        """
        self._active = False
        if self._library is not None and os.getpid() == self._pid:
            self._library._destroy()
            self._library = None

    def _around(self, operator: Any, kind: str, below: Any) -> Callable[..., Any]:
        """A kernel for ``operator`` that calls the one below it within a range."""
        call = _Call(operator, kind)

        def ranged(keys: Any, *arguments: Any) -> Any:
            record = None
            if self._active:
                record = self._problems.guard("describing collectives", self._begin, call, arguments)
            try:
                return operator.redispatch(keys & below, *arguments)
            finally:
                if record is not None:
                    self._problems.guard("closing a range", self._annotator.end, record)

        return ranged

    def _begin(self, call: _Call, arguments: tuple[Any, ...]) -> Any:
        """Open the range; its name's format is stated at :data:`perfscope.recording.vocabulary.COLLECTIVE_PREFIX`."""
        group = call.group(arguments)
        name, size = group.group_name, group.size()
        peer, channel = call.channel(group, arguments)
        sequence = self._issued[name, channel]
        self._issued[name, channel] += 1
        dtype, moved = call.payload(arguments, size)
        return self._annotator.begin(f"{COLLECTIVE_PREFIX}{call.kind}|{name}|{size}|{sequence}|{peer}|{dtype}|{moved}")


class _Call:
    """What the arguments of one operator mean. Made once, asked at every call."""

    def __init__(self, operator: Any, kind: str) -> None:
        import torch.distributed

        place = {argument.name: index for index, argument in enumerate(operator._schema.arguments)}
        self.kind = kind
        self._process_group: Any = torch.distributed.ProcessGroup
        self._global_rank: Any = torch.distributed.get_global_rank
        self._tensor: Any = torch.Tensor
        self._group = place["process_group"]
        self._peer = place.get("dst", place.get("src"))
        self._tag = place.get("tag")
        # A barrier's tensor only shows on which device.
        self._inputs = [place[name] for name in _INPUTS if name in place and kind != "barrier"]
        self._outputs = [place[name] for name in _OUTPUTS if name in place]

    def group(self, arguments: tuple[Any, ...]) -> Any:
        """The process group, which the dispatcher hands over as an object of TorchScript."""
        boxed = arguments[self._group]
        return boxed if isinstance(boxed, self._process_group) else self._process_group.unbox(boxed)

    def channel(self, group: Any, arguments: tuple[Any, ...]) -> tuple[int | str, tuple[Any, ...]]:
        """The other side's global rank (empty for none or any), and what messages are numbered by within the group."""
        if self.kind not in ("send", "recv"):
            return "", ()
        peer: int | str = ""
        if self._peer is not None:
            with suppress(ValueError, RuntimeError):  # a group that torch.distributed did not make
                peer = int(self._global_rank(group, arguments[self._peer]))
        return peer, (self.kind, peer, None if self._tag is None else arguments[self._tag])

    def payload(self, arguments: tuple[Any, ...], ranks: int) -> tuple[str, int | str]:
        """Type (empty where there are several) and bytes by the convention of nccl-tests; empty without a tensor."""
        inputs = [tensor for place in self._inputs for tensor in self._tensors(arguments[place])]
        outputs = [tensor for place in self._outputs for tensor in self._tensors(arguments[place])]
        types = {tensor.dtype for tensor in (*inputs, *outputs)}
        if not types:
            return "", ""
        dtype = str(types.pop()).removeprefix("torch.") if len(types) == 1 else ""
        moved = sum(tensor.numel() * tensor.element_size() for tensor in inputs)
        received = sum(tensor.numel() * tensor.element_size() for tensor in outputs)
        # The larger buffer of a gather or scatter may be known to the root alone.
        if self.kind in ("all_gather", "gather"):
            return dtype, max(received, moved * ranks)
        if self.kind in ("reduce_scatter", "scatter"):
            return dtype, max(moved, received * ranks)
        return dtype, moved

    def _tensors(self, value: Any) -> list[Any]:
        """The tensors in an argument, which may be a tensor, a list of them, or a list of lists."""
        if isinstance(value, self._tensor):
            return [value]
        return [tensor for item in value or () for tensor in self._tensors(item)]
