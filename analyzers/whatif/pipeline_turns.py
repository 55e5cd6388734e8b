"""What a pipeline stage does in a step, in turn: passes of micro-batches, and exchanges with its neighbours.

One forward, one backward (1F1B) sends at most p-s-1 micro-batches ahead of stage s's first backward; GPipe does all
forwards first (Narayanan et al., SC'21). With 2 stages and 2 micro-batches, 1F1B is::

    stage 0   F | send | F | send, receive | B | receive | B
    stage 1   receive | FB | send, receive | FB | send
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from perfscope.frozen import dataclass

CONSTRUCTED: Final = ("1f1b", "gpipe")
"""Schedules that can be constructed for any number of micro-batches."""


@dataclass(frozen=True)
class Hop:
    """One message of a stage: ``stage`` is the other end; ``forward`` are activations, else gradients."""

    sends: bool
    stage: int
    forward: bool


@dataclass(frozen=True)
class Work:
    """Passes with no message in between: ``F`` forward, ``B`` backward, ``FB`` one after the other."""

    passes: str


Turn = Work | tuple[Hop, ...]


def turns(schedule: str, stages: int, stage: int, microbatches: int) -> list[Turn]:
    """What a stage does in a step; neighbouring passes are one piece of work, neighbouring messages one exchange."""
    before, behind = stage > 0, stage < stages - 1
    hops = _Hops(
        from_before=(Hop(False, stage - 1, True),) if before else (),
        to_next=(Hop(True, stage + 1, True),) if behind else (),
        from_next=(Hop(False, stage + 1, False),) if behind else (),
        to_before=(Hop(True, stage - 1, False),) if before else (),
    )
    if schedule == "gpipe":
        return _joined(_all_forwards_first(hops, microbatches))
    return _joined(_one_forward_one_backward(hops, min(stages - stage - 1, microbatches), microbatches))


@dataclass(frozen=True)
class _Hops:
    """The messages of one stage; nothing where it has no neighbour on that side."""

    from_before: tuple[Hop, ...]
    to_next: tuple[Hop, ...]
    from_next: tuple[Hop, ...]
    to_before: tuple[Hop, ...]


# Activations come first at both ends of every pair, so that no two stages wait for each other's other half.
def _one_forward_one_backward(hops: _Hops, ahead: int, microbatches: int) -> Iterable[Turn]:
    for _ in range(ahead):
        yield from (hops.from_before, Work("F"), hops.to_next)
    steady = microbatches - ahead
    if steady:
        yield hops.from_before
    for index in range(steady):
        yield from (Work("F"), hops.to_next + hops.from_next, Work("B"))
        yield hops.to_before if index == steady - 1 else hops.from_before + hops.to_before
    for _ in range(ahead):
        yield from (hops.from_next, Work("B"), hops.to_before)


def _all_forwards_first(hops: _Hops, microbatches: int) -> Iterable[Turn]:
    for _ in range(microbatches):
        yield from (hops.from_before, Work("F"), hops.to_next)
    for _ in range(microbatches):
        yield from (hops.from_next, Work("B"), hops.to_before)


def _joined(listed: Iterable[Turn]) -> list[Turn]:
    joined: list[Turn] = []
    for turn in listed:
        last = joined[-1] if joined else None
        if turn == ():
            continue
        if isinstance(turn, Work) and isinstance(last, Work):
            joined[-1] = Work(last.passes + turn.passes)
        elif isinstance(turn, tuple) and isinstance(last, tuple):
            joined[-1] = last + turn
        else:
            joined.append(turn)
    return joined
