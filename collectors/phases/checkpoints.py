"""Times checkpoints, and evaluations that a framework makes in one call, as stages of the steps that they fall into."""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from perfscope.collectors.patches import Patches
from perfscope.recording.history import STAGES
from perfscope.recording.vocabulary import CHECKPOINT, EVALUATION

if TYPE_CHECKING:
    from perfscope.collectors.phases.clock import PhaseClock

_STAGE: Final = {CHECKPOINT: STAGES.index("checkpoint"), EVALUATION: STAGES.index("evaluation")}
"""Range that a capture writes around a function -> the stage that its time counts for."""


class Checkpoints:
    """The functions of torch and of frameworks that save or evaluate, replaced for the whole run."""

    what = "timing checkpoints"

    def __init__(self, clock: PhaseClock) -> None:
        self._clock = clock
        self._thread = get_ident()
        self._patches = Patches()

    def install(self) -> None:
        """Begin to time them, those of frameworks that have been imported by now."""
        from perfscope.collectors.frameworks.frameworks import ranged_functions
        from perfscope.collectors.frameworks.hooks import owner_of

        self.remove()
        self._thread = get_ident()
        for function in ranged_functions():
            owner = owner_of(function.module, function.owner)
            original = vars(owner).get(function.attribute) if owner is not None else None
            if function.range in _STAGE and callable(original):
                self._patches.set(owner, function.attribute, self._timed(original, _STAGE[function.range]))

    def remove(self) -> None:
        """Put everything back."""
        self._patches.restore()

    def _timed(self, original: Callable[..., Any], stage: int) -> Callable[..., Any]:
        clock, thread = self._clock, self._thread

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != thread:
                return original(*args, **kwargs)
            clock.begin(stage)
            try:
                return original(*args, **kwargs)
            finally:
                clock.end(stage)

        return timed
