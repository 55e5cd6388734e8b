"""Tells which optimizer steps end a training step. Pure: it knows neither torch nor clocks.

One optimizer: each of its outermost steps ends a training step. Several optimizers (a GAN's two, one per parameter): a
training step is one cycle through all of them, and ends with the optimizer that steps least often; where several step
equally often, with the one that was met last. The cycle is learnt while it happens::

    events      D G D G D          one each          ends after G: 2 steps, the third under way
    events      D D D D D G x 2    five D to one G   ends after G: 2 steps
    events      p1 p2 p3 x 2, p1   one per parameter ends after p3: 2 steps

An optimizer that takes over from one that had been stepping alone for long (folds, a search over hyper-parameters)
goes on with the steps. Otherwise, when an optimizer appears that was not there before, or one that had been replaced
comes back, what had been taken for steps may not have been: the verdict is RESTART, and no step ends until the
optimizers have gone through the same cycle twice, or a third one shows that each replaces the one before. An
optimizer that does not come back twice while another steps 2 * :data:`RARE` times is not part of the cycle (it was
replaced, or steps once in a while).
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Hashable
from typing import Final

RARE: Final = 10
"""Steps of one optimizer in a cycle at most: critics are trained up to about ten times per generator step. Another
optimizer that is rarer than this does not define a step."""

HISTORY: Final = 4096
"""Optimizer steps that are remembered while a cycle is being learnt: twice the parameters of a model that has one
optimizer for each."""

MAX_RESTARTS: Final = 3
"""New optimizers that may reopen the question; a script that makes one every step would otherwise never be recorded."""

ALONE: Final = RARE + 1
"""Steps in a row after which an optimizer counts as the only one, so that a new one replaces it: more than a critic
takes for one of the generator's."""

AGAIN: Final = 3
"""Steps in a row of a second optimizer, after which a third one, with the first not back, shows that each replaces the
one before."""

LOST: Final = 4
"""A cycle's end that stays away for this many times its usual distance has been replaced."""


class StepVerdict(enum.Enum):
    """What an event means for the training step."""

    NOTHING = "nothing"
    """The step goes on."""
    STEP = "step"
    """A training step has just ended; ``completed`` counts it."""
    RESTART = "restart"
    """What had been taken for steps may not have been; wait until a step ends again."""


_STEP: Final = StepVerdict.STEP

SOURCES: Final = ("gradients", "backward", "optimizer", "deepspeed", "explicit")
"""What training steps are told by, better ones later: once a better one speaks, it alone counts."""


class StepDetector:
    """Turns optimizer steps, an engine's steps, explicit calls or, without any of these, backward passes into training
    steps.
    """

    def __init__(self) -> None:
        self.completed = 0
        """Training steps that have ended."""
        self.source = ""
        """One of :data:`SOURCES`; empty before the first event."""
        self._order: dict[Hashable, int] = {}
        self._history: deque[Hashable] = deque(maxlen=HISTORY)
        self._total: Counter[Hashable] = Counter()
        self._carried = 0
        self._end: Hashable = None
        self._gap = 1
        self._since_end = 0
        self._learning: Counter[Hashable] | None = None
        self._restarts = 0
        self._last: Hashable = None
        self._lone: Hashable = None
        """The only optimizer that is left, each of whose steps ends a training step: they are counted alone."""
        self._counted_at = 0
        """Training steps when what is counted of optimizers was last complete."""
        self._in_a_row = 0
        self._replaced: dict[Hashable, tuple[int, Counter[Hashable]]] = {}
        """Optimizers that were replaced, in order -> what had been counted when they were, in case one comes back."""

    def explicit_step(self) -> StepVerdict:
        """``perfscope.step()`` was called."""
        return self._counted("explicit")

    def engine_step(self) -> StepVerdict:
        """A training engine (DeepSpeed) finished a step of its own."""
        return self._counted("deepspeed")

    def backward(self, *, accumulates: bool) -> StepVerdict:
        """An outermost backward pass has ended, which wrote ``.grad`` (``accumulates``) or returned gradients. Each of
        the former is a step, or of the latter where there are none of the former: they are often a part of the loss.
        """
        return self._counted("backward" if accumulates else "gradients")

    def optimizer_step(self, key: Hashable) -> StepVerdict:
        """An outermost optimizer step has ended; ``key`` identifies the optimizer."""
        if key == self._lone:  # as at nearly all steps of a training
            self.completed += 1
            return _STEP
        if self.source not in ("", "optimizer"):
            if SOURCES.index(self.source) > SOURCES.index("optimizer"):
                return StepVerdict.NOTHING
            self.source, self.completed = "optimizer", 0
            self._step_of(key)
            return StepVerdict.RESTART
        self.source = "optimizer"
        if self._lone is not None:
            self._catch_up(self._lone, self.completed - self._counted_at)
        verdict = self._step_of(key)
        alone = len(self._order) == 1 and self._learning is None
        self._lone = key if alone and self._end == key and not self._since_end else None
        self._counted_at = self.completed
        return verdict

    @property
    def alone(self) -> bool:
        """Does each step of the optimizer that stepped last end a training step, so that ``completed`` counts them?"""
        return self._lone is not None

    def _catch_up(self, key: Hashable, steps: int) -> None:
        """Count what was not while ``key`` was the only optimizer."""
        self._in_a_row += steps
        self._total[key] += steps
        self._history.extend([key] * min(steps, HISTORY))

    def _step_of(self, key: Hashable) -> StepVerdict:
        """What the step of an optimizer means that may be new, or one of several."""
        # One takeover seen, the next is believed sooner.
        alone = self._in_a_row >= (AGAIN if self._replaced else ALONE) and len(self._order) == 1
        second_alone = self._in_a_row >= AGAIN and self._total[self._last] == self._in_a_row
        self._in_a_row = self._in_a_row + 1 if key == self._last else 1
        self._last = key
        self._history.append(key)
        unknown = key not in self._order and key not in self._replaced
        if unknown and (alone if self._learning is None else second_alone):
            return self._take_over(key)
        new = key not in self._order
        if new:
            self._order[key] = len(self._order)
        if key in self._replaced:
            self._bring_back(key)
        self._total[key] += 1
        if self._learning is not None:
            return self._learn(key)
        if len(self._order) == 1:
            self._end = key
        elif new and self._restarts < MAX_RESTARTS:
            self._restarts += 1
            self._learning = Counter({self._end: 0, key: 1})
            return StepVerdict.RESTART
        return self._count(key)

    def _take_over(self, key: Hashable) -> StepVerdict:
        """``key`` replaces what was there: its steps go on where the others' ended."""
        for each in self._order:
            self._replaced[each] = (self._carried, Counter({each: self._total[each]}))
        self._carried += sum(self._total.values())
        self._order, self._learning = {key: 0}, None
        self._end, self._gap, self._since_end = key, 1, 0
        self._total = Counter({key: 1})
        self.completed = self._carried + 1
        return StepVerdict.STEP

    def _bring_back(self, key: Hashable) -> None:
        """It had not been replaced after all: count as if neither it nor what came after it had been."""
        self._carried = self._replaced[key][0]
        since = list(self._replaced)
        for each in since[since.index(key) :]:
            self._total += self._replaced.pop(each)[1]

    def _counted(self, source: str) -> StepVerdict:
        """A step by this source; it takes over from any that is not as good."""
        if self.source and SOURCES.index(self.source) > SOURCES.index(source):
            return StepVerdict.NOTHING
        took_over = self.source not in ("", source)
        self.source, self._lone = source, None
        self.completed = 1 if took_over else self.completed + 1
        return StepVerdict.RESTART if took_over else StepVerdict.STEP

    def _count(self, key: Hashable) -> StepVerdict:
        self._since_end += 1
        if key != self._end and self._since_end <= LOST * self._gap:
            return StepVerdict.NOTHING
        if key == self._end:
            self._gap = max(self._gap, self._since_end)
        else:  # the optimizer that ended the cycle is gone: this one takes over
            self._end, self._gap = key, 1
            self._carried = self.completed
            self._total = Counter({key: 1})
        self._since_end = 0
        self.completed += 1
        return StepVerdict.STEP

    def _learn(self, key: Hashable) -> StepVerdict:
        counts = self._learning
        assert counts is not None
        counts[key] += 1
        cycle = self._cycle(set(counts))
        periodic = cycle is not None
        if cycle is None and max(counts.values()) > 2 * RARE:
            cycle = Counter({each: count for each, count in counts.items() if count >= 2})
        if cycle is None:
            return StepVerdict.NOTHING
        old_end, self._learning = self._end, None
        self._end = min(cycle, key=lambda each: (cycle[each], -self._order[each]))
        if old_end not in cycle:  # replaced: its steps were steps, and the new ones go on from there
            self._carried = self.completed
            self._total = Counter(counts)
        self.completed = self._carried + self._total[self._end]
        length = sum(cycle.values())
        self._gap = length if periodic else -(-length // cycle[self._end])
        self._since_end = 0
        return StepVerdict.STEP if key == self._end else StepVerdict.NOTHING

    def _cycle(self, keys: set[Hashable]) -> Counter[Hashable] | None:
        """Steps of each optimizer in the cycle that has just been gone through twice, all of ``keys`` in it."""
        history = list(self._history)
        for length in range(len(keys), len(history) // 2 + 1):
            if history[-1 - length] == history[-1] and history[-length:] == history[-2 * length : -length]:
                cycle = Counter(history[-length:])
                if keys <= cycle.keys():
                    return cycle
        return None
