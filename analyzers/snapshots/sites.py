"""Where memory was asked for, from a stack: the phase of training, the module, and the call.

The phase is what the calls show, from the outermost to the innermost: an optimizer's step, a backward (autograd's
engine, a recomputed checkpoint), a forward of a module, a data loader. Threads of autograd's engine run no Python: with
Python stacks alone an allocation without any call is the backward's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import PurePath
from typing import Final, NamedTuple

from perfscope.analyzers.readers.flight import Frame
from perfscope.analyzers.readers.stacks import is_library, user_call

FORWARD, BACKWARD, OPTIMIZER, SETUP, DATA, OTHER, BEFORE = (
    "forward", "backward", "optimizer", "setup", "data", "other", "before"
)  # fmt: skip
PHASES: Final = (SETUP, FORWARD, BACKWARD, OPTIMIZER, DATA, OTHER, BEFORE)
"""``setup`` makes and moves the model; ``before`` was allocated before the recorded actions, without a stack."""

MODULES_SHOWN: Final = 3
"""Of nested modules, the innermost ones."""

_CPP: Final = re.compile(r"\.(?:cpp|cc|cxx|cu|c|h|hpp|cuh)$|^\?\?|\.so(?:\.|$)|^$")
_CHECKPOINT: Final = re.compile(r"torch[/\\]utils[/\\]checkpoint\.py$")
_RECOMPUTING: Final = ("backward", "unpack_hook", "recompute_fn")
_OPTIMIZER_FILES: Final = re.compile(
    r"torch[/\\]optim[/\\]|[/\\]optimizers?(?:[/\\]|\.py$)|bitsandbytes[/\\]optim|deepspeed[/\\]runtime[/\\](?:zero|bf16|fp16)"
)
_SETUP: Final = re.compile(r"^(?:__init__|_apply|load_state_dict|to_empty|reset_parameters|_materialize\w*)$")
_BACKWARDS: Final = ("backward", "_engine_run_backward")
_LOADER: Final = re.compile(r"torch[/\\]utils[/\\]data[/\\]")
_NAMED: Final = "nn.Module: "
"""A call that torch's profiler names after a module."""
_MODULE: Final = re.compile(r"torch[/\\]nn[/\\]modules[/\\]module\.py$")

_ENDS: Final[dict[str, tuple[str, ...]]] = {
    "": (SETUP, DATA, FORWARD, BACKWARD, OPTIMIZER),
    SETUP: (DATA, FORWARD, BACKWARD, OPTIMIZER),
    DATA: (FORWARD, BACKWARD, OPTIMIZER),
    OPTIMIZER: (FORWARD, BACKWARD),
    FORWARD: (BACKWARD, OPTIMIZER),
    BACKWARD: (OPTIMIZER,),
}
"""A phase -> those that calls inside it can belong to: an optimizer's closure holds forward and backward, hooks of the
backward an optimizer; a forward inside a backward is a checkpoint's, and stays the backward's."""


class Site(NamedTuple):
    """Where an allocation comes from."""

    phase: str
    module: str
    """Files of nested ``forward`` calls, the outer first: ``gpt.py:88 › linear.py:125``; empty outside of modules."""
    call: Frame | None
    """In the user's own code, else the innermost in Python; None without a stack."""


def sites(stacks: tuple[tuple[Frame, ...], ...]) -> tuple[Site, ...]:
    """The site of each stack; the first stack is that of allocations without one."""
    bare = _of_no_stack(stacks)
    return tuple(_site(calls) if calls else Site(bare, "", None) for calls in stacks)


def _of_no_stack(stacks: tuple[tuple[Frame, ...], ...]) -> str:
    """The phase of allocations without calls, where others have them."""
    python = [calls for calls in stacks if calls]
    cpp = any(_CPP.search(call.file) for calls in python for call in calls)
    profiled = any(call.function.startswith(_NAMED) for calls in python for call in calls)
    return BACKWARD if python and not cpp and not profiled else OTHER


def _site(calls: tuple[Frame, ...]) -> Site:
    python = tuple(call for call in calls if not _CPP.search(call.file))
    return Site(_phase(calls), " › ".join(_modules(python)), user_call(python))


def _phase(calls: tuple[Frame, ...]) -> str:
    phase = ""
    for call in reversed(calls):
        shown = _shown_by(call)
        if shown in _ENDS[phase]:
            phase = shown
    return phase or OTHER


@cache
def _shown_by(call: Frame) -> str:
    """The phase that a call alone shows; empty where none."""
    if _SETUP.match(call.function):
        return SETUP
    if _OPTIMIZER_FILES.search(call.file):
        return OPTIMIZER
    recomputes = _CHECKPOINT.search(call.file) is not None and call.function in _RECOMPUTING
    if recomputes or call.function in _BACKWARDS or call.function.startswith("torch::autograd::Engine::"):
        return BACKWARD
    if _LOADER.search(call.file):
        return DATA
    calls_module = _MODULE.search(call.file) is not None and "_call_impl" in call.function
    return FORWARD if calls_module or call.function == "forward" else ""


def _modules(python: tuple[Frame, ...]) -> Iterator[str]:
    """The innermost modules, the outer first."""
    named = [call.function.removeprefix(_NAMED) for call in python if call.function.startswith(_NAMED)]
    if named:
        yield from reversed(named[:MODULES_SHOWN])
        return
    inside = [call for call in python if call.function == "forward"][:MODULES_SHOWN]
    for call in reversed(inside):
        yield f"{PurePath(call.file).stem if is_library(call) else PurePath(call.file).name}:{call.line}"
