"""Calls of the user's functions: sync ones in threads, async ones on the loop, each with a time limit.

Invariants:
- At most `limit` calls run at once; a call over its time is given up, and its thread, which nothing can stop, is
  counted until it returns. With `limit` of these the next calls fail at once and say so.
- Threads are daemons: a hanging call never keeps the process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["AbandonedError", "OverTimeError", "UserCalls"]


class AbandonedError(Exception):
    """Too many earlier calls never returned."""


class OverTimeError(Exception):
    """The call was over its time limit; apart from a TimeoutError that the function raised itself."""


class UserCalls:
    """Runs functions that may hang.

    Args:
        limit: calls at once, and calls that may be given up.
        time_limit_s: seconds for each call.
    """

    def __init__(self, *, limit: int, time_limit_s: float) -> None:
        self._limit = limit
        self._time_limit_s = time_limit_s
        self._slots = asyncio.Semaphore(limit)
        self.abandoned = 0

    async def call(
        self, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], *, coroutine: bool
    ) -> Any:
        """What the function returns.

        Raises:
            OverTimeError: it took too long.
            AbandonedError: it was not called, since too many calls before it never returned.
            Exception: whatever it raises.
        """
        async with self._slots:
            if self.abandoned >= self._limit:
                raise AbandonedError(f"{self.abandoned} earlier calls never returned, so it is not called again")
            if coroutine:
                return await self._awaited(function(*args, **kwargs))
            value = await self._threaded(function, args, kwargs)
            return await self._awaited(value) if inspect.isawaitable(value) else value

    async def _awaited(self, awaitable: Any) -> Any:
        """Not `wait_for`, which waits for ever on a function that swallows its cancellation."""
        task = asyncio.ensure_future(awaitable)
        try:
            done, _ = await asyncio.wait({task}, timeout=self._time_limit_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            self.abandoned += 1
            task.add_done_callback(self._returned)
            task.cancel()
            raise OverTimeError
        if task.cancelled():
            raise RuntimeError("it was cancelled from inside")
        return task.result()

    async def _threaded(self, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        context = contextvars.copy_context()

        def run() -> None:
            value, error = None, None
            try:
                value = context.run(function, *args, **kwargs)
            except BaseException as raised:  # noqa: BLE001  also sys.exit(): it must not end as a silence
                error = raised if isinstance(raised, Exception) else RuntimeError(repr(raised))
            with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(_settle, future, value, error)

        threading.Thread(target=run, daemon=True, name="onefill-reward").start()
        try:
            done, _ = await asyncio.wait({future}, timeout=self._time_limit_s)
        except asyncio.CancelledError:
            self._abandon(future)
            raise
        if not done:
            self._abandon(future)
            raise OverTimeError
        return future.result()

    def _abandon(self, future: asyncio.Future[Any]) -> None:
        self.abandoned += 1
        future.add_done_callback(self._returned)

    def _returned(self, future: asyncio.Future[Any]) -> None:
        self.abandoned -= 1
        if not future.cancelled():
            future.exception()  # seen, so asyncio does not complain


def _settle(future: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if error is None:
        future.set_result(value)
    elif isinstance(error, StopIteration):  # a future refuses it
        future.set_exception(RuntimeError(repr(error)))
    else:
        future.set_exception(error)
