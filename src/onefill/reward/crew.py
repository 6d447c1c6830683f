"""Daemon threads that are used again: a new one costs about 0.25 ms, which is more than most rewards.

Invariants:
- A job never waits for another: where every thread is busy (or hangs), one more is started.
- Threads are daemons, so a job that hangs never keeps the process from ending. Idle ones end when the crew is
  closed or forgotten, busy ones as soon as they come back.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

__all__ = ["Crew", "CrewExecutor"]

_Inbox = SimpleQueue["Callable[[], None] | None"]


class Crew:
    """Runs jobs in threads."""

    def __init__(self) -> None:
        self._bench = _Bench()
        self._finalizer = weakref.finalize(self, self._bench.close)
        self._finalizer.atexit = False  # daemons need no farewell

    def run(self, job: Callable[[], None]) -> None:
        """Starts a job, which must not raise."""
        inbox = self._bench.take()
        if inbox is None:
            inbox = SimpleQueue()
            threading.Thread(target=_work, args=(inbox, self._bench), daemon=True, name="onefill-reward").start()
        inbox.put(job)

    def close(self) -> None:
        """Ends the idle threads now, the others when they come back."""
        self._finalizer()


class _Bench:
    """The idle threads, last come first: the others may as well stay asleep."""

    def __init__(self) -> None:
        self._idle: deque[_Inbox] = deque()
        self._closed = False

    def take(self) -> _Inbox | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def sit(self, inbox: _Inbox) -> None:
        self._idle.append(inbox)
        if self._closed:
            self.close()

    def close(self) -> None:
        self._closed = True
        while (inbox := self.take()) is not None:
            inbox.put(None)


def _work(inbox: _Inbox, bench: _Bench) -> None:
    while (job := inbox.get()) is not None:
        job()
        del job  # what it holds must not live until the next one
        bench.sit(inbox)


class CrewExecutor(ThreadPoolExecutor):
    """A crew as the executor of an event loop: the standard one's threads are joined when the interpreter exits."""

    def __init__(self, crew: Crew) -> None:
        super().__init__(max_workers=1)  # it starts no thread, since `submit` is ours
        self._crew = crew

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Runs `fn` in a thread of the crew."""
        future: Future[Any] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                value = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001  the future carries it to whoever waits
                future.set_exception(error)
            else:
                future.set_result(value)

        self._crew.run(job)
        return future
