"""The executor that is none: every call at once, in the caller's own process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future
else:
    Executor = object  # importing it takes as long as a small command's work

_P = ParamSpec("_P")
_Returned = TypeVar("_Returned")


class Serial(Executor):
    """Runs every call at once, in the caller's own process."""

    def __enter__(self) -> Serial:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left to do."""

    def submit(self, fn: Callable[_P, _Returned], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_Returned]:
        """Call ``fn`` now; the future that comes back is done."""
        from concurrent.futures import Future

        future: Future[_Returned] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            # Its traceback would keep what the call had in memory.
            future.set_exception(error.with_traceback(None))
        return future
