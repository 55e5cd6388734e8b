"""Formulas of FLOPs for operators that only the user knows: custom kernels, fused layers.

A file of them is given to ``perfscope analyze --flops`` or ``perfscope.analyze(flops=…)``::

    import perfscope

    @perfscope.flops("my_ext::fused_mlp")
    def fused_mlp(shapes, types, inputs):
        (tokens, width), (_, hidden) = shapes[0], shapes[1]
        return 2 * 2 * tokens * width * hidden

``shapes``, ``types`` and ``inputs`` are the recorded arguments of one call, one entry per input of the operator:
``[[512, 1024], [1024, 4096], []]``, ``["c10::BFloat16", "c10::BFloat16", "Scalar"]``, ``["", "", "0.5"]``. A formula
returns the FLOPs of the call (a multiplication and an addition count as two), or None where it cannot decide. The file
may import what is installed where the traces are read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from perfscope.errors import PerfscopeError
from perfscope.frozen import dataclass

Function = Callable[[list[Any], list[Any], list[Any]], Any]

_MARK: Final = "__perfscope_flops__"


def flops(operator: str, *, typed: int = 0) -> Callable[[Function], Function]:
    """Mark a function as the formula of ``operator``, named as the recording names it.

    ``typed`` is the input whose type the products run in: it decides which peak of the device they are compared with.
    One function may be marked for several operators.
    """

    def mark(function: Function) -> Function:
        marks = (*getattr(function, _MARK, ()), (operator, typed))
        setattr(function, _MARK, marks)
        return function

    return mark


@dataclass(frozen=True)
class CustomFormula:
    """One operator's formula."""

    operator: str
    typed: int
    function: Function
    source: str

    def __call__(self, shapes: list[Any], types: list[Any], inputs: list[Any]) -> float | None:
        """FLOPs of one call, None where the formula cannot decide. Raises PerfscopeError with the file if it fails."""
        try:
            value = self.function(shapes, types, inputs)
            if value is None:
                return None
            number = float(value)
        except Exception as error:
            raise PerfscopeError(
                f"{self.source}: the formula of {self.operator} failed on shapes {shapes} "
                f"({type(error).__name__}: {error}); correct it, or let it return None where it cannot decide"
            ) from error
        if not math.isfinite(number) or number < 0:
            raise PerfscopeError(
                f"{self.source}: the formula of {self.operator} returned {number} for shapes {shapes}; FLOPs are a "
                "finite number, 0 or more"
            )
        return number


@dataclass(frozen=True)
class CustomFlops:
    """A file of formulas, as text: it travels to any worker, and shows whether a cached result still holds."""

    source: str
    """The file, for messages."""
    text: str

    @classmethod
    def read(cls, path: str | Path) -> CustomFlops:
        """Read and try a file of formulas. Raises PerfscopeError naming it and the remedy."""
        try:
            custom = cls(str(path), Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise PerfscopeError(f"{path}: the formulas of --flops cannot be read ({error})") from error
        if not custom.formulas():
            raise PerfscopeError(
                f'{path}: defines no formula; decorate functions with @perfscope.flops("namespace::operator")'
            )
        return custom

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that change with the text."""
        import hashlib

        return hashlib.blake2b(self.text.encode(), digest_size=8).hexdigest()

    def get(self, operator: str) -> CustomFormula | None:
        """The formula of an operator; None where the file has none."""
        return self.formulas().get(operator)

    def formulas(self) -> dict[str, CustomFormula]:
        """All formulas by operator. Raises PerfscopeError where the file cannot be executed."""
        return _execute(self.source, self.text)


@functools.cache
def _execute(source: str, text: str) -> dict[str, CustomFormula]:
    names: dict[str, Any] = {"__name__": "perfscope_flops", "__file__": source}
    try:
        exec(compile(text, source, "exec"), names)  # noqa: S102 - the user's own file, named by the user
    except Exception as error:
        raise PerfscopeError(
            f"{source}: the formulas of --flops cannot be executed ({type(error).__name__}: {error}); correct the "
            "file, or install what it imports where the traces are read"
        ) from error
    return {
        operator: CustomFormula(operator, typed, function, source)
        for function in names.values()
        for operator, typed in getattr(function, _MARK, ())
    }
