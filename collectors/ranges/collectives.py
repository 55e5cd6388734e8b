"""Adds to each collective of a CPU job what gloo's events lack: kind, group, number within it, peer, type, bytes.

Device libraries describe their kernels themselves; gloo's events have a name and shapes, no more. While a capture
runs, a range lies around each operator that carries out a collective (:mod:`perfscope.collectors.operators`).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from perfscope.collectors.annotate import Annotator
from perfscope.collectors.operators import Call, ignore, listen
from perfscope.collectors.problems import Problems
from perfscope.recording.vocabulary import COLLECTIVE_PREFIX


class CollectiveRanges:
    """The ranges around one process's collectives; installed for each capture of a job without accelerators."""

    def __init__(self, annotator: Annotator, problems: Problems) -> None:
        self._annotator = annotator
        self._problems = problems
        self._issued: Counter[tuple[str, tuple[Any, ...]]] = Counter()

    def install(self) -> None:
        """Begin to write ranges. Does nothing where the process is in no group or torch is too old.

        Between two steps on the training thread: on the CPU nothing else calls the operators then.
        """
        import torch.distributed

        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._issued.clear()
            listen(self)

    def remove(self) -> None:
        """Stop writing ranges."""
        ignore(self)

    def begins(self, call: Call, arguments: tuple[Any, ...]) -> Any:
        """Open a range."""
        return self._problems.guard("describing collectives", self._begin, call, arguments)

    def ended(self, begun: Any, _result: Any) -> None:
        """Close it."""
        self._problems.guard("closing a range", self._annotator.end, begun)

    def _begin(self, call: Call, arguments: tuple[Any, ...]) -> Any:
        """Open the range; its name's format is stated at :data:`perfscope.recording.vocabulary.COLLECTIVE_PREFIX`."""
        group = call.group(arguments)
        name, size = group.group_name, group.size()
        peer, channel = call.channel(group, arguments)
        sequence = self._issued[name, channel]
        self._issued[name, channel] += 1
        dtype, moved = _payload(call, arguments, size)
        return self._annotator.begin(f"{COLLECTIVE_PREFIX}{call.kind}|{name}|{size}|{sequence}|{peer}|{dtype}|{moved}")


def _payload(call: Call, arguments: tuple[Any, ...], ranks: int) -> tuple[str, int | str]:
    """Type (empty where there are several) and bytes by the convention of nccl-tests; empty without a tensor."""
    inputs, outputs = call.inputs(arguments), call.outputs(arguments)
    types = {tensor.dtype for tensor in (*inputs, *outputs)}
    if not types:
        return "", ""
    dtype = str(types.pop()).removeprefix("torch.") if len(types) == 1 else ""
    moved = sum(tensor.numel() * tensor.element_size() for tensor in inputs)
    received = sum(tensor.numel() * tensor.element_size() for tensor in outputs)
    # The larger buffer of a gather or scatter may be known to the root alone.
    if call.kind in ("all_gather", "gather"):
        return dtype, max(received, moved * ranks)
    if call.kind in ("reduce_scatter", "scatter"):
        return dtype, max(moved, received * ranks)
    return dtype, moved
