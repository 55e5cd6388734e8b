"""Listens to the operators that carry out collectives and messages, and knows what their arguments mean.

Every collective, whoever calls it (Python, DDP's C++ reducer, functional collectives in eager or compiled code),
passes through an operator ``c10d::*`` of torch's dispatcher. An operator that somebody listens to has a kernel of ours
at a key that no backend uses; it tells the listeners and hands the call on with the same arguments.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final, Protocol

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


class Listener(Protocol):
    """What is told of calls. It raises nothing."""

    def begins(self, call: Call, arguments: tuple[Any, ...]) -> Any:
        """The operator is called; what is returned goes to :meth:`ended`, unless it is None."""

    def ended(self, begun: Any, result: Any) -> None:
        """The call is over; ``result`` None where it failed."""


class Call:
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

    @property
    def is_message(self) -> bool:
        """From one rank to another."""
        return self.kind in ("send", "recv")

    def group(self, arguments: tuple[Any, ...]) -> Any:
        """The process group, which the dispatcher hands over as an object of TorchScript."""
        boxed = arguments[self._group]
        return boxed if isinstance(boxed, self._process_group) else self._process_group.unbox(boxed)

    def peer(self, arguments: tuple[Any, ...]) -> int | None:
        """The other side of a message, by its number in the group; None for any and for collectives."""
        return int(arguments[self._peer]) if self.is_message and self._peer is not None else None

    def channel(self, group: Any, arguments: tuple[Any, ...]) -> tuple[int | str, tuple[Any, ...]]:
        """The other side's global rank (empty for none or any), and what messages are numbered by within the group."""
        if not self.is_message:
            return "", ()
        peer: int | str = ""
        if self._peer is not None:
            with suppress(ValueError, RuntimeError):  # a group that torch.distributed did not make
                peer = int(self._global_rank(group, arguments[self._peer]))
        return peer, (self.kind, peer, None if self._tag is None else arguments[self._tag])

    def inputs(self, arguments: tuple[Any, ...]) -> list[Any]:
        """The tensors that go in."""
        return [tensor for place in self._inputs for tensor in self._tensors(arguments[place])]

    def outputs(self, arguments: tuple[Any, ...]) -> list[Any]:
        """The tensors that come out."""
        return [tensor for place in self._outputs for tensor in self._tensors(arguments[place])]

    def _tensors(self, value: Any) -> list[Any]:
        """The tensors in an argument, which may be a tensor, a list of them, or a list of lists."""
        if isinstance(value, self._tensor):
            return [value]
        return [tensor for item in value or () for tensor in self._tensors(item)]


class _Operator:
    """One operator that somebody listens to."""

    def __init__(self, operator: Any, kind: str, name: str) -> None:
        import torch

        self.listeners: tuple[Listener, ...] = ()
        self._operator, self._call = operator, Call(operator, kind)
        self._below = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, _KEY))
        self._library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        self._library.impl(name, self._kernel(), _KEY, with_keyset=True)  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """The operator is as it was."""
        self._library._destroy()  # type: ignore[no-untyped-call]

    def _kernel(self) -> Callable[..., Any]:
        operator, call, below = self._operator, self._call, self._below

        def told(keys: Any, *arguments: Any) -> Any:
            begun = [(listener, listener.begins(call, arguments)) for listener in self.listeners]
            result = None
            try:
                result = operator.redispatch(keys & below, *arguments)
                return result
            finally:
                for listener, each in begun:
                    if each is not None:
                        listener.ended(each, result)

        return told


_operators: dict[str, _Operator] = {}
"""Those that somebody listens to, by name."""

_pid: Final = [os.getpid()]


def listen(listener: Listener, names: Iterable[str] = tuple(KINDS)) -> None:
    """Tell ``listener`` of every call of these operators. Does nothing where torch is too old.

    Only while no other thread calls them, since the dispatcher bears no change then.
    """
    import torch

    if "with_keyset" not in inspect.signature(torch.library.Library.impl).parameters:
        return  # without the keys of the call, it cannot be handed on
    _pid[0] = os.getpid()
    for name in names:
        operator = getattr(torch.ops.c10d, name, None)
        if operator is not None:
            if name not in _operators:
                _operators[name] = _Operator(operator.default, KINDS[name], name)
            _operators[name].listeners += (listener,)


def ignore(listener: Listener) -> None:
    """Tell it nothing more; operators that nobody listens to are as they were.

    In a forked child they are left as they are, and hand every call on: the dispatcher's lock may be held there.
    """
    for name, operator in list(_operators.items()):
        operator.listeners = tuple(each for each in operator.listeners if each is not listener)
        if not operator.listeners and os.getpid() == _pid[0]:
            _operators.pop(name).remove()
