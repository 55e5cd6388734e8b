"""Frozen dataclasses are those of the standard library, whose methods are made when they are asked for."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
import pytest

from perfscope import frozen


def classes(dataclass: Callable[..., Any]) -> dict[str, Any]:
    """The same classes, made by this ``dataclass``."""

    @dataclass(frozen=True)
    class Plain:
        """Has fields with and without a default."""

        number: int
        text: str = "none"
        items: list[int] = dataclasses.field(default_factory=list)

        kind = "of the class"

    @dataclass(frozen=True, kw_only=True)
    class Named:
        """Takes names alone, works one field out, and shows and compares others only in part."""

        first: int = 1
        second: int
        hidden: int = dataclasses.field(default=3, repr=False, compare=False)
        total: int = dataclasses.field(init=False, default=0)

        def __post_init__(self) -> None:
            object.__setattr__(self, "total", self.first + self.second)

    @dataclass(frozen=True, eq=False, repr=False)
    class Itself:
        """Is equal to itself alone."""

        number: int

    @dataclass(frozen=True)
    class Own:
        """Has methods of its own."""

        number: int

        def __repr__(self) -> str:
            return f"own {self.number}"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Own) and self.number % 10 == other.number % 10

        def __hash__(self) -> int:
            return self.number % 10

    @dataclass(frozen=True)
    class Compared:  # noqa: PLW1641  # that is the case
        """Says when it is equal, and nothing of its hash."""

        number: int

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Compared) and self.number // 10 == other.number // 10

    @dataclass(frozen=True)
    class Heir(Plain):
        """Adds a field to its base's."""

        more: float = 0.5

    @dataclass(frozen=True)
    class HeirOfHeir(Heir):
        """Changes a default, and has a method of its own."""

        text: str = "other"

        def __repr__(self) -> str:
            return f"heir {self.number}"

    @dataclass(frozen=True, kw_only=True)
    class HeirOfNamed(Named):
        """Works one more field out."""

        third: int = 3
        product: int = dataclasses.field(init=False, default=0)

        def __post_init__(self) -> None:
            super().__post_init__()
            object.__setattr__(self, "product", self.total * self.third)

    @dataclass(frozen=True)
    class Shared:
        """Has what is no field, and what is no more than handed to the constructor."""

        number: int
        of_class: ClassVar[int] = 7
        given: dataclasses.InitVar[int] = 8

    class Base:
        """Is no dataclass."""

        number = 5

    @dataclass(frozen=True)
    class OfBase(Base):
        """Takes a default from its base."""

        number: int

    @dataclass(frozen=True)
    class Empty:
        """Has no field."""

    @dataclass(frozen=True)
    class Simple:
        """Sets its fields, two of them only by name."""

        number: int
        other: object = "default"
        named: int = dataclasses.field(kw_only=True)
        last: str = dataclasses.field(default="last", kw_only=True)

    @dataclass(frozen=True)
    class OfSelf:
        """Has a field of an unlucky name."""

        self: int
        other: int = 2

    @dataclass(frozen=True)
    class OfWriter:
        """Has fields of names that the writer of constructors uses."""

        __set_field__: int
        to: int = 2
        default_to: int = 3

    @dataclass
    class Changeable:
        """Is not frozen."""

        number: int = 0

    found = (
        Plain, Named, Itself, Own, Compared, Heir, HeirOfHeir, HeirOfNamed, Shared, OfBase, Empty, Simple, OfSelf,
        OfWriter, Changeable,
    )  # fmt: skip
    return {kind.__name__: kind for kind in found}


OURS, THEIRS = classes(frozen.dataclass), classes(dataclasses.dataclass)
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("Plain", (1,), {}),
    ("Plain", (1, "two"), {"items": [3]}),
    ("Plain", (), {}),
    ("Plain", (1, 2, 3, 4), {}),
    ("Named", (), {"second": 2}),
    ("Named", (1, 2), {}),
    ("Named", (), {"second": 2, "total": 4}),
    ("Itself", (7,), {}),
    ("Own", (12,), {}),
    ("Compared", (12,), {}),
    ("Heir", (1,), {"more": 2.0}),
    ("HeirOfHeir", (1,), {"more": 2.0}),
    ("HeirOfHeir", (), {}),
    ("HeirOfNamed", (), {"second": 2, "third": 5}),
    ("HeirOfNamed", (), {}),
    ("Shared", (1,), {}),
    ("Shared", (1, 2), {}),
    ("Shared", (), {"of_class": 2}),
    ("OfBase", (), {}),
    ("OfBase", (1,), {}),
    ("Empty", (), {}),
    ("Empty", (1,), {}),
    ("Simple", (1,), {"named": 2}),
    ("Simple", (1, 2), {"named": 2, "last": "one"}),
    ("Simple", (1,), {}),
    ("Simple", (1, 2, 3), {}),
    ("Simple", (), {"named": 2}),
    ("OfSelf", (7,), {}),
    ("OfSelf", (7, 8), {}),
    ("OfWriter", (7,), {}),
    ("OfWriter", (7, 8), {"default_to": 4}),
    ("Changeable", (), {}),
]


def told(kind: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
    """What an object answers, or the error of making it."""
    try:
        one, other = kind(*arguments, **named), kind(*arguments, **named)
    except TypeError as error:
        return [str(error)]
    shown = repr(one).partition(" at 0x")[0]
    answers: list[Any] = [shown, one == other, one != other, one == 1, one in [other], dataclasses.asdict(one)]
    answers += [_or_error(lambda: hash(one) == hash(other))]
    answers += [_or_error(lambda: setattr(one, "number", 5)), _or_error(lambda: setattr(one, "new", 5))]
    answers += [_or_error(lambda: delattr(one, "first")), dataclasses.asdict(copy.deepcopy(one))]
    answers += [_or_error(lambda: dataclasses.asdict(dataclasses.replace(one, number=9)))]
    return answers


def _or_error(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize(("name", "arguments", "named"), CALLS)
def test_objects_are_those_of_the_standard_library(
    name: str, arguments: tuple[Any, ...], named: dict[str, Any]
) -> None:
    assert told(OURS[name], arguments, named) == told(THEIRS[name], arguments, named)


@pytest.mark.parametrize("name", list(OURS))
def test_classes_are_those_of_the_standard_library(name: str) -> None:
    ours, theirs = OURS[name], THEIRS[name]
    assert str(inspect.signature(ours)) == str(inspect.signature(theirs))
    assert ours.__match_args__ == theirs.__match_args__
    assert repr(ours.__dataclass_params__) == repr(theirs.__dataclass_params__)
    assert (ours.__hash__ is None) == (theirs.__hash__ is None)
    assert [repr(each) for each in dataclasses.fields(ours)] == [repr(each) for each in dataclasses.fields(theirs)]
    assert ours.__init__.__qualname__ == theirs.__init__.__qualname__
    assert ours.__doc__ == theirs.__doc__


@frozen.dataclass(frozen=True)
class Packed:
    """Can be found by its name."""

    number: int
    items: tuple[int, ...] = ()


def test_methods_are_made_when_they_are_asked_for() -> None:
    assert {type(vars(Packed)[name]).__name__ for name in ("__init__", "__repr__", "__eq__", "__hash__")} == {
        "_WhenAskedFor"
    }
    assert pickle.loads(pickle.dumps(Packed(1, (2,)))) == Packed(1, (2,))
    made = {name for name in ("__init__", "__repr__", "__eq__", "__hash__") if inspect.isfunction(vars(Packed)[name])}
    assert made == {"__init__", "__eq__"}


@pytest.mark.parametrize(
    "ask",
    [
        dataclasses.fields,
        lambda kind: kind.__match_args__,
        lambda kind: dataclasses.dataclass(frozen=True)(type("Heir", (kind,), {"__doc__": "Adds nothing."})),
        lambda kind: msgspec.convert({"number": 1}, kind),
        lambda kind: dataclasses.is_dataclass(type("Heir", (kind,), {})),
    ],
)
def test_fields_are_looked_through_when_they_are_asked_for(ask: Callable[[Any], Any]) -> None:
    @frozen.dataclass(frozen=True)
    class Unused:
        """Nobody has asked about it yet."""

        number: int
        other: int = 2

    of_fields = ("__dataclass_fields__", "__dataclass_params__", "__match_args__")
    assert {type(vars(Unused)[name]).__name__ for name in of_fields} == {"_FieldsWhenAskedFor"}
    assert ask(Unused)
    assert list(vars(Unused)["__dataclass_fields__"]) == ["number", "other"] == list(Unused.__match_args__)
    assert vars(Unused)["__dataclass_params__"].frozen


def test_a_constructor_that_only_sets_fields_needs_no_look_through_them() -> None:
    @frozen.dataclass(frozen=True, kw_only=True)
    class Unused:
        """Its constructor is the only thing that is asked for."""

        number: int
        other: int = 2

    made = Unused(number=1)
    assert (made.number, made.other) == (1, 2)
    assert type(vars(Unused)["__dataclass_fields__"]).__name__ == "_FieldsWhenAskedFor"


def test_defaults_are_made_before_what_follows_the_fields() -> None:
    @frozen.dataclass(frozen=True)
    class Counted:
        """Looks at its fields when all of them are set."""

        names: list[str] = dataclasses.field(default_factory=list)
        least: int = 1

        def __post_init__(self) -> None:
            self.names.append(f"at least {self.least}")

    assert Counted().names == ["at least 1"]
    assert Counted(least=2).names == ["at least 2"]
    assert Counted(["given"]).names == ["given", "at least 1"]


def test_a_class_may_say_how_it_is_matched() -> None:
    @frozen.dataclass(frozen=True)
    class Own:
        """Is matched by one of its fields."""

        __match_args__ = ("other",)
        number: int
        other: int

    assert Own(1, 2).__match_args__ == Own.__match_args__ == ("other",)
    match Own(1, 2):
        case Own(found):
            assert found == 2


def test_a_dataclass_of_the_standard_library_may_inherit() -> None:
    @dataclasses.dataclass(frozen=True)
    class Heir(Packed):
        more: int = 2

    assert Heir(1) == Heir(1, (), 2) != Heir(1, (), 3)
    assert repr(Heir(1)).endswith("Heir(number=1, items=(), more=2)")
    with pytest.raises(dataclasses.FrozenInstanceError):
        Heir(1).more = 3  # type: ignore[misc]  # that it is refused is the point
    with pytest.raises(TypeError, match="non-frozen"):
        dataclasses.dataclass(type("Other", (Packed,), {}))
