"""What comes of one item of work, wherever it ran: a result or an error in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

from perfscope.frozen import dataclass

Item = TypeVar("Item")
Result = TypeVar("Result")

WORKER_DIED: Final = (
    "the worker process died while reading it (killed, most likely for memory); analyze it on a larger machine"
)


@dataclass(frozen=True)
class Outcome(Generic[Item, Result]):
    """One item's result or its error: never both, never neither."""

    item: Item
    result: Result | None
    error: str | None


def attempt(function: Callable[[Item], Result], item: Item) -> Outcome[Item, Result]:
    """Call ``function`` here and now; an exception is the item's error."""
    try:
        return Outcome(item, function(item), None)
    except Exception as error:
        return Outcome(item, None, describe(error))


def describe(error: BaseException) -> str:
    """An error in one line: its message, with the type where the message may not be clear alone."""
    text = str(error)
    return text if type(error).__module__.startswith("perfscope") else f"{type(error).__name__}: {text}"
