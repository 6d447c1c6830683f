"""An event loop in a daemon thread, for the user's coroutines: what they do to it, the run's own loop never sees.

Invariants:
- Coroutines share the loop, so that a client that lives between calls (a connection pool) can be used.
- `sys.exit()` in a task, or a stopped loop, ends neither thread nor loop; the call's outcome says what happened.
- A call is begun by one loop at most: until it has begun, and only then, it can be taken back and given to another.
- The thread ends when the loop was retired (or forgotten) and its last call is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from onefill.reward.call import RaisedError
from onefill.reward.crew import Crew, CrewExecutor

__all__ = ["LoopCall", "SideLoop"]

Settle = Callable[[Any, RaisedError | None], None]


class LoopCall:
    """One call of an async function.

    Args:
        make: gives what is to be awaited; called on the side loop.
        finish: turns what came of it into the result, there too.
        settle: takes the result, or the error; called once, on the side loop's thread.
    """

    def __init__(self, *, make: Callable[[], Awaitable[Any]], finish: Callable[[Any], Any], settle: Settle) -> None:
        self._make = make
        self._finish = finish
        self._settle = settle
        self._context = contextvars.copy_context()
        self._tickets = [None]  # popping is atomic: whoever gets the ticket owns the call
        self._task: asyncio.Task[None] | None = None
        self.began: float | None = None

    def take_back(self) -> bool:
        """Whether it had not begun; if so it never will, unless it is given to a loop again."""
        try:
            self._tickets.pop()
        except IndexError:
            return False
        return True

    def renewed(self) -> LoopCall:
        """A call that was taken back, to be given to another loop."""
        return LoopCall(make=self._make, finish=self._finish, settle=self._settle)

    def start(self, loop: asyncio.AbstractEventLoop, over: Callable[[LoopCall], None]) -> None:
        """Makes it a task. On the side loop's thread."""
        self._task = loop.create_task(self._run(), context=self._context)
        self._task.add_done_callback(lambda task: self._done(task, over))

    def cancel(self) -> None:
        """Asks the coroutine to end. On the side loop's thread."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        if not self.take_back():
            return
        self.began = time.monotonic()
        value, raised = None, None
        try:
            value = self._finish(await self._make())
        except BaseException as error:  # noqa: BLE001  also sys.exit(), which would come out of the loop
            raised = RaisedError.of(error)
        self._settle(value, raised)  # not in a callback, which would wait for the calls behind that block the loop

    def _done(self, task: asyncio.Task[None], over: Callable[[LoopCall], None]) -> None:
        over(self)
        if task.cancelled() and self.take_back():  # by the user's code, before it began
            self._settle(None, RaisedError.of(asyncio.CancelledError()))


class SideLoop:
    """The loop, seen from the loop that the run is on.

    Args:
        crew: threads for `asyncio.to_thread` in the user's code.
        ended: called with `key` from the loop's thread when that is over.
    """

    def __init__(self, crew: Crew, *, ended: Callable[[object], None]) -> None:
        self.key = object()
        self.probed = False
        self._inside = _Inside(crew, partial(ended, self.key))
        threading.Thread(target=self._inside.run, daemon=True, name="onefill-reward-loop").start()
        self._finalizer = weakref.finalize(self, self._inside.post, self._inside.retire)
        self._finalizer.atexit = False

    def submit(self, call: LoopCall) -> None:
        """Begins a call as soon as the loop comes to it."""
        self._inside.post(self._inside.start, call)

    def cancel(self, call: LoopCall) -> None:
        """Asks a call that has begun to end."""
        self._inside.post(call.cancel)

    def ask(self, answer: Callable[[], None]) -> None:
        """Has `answer` called from the loop's thread, which does not happen while the loop is blocked."""
        self._inside.post(answer)

    def retire(self) -> None:
        """Takes no more calls, and ends with the last one."""
        self._finalizer()


class _Inside:
    """What the thread holds. It must not hold the `SideLoop`, whose end is how it learns to end."""

    def __init__(self, crew: Crew, ended: Callable[[], None]) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(CrewExecutor(crew))
        self._ended = ended
        self._calls: set[LoopCall] = set()
        self._retired = False

    def post(self, function: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # it is over
            self._loop.call_soon_threadsafe(function, *args)

    def start(self, call: LoopCall) -> None:
        self._calls.add(call)
        call.start(self._loop, self._over)

    def retire(self) -> None:
        self._retired = True
        self._loop.stop()

    def _over(self, call: LoopCall) -> None:
        self._calls.discard(call)
        if self._retired:
            self._loop.stop()

    def run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while self._calls or not self._retired:
            self._turn()
        for task in asyncio.all_tasks(self._loop):  # what the user's code left behind
            task.cancel()
        self._loop.call_soon(self._loop.stop)
        self._turn()
        self._loop.close()
        self._ended()

    def _turn(self) -> None:
        with contextlib.suppress(BaseException):  # sys.exit() in a task that the user's code made
            self._loop.run_forever()
