"""The collectives of one rank as values: plain arrays that travel to where ranks are compared."""

from __future__ import annotations

import functools
from dataclasses import field
from typing import Any, Final

import numpy as np

from perfscope.frozen import dataclass
from perfscope.trace.trace import Bool, Int32, Int64

POINT_TO_POINT: Final = ("send", "recv", "send_recv")
"""Kinds between two ranks of a group; ``send_recv`` is both at once, or either where it is not recorded which."""

SMALLEST: Final = 4096
"""Collectives of fewer bytes move no parameters and no gradients: losses, norms, counters."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """A process group, as far as it is recorded.

    ``ranks`` is empty where they are not listed; ``size`` is None where their number is not known either. ``name`` is
    unique only within the process: another process may use it for another group. ``description`` is the purpose that
    the group was created with, where there is one.
    """

    name: str
    ranks: tuple[int, ...]
    size: int | None
    description: str = ""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickle. All ranks of a large job list the same thousands of ranks, so they share one tuple."""
        self.__dict__.update(state, ranks=_shared(state["ranks"]))


WORLD: Final = "world"
"""Name of the group that is assumed of all ranks where the recording lists none."""

UNKNOWN_GROUP: Final = Group(name="unknown", ranks=(), size=None)
"""The group of a collective whose group is not recorded."""


@functools.lru_cache(maxsize=4096)
def _shared(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The first tuple seen that is equal to this one."""
    return ranks


@dataclass(frozen=True, eq=False)
class Messages:
    """A rank's sends and recvs: parallel arrays, one entry per message, in the order of issue.

    ``collective`` is the row in ``Collectives`` that carries it out: one kernel may carry several messages. ``peer`` is
    the global rank at the other end, ``bytes`` the length (NONE: not recorded).
    """

    collective: Int64
    peer: Int64
    sends: Bool
    bytes: Int64

    def __len__(self) -> int:
        return len(self.collective)

    @classmethod
    def none(cls) -> Messages:
        """No messages."""
        nothing = np.empty(0, dtype=np.int64)
        return cls(nothing, nothing, np.empty(0, dtype=np.bool_), nothing)


@dataclass(frozen=True, eq=False)
class Collectives:
    """One rank's communication events in order of start: parallel arrays of equal length.

    ``group``, ``kind`` and ``dtype`` index the tuples of the same name (``dtype`` NONE: unknown). ``bytes`` follows
    nccl-tests: the larger of the two buffers for all-gather and reduce-scatter, else the input; NONE when unknown. An
    all-to-all, too, has the larger of what a rank sends and what it receives, and both on their mean in ``mean_bytes``
    (of other kinds the same as ``bytes``): over all ranks that is what each moves where none moves more than others.
    ``sequence`` is the sequence number within the group (NONE: not recorded); ``step`` the index of the step in whose
    host window the collective was issued (-1: outside all); ``backward``, whether autograd issued it, and
    ``after_backward``, whether the host issued it between the last of autograd's functions of the step and the
    optimizer's step (both False where the recording has none of these functions); ``of_layers``, whether a layer
    needs it for what it computes, and is no gradient of a parameter, ``of_norms``, whether that layer is a
    synchronized batch normalization; ``between``, whether the host issued it after the optimizer's step and before
    the next forward (False where nothing marks these); ``stretch``, the place in ``loop_phases.STRETCHES``
    of that in which the host issued it, and in no operator of the model's such as an autograd function (NONE: none of
    them, or not known);
    ``again``, whether it did in a forward that runs again in the backward. ``messages`` describe those that are point
    to point; on the host these start when the operator that issued them starts.
    """

    start_ns: Int64
    end_ns: Int64
    group: Int32
    kind: Int32
    dtype: Int32
    bytes: Int64
    mean_bytes: Int64
    sequence: Int64
    step: Int64
    stream: Int64
    backward: Bool
    after_backward: Bool
    of_layers: Bool
    of_norms: Bool
    between: Bool
    stretch: Int64
    again: Bool
    groups: tuple[Group, ...]
    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]
    messages: Messages = field(default_factory=Messages.none)
    on_host: bool = False
    """These are ranges of host threads, not kernels: they end when the thread is scheduled again."""

    def __len__(self) -> int:
        return len(self.start_ns)
