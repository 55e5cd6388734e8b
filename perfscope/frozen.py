"""``dataclass``, as the standard library has it, for classes by the hundred: those that are frozen are made quickly.

The standard library writes and compiles the source of six methods for every class, at import. Here it does so for a
method when somebody first asks for it: most processes use few of the classes that they import, and of those little more
than the constructor.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final, NoReturn

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls=None, /, **options):
        """``dataclasses.dataclass`` with the same options: ``frozen``, ``eq``, ``repr`` and ``kw_only`` are in use."""
        if cls is None:
            return lambda kind: dataclass(kind, **options)
        # One that inherits must fit its base's methods, whichever they are.
        if not options.get("frozen") or any(map(dataclasses.is_dataclass, cls.__bases__)):
            return dataclasses.dataclass(cls, **options)
        return _frozen(cls, **options)


_METHODS: Final = {
    "__init__": {"init": True, "eq": False, "repr": False},
    "__repr__": {"init": False, "eq": False, "repr": True},
    "__eq__": {"init": False, "eq": True, "repr": False},
    "__hash__": {"init": False, "eq": True, "repr": False},
}
"""Method -> the options with which the standard library makes that one alone."""

_SET: Final = "__set_field__"
"""What sets a field, in the constructors written here."""


def _frozen(kind: type, **options: bool) -> type:
    asked = {"__repr__": options.get("repr", True), "__hash__": options.get("eq", True)}
    asked |= {"__init__": True, "__eq__": asked["__hash__"]}
    # Python itself sets __hash__ to None where a class defines __eq__.
    missing = [name for name in _METHODS if asked[name] and vars(kind).get(name) is None]
    # Without methods a dataclass is quickly made: its fields are read.
    dataclasses.dataclass(**{**options, "init": False, "eq": False, "repr": False, "frozen": False})(kind)
    params: Any = kind.__dataclass_params__  # type: ignore[attr-defined]  # dataclasses that inherit look at them
    params.init, params.eq, params.repr, params.frozen = True, asked["__eq__"], asked["__repr__"], True
    for name in missing:
        setattr(kind, name, _WhenAskedFor(kind, name))
    for name, method in (("__setattr__", _not_set), ("__delattr__", _not_deleted)):
        setattr(kind, name, method)
    return kind


class _WhenAskedFor:
    """Stands in a class where a method belongs, and puts it there when it is first looked up."""

    def __init__(self, kind: type, name: str) -> None:
        self._kind, self._name = kind, name

    def __get__(self, instance: object, owner: type) -> Any:
        """The method itself, from now on in its place."""
        kind, name = self._kind, self._name
        method = _constructor(kind) if name == "__init__" and _is_plain(kind) else _as_in_library(kind, name)
        setattr(kind, name, method)
        return method.__get__(instance, owner)


def _as_in_library(kind: type, name: str) -> Any:
    """The method of an heir that adds no field: it fits the class itself."""
    names = {"__doc__": _WhenAskedFor.__doc__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    heir: type = dataclasses.dataclass(frozen=True, **_METHODS[name])(type(kind.__name__, (kind,), names))
    return vars(heir)[name]


def _is_plain(kind: Any) -> bool:
    """Does the constructor do nothing but set each field to what it is given, or to its default?"""
    fields = dataclasses.fields(kind)
    plain = all(
        field.init and field.default_factory is dataclasses.MISSING and field.name not in ("self", _SET)
        for field in fields
    )
    return plain and len(fields) == len(kind.__dataclass_fields__) and not hasattr(kind, "__post_init__")


def _constructor(kind: Any) -> Any:
    """The standard library's, compiled in a quarter of the time: most classes that are used need only this."""
    fields = dataclasses.fields(kind)
    names: dict[str, Any] = {
        f"default_{each.name}": each.default for each in fields if each.default is not dataclasses.MISSING
    }
    given = {
        each: f"{each.name}=default_{each.name}" if f"default_{each.name}" in names else each.name for each in fields
    }
    named = [given[each] for each in fields if each.kw_only]
    taken = ["self", *(given[each] for each in fields if not each.kw_only), *(("*", *named) if named else ())]
    lines = [f"    {_SET}(self, {each.name!r}, {each.name})\n" for each in fields]
    names[_SET] = object.__setattr__
    exec(f"def __init__({', '.join(taken)}):\n{''.join(lines) or '    pass'}", names)  # noqa: S102  # as the library does
    method = names["__init__"]
    method.__qualname__ = f"{kind.__qualname__}.__init__"
    method.__annotations__ = {**{each.name: each.type for each in fields}, "return": None}
    return method


def _not_set(_instance: object, name: str, _value: object) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _not_deleted(_instance: object, name: str) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
