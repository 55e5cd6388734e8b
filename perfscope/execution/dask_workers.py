"""The workers of a dask cluster, through an open ``distributed.Client``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from typing import Any


class DaskWorkers:
    """Gives work to dask's workers.

    dask's own ``Client.get_executor`` asks for a work's state once it has its result. A worker may have died in
    between, and the result becomes an error (``TypeError``).
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Call ``call`` on some worker. What the future holds is kept by dask for as long as the client is open."""
        # A result is not a pure function of the path: the file may have changed since it was last read.
        given = self._client.submit(call, pure=False)
        promised: Future[Any] = Future()

        def cancel(done: Future[Any]) -> None:
            if done.cancelled() and not given.cancelled():
                given.cancel()

        promised.add_done_callback(cancel)
        self._client.loop.add_callback(self._fulfil, given, promised)
        return promised

    async def _fulfil(self, given: Any, promised: Future[Any]) -> None:
        """Runs in the client's event loop. ``gather`` waits anew for a result that was lost with its worker."""
        with suppress(InvalidStateError):  # cancelled by the caller
            try:
                result = await self._client.gather(given, asynchronous=True)
            except (CancelledError, asyncio.CancelledError):
                promised.cancel()
                promised.set_running_or_notify_cancel()
            except Exception as error:
                promised.set_exception(error)
            else:
                promised.set_result(result)

    def threads(self) -> int:
        """Pieces of work that the workers can do at once. 0 without a scheduler, or without a worker."""
        return sum(self._client.nthreads().values()) if self._client.status == "running" else 0
