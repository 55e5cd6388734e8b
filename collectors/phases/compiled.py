"""What is compiled of timing phases and passing steps (``_clock.c``), where it was built; Python does it all without.

A gate is open while the compiled clock alone listens to a phase: wrappers then tell the clock of plain calls through
it. All other calls go the way that all calls go where nothing is compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from perfscope.collectors.phases._clock import Clock, Gate, PassingSteps

try:
    from perfscope.collectors.phases import _clock
except ImportError:  # installed where there was no compiler
    _clock = None  # type: ignore[assignment]

IS_BUILT: Final = _clock is not None

BaseClock: type[Clock] | type[object] = _clock.Clock if IS_BUILT else object


def make_gate(phase: int) -> Gate | None:
    """A closed one; None where nothing is compiled."""
    return _clock.Gate(phase) if IS_BUILT else None


def make_passing(depth: dict[int, int], gate: Gate | None) -> PassingSteps | None:
    """What handles optimizer steps that are nothing out of the ordinary, through the gate of the optimizer's phase.

    ``depth``: thread -> steps that it is inside.
    """
    return None if gate is None else _clock.PassingSteps(depth, gate)


def is_whole(clock: Any) -> bool:
    """Is this a compiled clock with none of its methods replaced, so that compiled code may do what they do?"""
    if not IS_BUILT or not isinstance(clock, _clock.Clock):
        return False
    return all(getattr(type(clock), name) is getattr(_clock.Clock, name) for name in ("begin", "end"))
