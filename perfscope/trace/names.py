"""Which of a trace's names a predicate is true of. Ranks of one job run one program and have the same names: what was
found for one rank is kept for the next ones that the process reads.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Hashable, Sequence
from types import ModuleType
from typing import Final

Predicate = Callable[[str], object]

_SETS: Final = 12
"""Sets of names whose answers are kept: those of one rank's categories, and all of its names."""


class Names:
    """Distinct names, each with a number."""

    def __init__(self, names: Sequence[str], numbers: Sequence[int]) -> None:
        self._numbers = dict(zip(names, numbers, strict=True))
        self._true_of = _answers(frozenset(names))

    def __len__(self) -> int:
        return len(self._numbers)

    def where(self, predicate: Predicate) -> list[int]:
        """The numbers of the names that satisfy a predicate, which depends on nothing else."""
        key = _same_for_all(predicate)
        found = None if key is None else self._true_of.get(key)
        if found is None:
            found = tuple(filter(predicate, self._numbers))
            if key is not None:
                self._true_of[key] = found
        return [self._numbers[name] for name in found]


def is_kept(predicate: Predicate) -> bool:
    """Whether what a predicate is true of is kept."""
    return _same_for_all(predicate) is not None


@functools.lru_cache(maxsize=_SETS)
def _answers(_names: frozenset[str]) -> dict[Hashable, tuple[str, ...]]:
    """Predicate -> the names of this set that satisfy it; to be filled."""
    return {}


def _same_for_all(predicate: Predicate) -> Hashable | None:
    """What stands for a predicate that can be asked again: a method of a pattern or of a text, or a module's function.
    None for others, which are made for one question.
    """
    owner = getattr(predicate, "__self__", None)
    if isinstance(owner, re.Pattern | str):
        return predicate.__name__, owner
    is_of_module = owner is None or isinstance(owner, ModuleType)
    return predicate if is_of_module and "<" not in getattr(predicate, "__qualname__", "<") else None
