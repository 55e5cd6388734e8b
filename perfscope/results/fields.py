"""What a result's field means: its definition and its unit stand in its annotation, once.

``transfer_us: Annotated[Us, "End − last arrival …"]``: the page's glossary, the columns of the DataFrames and the JSON
Schema are made from that. :func:`document_of` is a result as JSON has it.
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from functools import cache
from typing import Annotated, Any, Final

from perfscope.frozen import dataclass
from perfscope.results.categories import TimeCategory


class Unit(str):
    """The unit of a number."""

    __slots__ = ()


class Signed:
    """Mark of a number with a unit that may be below 0."""


_ATOMS: Final = frozenset((str, int, float, bool, type(None)))
"""Types whose values a document shares."""

Us = Annotated[float, Unit("µs")]
Share = Annotated[float, Unit("0..1")]
Ratio = Annotated[float, Unit("ratio")]
Count = Annotated[float, Unit("count")]
Flop = Annotated[float, Unit("FLOP")]
Tflops = Annotated[float, Unit("TFLOP/s")]
GBps = Annotated[float, Unit("GB/s")]
Bytes = Annotated[int, Unit("bytes")]
BytesPerS = Annotated[float, Unit("bytes/s")]
Cores = Annotated[float, Unit("cores")]
SignedUs = Annotated[float, Unit("µs"), Signed()]
Money = Annotated[float, Unit("currency"), Signed()]


SHARED: Final = {
    "reason": "Why it runs below its highest clock, as the driver names it.",
    "stage": "Stage of the step: ``forward``, ``backward``, ``dataloader`` …",
    "rank": "Global rank.",
    "ranks": "Global ranks.",
    "host": "Name of the host.",
    "hosts": "Names of the hosts.",
    "name": "Its name, as it was recorded.",
    "group": "Name of the process group.",
    "group_description": "The process group in words, as torch.distributed describes it.",
    "dtype": "Data type of the elements.",
    "role": "Name of the role.",
    "waits_for": "Name of the role that is busy meanwhile.",
    "kind": "Kind of operation: ``all_reduce``, ``all_gather``, ``send`` …",
    "bytes": "Size of one operation on one rank; None where it was not recorded.",
    "sequence": "Number of the operation in its process group.",
    "confidence": "How certain it is: ``high``, ``medium`` or ``low``.",
    "mean_us": "Mean.",
    "min_us": "Shortest.",
    "max_us": "Longest.",
    "median_us": "Median.",
    "p95_us": "95 % are no longer.",
    "p99_us": "99 % are no longer.",
    "low_us": "Lowest estimate.",
    "mid_us": "Middle estimate.",
    "high_us": "Highest estimate.",
    "count_per_step": "Calls per step and rank, mean.",
    "kernels_per_step": "Kernels launched per step and rank, mean.",
    "launches_per_step": "Kernels and copies that the host launches per step, mean.",
    "first_step": "Number of the first step.",
    "last_step": "Number of the last step.",
    "step": "Number of the step.",
    "memory_bytes": "Memory that it has.",
    "rule": "The rule that found it: ``docs/advice.md`` lists them.",
    "duration_us": "How long it takes.",
}
"""Name of a field -> what it means in every class, where its annotation does not say more."""


@dataclass(frozen=True)
class Field:
    """What a field's annotation states."""

    name: str
    type: Any
    """Without None; ``object`` for a choice of several types."""
    optional: bool
    """May it be None?"""
    unit: str
    """Of the number, or of the numbers that a tuple or mapping holds; empty where they have none."""
    meaning: str
    """Empty where the name says all."""
    signed: bool
    """May the number be below 0?"""
    items: tuple[Field, ...]
    """What a tuple or mapping holds: the elements, or the keys and the values."""


@cache
def fields_of(kind: type) -> dict[str, Field]:
    """The fields of a result's class by name, in order."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: _read(field.name, hints[field.name]) for field in dataclasses.fields(kind)}


def classes_of(kind: type) -> set[type]:
    """The class itself and those of all that its fields hold."""
    found, waiting = {kind}, list(fields_of(kind).values())
    while waiting:
        field = waiting.pop()
        waiting += field.items
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type) and field.type not in found:
            found.add(field.type)
            waiting += fields_of(field.type).values()
    return found


def meaning(kind: type, name: str) -> str:
    """The definition of a field. Raises ValueError where it has none."""
    text = _field(kind, name).meaning
    if not text:
        raise ValueError(f"{kind.__name__}.{name} has no definition")
    return text


@cache
def _field(kind: type, name: str) -> Field:
    """One field: a class's annotations are text, and reading one takes long enough not to read those of all fields."""
    owner = next(each for each in kind.__mro__ if name in vars(each).get("__annotations__", ()))
    alone = types.SimpleNamespace(__annotations__={name: owner.__annotations__[name]})
    names = vars(sys.modules[owner.__module__])
    return _read(name, typing.get_type_hints(alone, names, names, include_extras=True)[name])


def _read(name: str, hint: Any) -> Field:
    optional, notes = False, []
    while True:
        if typing.get_origin(hint) is Annotated:
            hint, *more = typing.get_args(hint)
            notes += more
        elif typing.get_origin(hint) in (typing.Union, types.UnionType):
            others = [part for part in typing.get_args(hint) if part is not type(None)]
            optional = optional or len(others) < len(typing.get_args(hint))
            hint = others[0] if len(others) == 1 else object
        else:
            break
    inner = tuple(_read(name, part) for part in typing.get_args(hint) if part is not Ellipsis)
    unit = next((note for note in notes if isinstance(note, Unit)), inner[-1].unit if inner else "")
    signed = any(isinstance(note, Signed) for note in notes) or any(item.signed for item in inner)
    texts = (
        note.definition if isinstance(note, TimeCategory) else note
        for note in notes
        if not isinstance(note, (Unit, Signed))
    )
    return Field(name, hint, optional, str(unit), next(iter(texts), SHARED.get(name, "")), signed, inner)


def document_of(result: Any) -> dict[str, Any]:
    """What ``dataclasses.asdict`` gives, in a tenth of its time: what cannot change is shared, not copied."""
    kind: Any = type(result)  # mypy takes no class of unknown kind for hashable
    return {name: _plain(getattr(result, name)) for name in _names(kind)}


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is tuple:
        return value if _ATOMS.issuperset(map(type, value)) else tuple(map(_plain, value))
    if kind is list:
        return list(map(_plain, value))
    if kind is dict:
        return {_plain(key): _plain(held) for key, held in value.items()}
    if dataclasses.is_dataclass(kind):
        return document_of(value)
    return kind._make(map(_plain, value)) if hasattr(kind, "_make") else value  # a named tuple


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))
