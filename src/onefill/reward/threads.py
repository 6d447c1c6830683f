"""Calls of the user's functions: sync ones in threads, async ones on a side loop, each with a time limit.

Invariants:
- Nothing of the user's runs on the loop of the run, so nothing can freeze or end it. Threads are daemons: a
  hanging call never keeps the process from ending.
- The time limit is for each call, from when it begins. A call over it is given up, and counted until it returns.
- A side loop that does not answer when a call is over its time, or has waited that long to begin, is blocked: it
  is given up, counts as one, and the calls that it kept from beginning get a loop each.
- At most `limit` calls run at once. With `limit` given up, the next calls fail at once and say so.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from onefill.reward.call import RaisedError
from onefill.reward.crew import Crew
from onefill.reward.side_loop import LoopCall, SideLoop

__all__ = ["AbandonedError", "OverTimeError", "UserCalls"]

_ANSWER_S = 1.0
_BEGIN_POLL_S = 0.05


class AbandonedError(Exception):
    """Too many earlier calls never returned."""


class OverTimeError(Exception):
    """The call was over its time limit; apart from a TimeoutError that the function raised itself."""


class _Later:
    """What a sync function returned is to be awaited."""

    def __init__(self, awaitable: Awaitable[Any]) -> None:
        self.awaitable = awaitable


class _Pending:
    """A call on a side loop, as the run's loop sees it."""

    def __init__(self, future: asyncio.Future[Any], call: LoopCall, side: SideLoop) -> None:
        self.future = future
        self.call = call
        self.side = side


class UserCalls:
    """Runs functions that may hang. Belongs to one event loop.

    Args:
        limit: calls at once, and calls that may be given up.
        time_limit_s: seconds for each call.
    """

    def __init__(self, *, limit: int, time_limit_s: float) -> None:
        self._limit = limit
        self._time_limit_s = time_limit_s
        self._slots = asyncio.Semaphore(limit)
        self._crew = Crew()
        self._side: SideLoop | None = None
        self._pending: set[_Pending] = set()
        self._given_up: set[object] = set()

    @property
    def abandoned(self) -> int:
        """Calls and loops that were given up and are not back."""
        return len(self._given_up)

    async def call(
        self,
        function: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
        *,
        coroutine: bool,
        finish: Callable[[Any], Any],
    ) -> Any:
        """What `finish` makes of what the function returns; it runs where the function ran, in the same time.

        Raises:
            OverTimeError: it took too long.
            AbandonedError: it was not called, since too many calls before it never returned.
            RaisedError: it raised something, be it `sys.exit()`.
        """
        async with self._slots:
            self._check_abandoned()
            if coroutine:
                return await self._awaited(lambda: function(*args, **kwargs), finish, self._time_limit_s)
            deadline = time.monotonic() + self._time_limit_s

            def whole() -> Any:
                value = function(*args, **kwargs)
                return _Later(value) if inspect.isawaitable(value) else finish(value)

            value = await self._threaded(whole)
            if not isinstance(value, _Later):
                return value
            return await self._awaited(lambda: value.awaitable, finish, deadline - time.monotonic())

    def close(self) -> None:
        """Ends the threads that are idle; the others end when they come back."""
        if self._side is not None:
            self._side.retire()
            self._side = None
        self._crew.close()

    def _check_abandoned(self) -> None:
        if self.abandoned >= self._limit:
            raise AbandonedError(f"{self.abandoned} earlier calls never returned, so it is not called again")

    async def own(self, function: Callable[[], Any]) -> Any:
        """What a function of ours returns, which runs in a thread and cannot hang. Raises RaisedError."""
        return await self._in_thread(function)

    async def _threaded(self, whole: Callable[[], Any]) -> Any:
        future = self._in_thread(partial(contextvars.copy_context().run, whole))
        done = False
        try:
            done = bool((await asyncio.wait({future}, timeout=self._time_limit_s))[0])
        finally:
            if not done:  # over time, or cancelled
                self._count(future, future)
        if not done:
            raise OverTimeError
        return future.result()

    def _in_thread(self, whole: Callable[[], Any]) -> asyncio.Future[Any]:
        future, settle = _channel()

        def job() -> None:
            value, error = None, None
            try:
                value = whole()
            except BaseException as raised:  # noqa: BLE001  also sys.exit(): it must not end as a silence
                error = RaisedError.of(raised)
            settle(value, error)

        self._crew.run(job)
        return future

    async def _awaited(self, make: Callable[[], Awaitable[Any]], finish: Callable[[Any], Any], limit_s: float) -> Any:
        future, settle = _channel()
        call = LoopCall(make=make, finish=finish, settle=settle)
        if self._side is None:
            self._side = self._new_side()
        pending = _Pending(future, call, self._side)
        self._pending.add(pending)
        self._side.submit(call)
        wait = limit_s
        try:
            while wait > 0 and not (await asyncio.wait({future}, timeout=wait))[0]:
                began = pending.call.began
                wait = _BEGIN_POLL_S if began is None else began + limit_s - time.monotonic()
                if began is None:
                    self._probe(pending.side)
        finally:
            self._pending.discard(pending)
            if not future.done():  # over time, or cancelled
                self._give_up(pending)
        if not future.done():
            raise OverTimeError
        return future.result()

    def _give_up(self, pending: _Pending) -> None:
        """Not `wait_for`, which waits for ever on a coroutine that swallows its cancellation."""
        if pending.call.take_back():
            return
        if pending.side.key not in self._given_up:
            self._count(pending, pending.future)
        pending.side.cancel(pending.call)
        self._probe(pending.side)

    def _probe(self, side: SideLoop) -> None:
        """Replaces the loop unless it answers soon."""
        if side.probed:
            return
        side.probed = True
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[None] = loop.create_future()
        side.ask(lambda: _post(loop, _resolve, answered, None, None))
        loop.call_later(_ANSWER_S, self._replace_silent, side, answered)

    def _replace_silent(self, side: SideLoop, answered: asyncio.Future[None]) -> None:
        side.probed = False
        if answered.done() or side.key in self._given_up:
            return
        self._given_up -= {one for one in self._given_up if isinstance(one, _Pending) and one.side is side}
        self._given_up.add(side.key)
        side.retire()
        if self._side is side:
            self._side = None
        for pending in [one for one in self._pending if one.side is side]:
            if pending.call.take_back():
                self._move(pending)

    def _move(self, pending: _Pending) -> None:
        try:
            self._check_abandoned()
        except AbandonedError as error:
            _resolve(pending.future, None, error)
            return
        pending.side, pending.call = self._new_side(), pending.call.renewed()
        pending.side.submit(pending.call)
        pending.side.retire()

    def _new_side(self) -> SideLoop:
        loop, back = asyncio.get_running_loop(), self._given_up.discard
        return SideLoop(self._crew, ended=lambda key: _post(loop, back, key))

    def _count(self, one: object, future: asyncio.Future[Any]) -> None:
        self._given_up.add(one)

        def returned(done: asyncio.Future[Any]) -> None:
            self._given_up.discard(one)
            done.exception()  # seen, so asyncio does not complain

        future.add_done_callback(returned)


def _channel() -> tuple[asyncio.Future[Any], Callable[[Any, RaisedError | None], None]]:
    """A future of the running loop, and what resolves it from another thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    return future, lambda value, error: _post(loop, _resolve, future, value, error)


def _post(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop may be closed by now
        loop.call_soon_threadsafe(function, *args)


def _resolve(future: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
