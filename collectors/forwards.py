"""Watches the forwards of modules: hooks, or the entry of one that is compiled in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from perfscope.collectors.patches import Patches

Call = Callable[..., Any]


def watch_forwards(
    modules: Iterable[Any],
    begins: Call,
    ended: Call,
    patches: Patches,
    around: Callable[[Any, Call], Call],
) -> list[Any]:
    """Call ``begins`` before each forward and ``ended`` after it, failed ones too; returns the hooks' handles.

    A module that was compiled in place has its entry replaced by ``around(module, entry)`` instead, undone by
    ``patches``: hooks would go into the compiled code.
    """
    handles = []
    for module in modules:
        compiled = vars(module).get("_compiled_call_impl")
        if compiled is not None:
            patches.set(module, "_compiled_call_impl", around(module, compiled))
            continue
        handles.append(module.register_forward_pre_hook(begins, prepend=True))
        handles.append(module.register_forward_hook(ended, always_call=True))
    return handles
