"""``dataclass``, as the standard library has it, for classes by the hundred: those that are frozen are made quickly.

The standard library looks through the fields of every class, and writes and compiles the source of six methods, at
import. Here that is done when somebody first asks for it: most processes use few of the classes that they import, and
of those little more than the constructor.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import TYPE_CHECKING, Any, Final, NoReturn

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls=None, /, **options):
        """``dataclasses.dataclass`` with the same options: ``frozen``, ``eq``, ``repr`` and ``kw_only`` are in use."""
        if cls is None:
            return lambda kind: dataclass(kind, **options)
        # One that inherits must fit its base's methods: those made here are known.
        bases = [base for base in cls.__bases__ if dataclasses.is_dataclass(base)]
        if not options.get("frozen") or any(base.__setattr__ is not _not_set for base in bases):
            return dataclasses.dataclass(cls, **options)
        return _frozen(cls, **options)


_METHODS: Final = {
    "__init__": {"init": True, "eq": False, "repr": False},
    "__repr__": {"init": False, "eq": False, "repr": True},
    "__eq__": {"init": False, "eq": True, "repr": False},
    "__hash__": {"init": False, "eq": True, "repr": False},
}
"""Method -> the options with which the standard library makes that one alone."""

_OF_FIELDS: Final = frozenset(("__dataclass_fields__", "__dataclass_params__", "__match_args__"))
"""What the standard library finds out about a class's fields."""

_OF_NO_FIELDS: Final = ("ClassVar", "InitVar", "KW_ONLY")
"""In annotations of what is no field."""

_NONE: Final = dataclasses.MISSING
"""A field's default where it has none."""

_SET: Final = "__set_field__"
"""What sets a field, in the constructors written here."""

_MADE: Final = "__made__"
"""What stands there for a default that is made anew each time."""


class _Factory:
    """Such a default, in signatures, as the standard library shows it."""

    def __repr__(self) -> str:
        return "<factory>"


_FACTORY: Final = _Factory()


def _frozen(kind: type, **options: bool) -> type:
    asked = {"__repr__": options.get("repr", True), "__hash__": options.get("eq", True)}
    asked |= {"__init__": True, "__eq__": asked["__hash__"]}
    # Python itself sets __hash__ to None where a class defines __eq__.
    missing = [name for name in _METHODS if asked[name] and vars(kind).get(name) is None]
    if any(isinstance(value, dataclasses.Field) for value in vars(kind).values()):
        _look_through_fields(kind, options)  # each leaves its default in its place
    else:
        for name in _OF_FIELDS - vars(kind).keys():
            setattr(kind, name, _FieldsWhenAskedFor(kind, name, options))
    for name in missing:
        setattr(kind, name, _WhenAskedFor(kind, name))
    for name, method in (("__setattr__", _not_set), ("__delattr__", _not_deleted)):
        setattr(kind, name, method)
    return kind


def _look_through_fields(kind: Any, options: dict[str, bool]) -> None:
    """Sets what there is to know of a class's fields; without methods a dataclass is quickly made."""
    if isinstance(vars(kind).get("__match_args__"), _FieldsWhenAskedFor):
        del kind.__match_args__  # the others are set anew in any case
    inherits = any(map(dataclasses.is_dataclass, kind.__bases__))
    if "__setattr__" in vars(kind):
        del kind.__setattr__, kind.__delattr__
    dataclasses.dataclass(**{**options, "init": False, "eq": False, "repr": False, "frozen": inherits})(kind)
    kind.__setattr__, kind.__delattr__ = _not_set, _not_deleted
    params = kind.__dataclass_params__  # dataclasses that inherit look at them
    params.init = params.frozen = True
    params.eq, params.repr = options.get("eq", True), options.get("repr", True)


class _FieldsWhenAskedFor:
    """Stands in a class for what there is to know of its fields, until that is first looked up."""

    def __init__(self, kind: type, name: str, options: dict[str, bool]) -> None:
        self._kind, self._name, self.options = kind, name, options

    def __get__(self, instance: object, owner: type) -> Any:
        """What the standard library finds out, from now on in its place."""
        _look_through_fields(self._kind, self.options)
        return getattr(self._kind, self._name)


class _WhenAskedFor:
    """Stands in a class where a method belongs, and puts it there when it is first looked up."""

    def __init__(self, kind: type, name: str) -> None:
        self._kind, self._name = kind, name

    def __get__(self, instance: object, owner: type) -> Any:
        """The method itself, from now on in its place."""
        kind, name = self._kind, self._name
        method = (_constructor(kind) if name == "__init__" else None) or _as_in_library(kind, name)
        setattr(kind, name, method)
        return method.__get__(instance, owner)


def _as_in_library(kind: type, name: str) -> Any:
    """The method of an heir that adds no field: it fits the class itself."""
    names = {"__doc__": _WhenAskedFor.__doc__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    heir: type = dataclasses.dataclass(frozen=True, **_METHODS[name])(type(kind.__name__, (kind,), names))
    return vars(heir)[name]


def _plain_fields(kind: Any) -> dict[str, tuple[Any, Any, bool, Any]] | None:
    """Name -> (type, default, is it given by name, what makes its default) of every field where the constructor sets
    each, in their order, to what it is given or to its default; None for other classes.
    """
    unread = vars(kind)["__dataclass_fields__"]
    if isinstance(unread, _FieldsWhenAskedFor) and _are_as_annotated(kind):
        by_name = unread.options.get("kw_only", False)
        annotated = kind.__annotations__.items()
        plain: dict[str, tuple[Any, Any, bool, Any]] = {
            name: (text, getattr(kind, name, _NONE), by_name, _NONE) for name, text in annotated
        }
    else:
        fields = dataclasses.fields(kind)
        if not all(field.init for field in fields) or len(fields) < len(kind.__dataclass_fields__):
            return None
        plain = {
            field.name: (field.type, field.default, bool(field.kw_only), field.default_factory) for field in fields
        }
    in_order = len({by_name for _, _, by_name, _ in plain.values()}) <= 1
    return plain if in_order and plain.keys().isdisjoint(("self", _SET, _MADE)) else None


def _are_as_annotated(kind: type) -> bool:
    """Do a class's own annotations alone say what its fields are? Asking the library takes ten times as long."""
    inherits = any("__dataclass_fields__" in vars(base) for base in kind.__mro__[1:])
    texts = kind.__annotations__.values()
    return not inherits and not any(word in text for text in texts for word in _OF_NO_FIELDS)


def _constructor(kind: Any) -> Any:
    """The standard library's where it is plain, made of one for as many fields: compiling one for each class takes ten
    times as long. None where it is not.
    """
    fields = _plain_fields(kind)
    if fields is None:
        return None
    by_name = any(each for _, _, each, _ in fields.values())
    makers = {_maker(at): make for at, (_, _, _, make) in enumerate(fields.values()) if make is not _NONE}
    template = _constructor_of(len(fields), tuple(makers), by_name=by_name, goes_on=hasattr(kind, "__post_init__"))
    names = {_stand_in(at): name for at, name in enumerate(fields)}
    code = template.replace(
        co_varnames=tuple(names.get(name, name) for name in template.co_varnames),
        co_consts=tuple(names.get(value, value) for value in template.co_consts),
    )
    defaults = {
        name: default if make is _NONE else _FACTORY
        for name, (_, default, _, make) in fields.items()
        if default is not _NONE or make is not _NONE
    }
    known = {_SET: object.__setattr__, _MADE: _FACTORY, **makers}
    method = types.FunctionType(code, known, "__init__", () if by_name else tuple(defaults.values()))
    method.__kwdefaults__ = defaults if by_name else None
    method.__qualname__ = f"{kind.__qualname__}.__init__"
    method.__annotations__ = {**{name: kept for name, (kept, _, _, _) in fields.items()}, "return": None}
    return method


@functools.cache
def _constructor_of(count: int, makers: tuple[str, ...], *, by_name: bool, goes_on: bool) -> types.CodeType:
    """The code of a constructor for so many fields, whose names stand-ins hold the places of. Defaults of some are made
    by ``makers``; ``goes_on``: a ``__post_init__`` follows.
    """
    stand_ins = [_stand_in(at) for at in range(count)]
    taken = ", ".join(("self", *(["*"] if by_name else []), *stand_ins))
    lines = []
    for at, name in enumerate(stand_ins):
        value = f"{_maker(at)}() if {name} is {_MADE} else {name}" if _maker(at) in makers else name
        lines.append(f"    {_SET}(self, {name!r}, {value})\n")
    lines += ["    self.__post_init__()\n"] if goes_on else []
    made: dict[str, Any] = {}
    exec(f"def __init__({taken}):\n{''.join(lines) or '    pass'}", made)  # noqa: S102  # as the library does
    code: types.CodeType = made["__init__"].__code__
    return code


def _maker(at: int) -> str:
    return f"__make_{at}__"


def _stand_in(at: int) -> str:
    return f"__field_{at}__"


def _not_set(_instance: object, name: str, _value: object) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _not_deleted(_instance: object, name: str) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
