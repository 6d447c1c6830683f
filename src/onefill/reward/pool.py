"""Worker processes that can be killed: the isolation of rewards that may hang.

Invariants:
- At most `size` workers, started when first needed. A worker has one list of calls at a time.
- The time limit is for each call. A worker that is over it, that died, or whose caller was cancelled is killed
  and never used again; the calls behind the failed one go to the next worker.
- After `aclose` no process is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onefill.reward.call import RewardOutcome

__all__ = ["WorkerPool"]

_START_LIMIT_S = 120.0
_GONE = (asyncio.IncompleteReadError, ConnectionError, BrokenPipeError)

Call = tuple[str, Any, Any]


class _StartError(Exception):
    """A worker did not come up."""


class WorkerPool:
    """Processes that run one of the built-in scorers.

    Args:
        kind: which scorer.
        size: processes at most.
        time_limit_s: seconds for each call.
    """

    def __init__(self, *, kind: str, size: int, time_limit_s: float) -> None:
        self._kind = kind
        self._time_limit_s = time_limit_s
        self._slots = asyncio.Semaphore(size)
        self._idle: list[_Worker] = []
        self._alive: set[_Worker] = set()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """The processes that are alive now."""
        return [worker.pid for worker in self._alive]

    async def score(self, calls: Sequence[Call]) -> list[RewardOutcome]:
        """An outcome for each call, in order. Only cancellation raises."""
        outcomes: list[RewardOutcome] = []
        async with self._slots:
            while len(outcomes) < len(calls):
                try:
                    body = pickle.dumps(list(calls[len(outcomes) :]))
                except Exception as error:  # noqa: BLE001  any object of the user's may refuse
                    reason = f"{self._kind}: the label or metadata cannot be sent to a worker ({error})"
                    return [*outcomes, *[RewardOutcome.failed(reason)] * (len(calls) - len(outcomes))]
                try:
                    worker = self._idle.pop() if self._idle else await self._start()
                except _StartError as error:
                    reason = f"{self._kind}: {error}"
                    return [*outcomes, *[RewardOutcome.failed(reason)] * (len(calls) - len(outcomes))]
                await self._run(worker, body, len(calls), outcomes)
        return outcomes

    async def _run(self, worker: _Worker, body: bytes, count: int, outcomes: list[RewardOutcome]) -> None:
        """Collects replies until all are there or one is lost; the worker goes back, or is killed."""
        sound = False
        try:
            worker.send(body)
            while len(outcomes) < count:
                async with asyncio.timeout(self._time_limit_s):
                    reply = await worker.receive()
                outcomes.append(self._outcome(reply))
            sound = True
        except TimeoutError:
            reason = f"{self._kind} took longer than {self._time_limit_s:g} s and was stopped"
            outcomes.append(RewardOutcome.failed(reason))
        except _GONE:
            outcomes.append(RewardOutcome.failed(f"{self._kind}: the process that scored it died"))
        finally:
            if sound and not self._closed:
                self._idle.append(worker)
            else:
                self._alive.discard(worker)
                worker.kill()

    def _outcome(self, reply: dict[str, Any]) -> RewardOutcome:
        if "value" in reply:
            return RewardOutcome(float(reply["value"]))
        return RewardOutcome.failed(f"{self._kind}: {reply['error']}")

    async def _start(self) -> _Worker:
        if self._closed:
            raise _StartError("the rewarder was closed")
        worker = await _Worker.start(self._kind)
        self._alive.add(worker)
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                reply = await worker.receive()
            if "error" in reply:
                raise _StartError(f"its worker process cannot start ({reply['error']})")
        except BaseException as error:
            self._alive.discard(worker)
            worker.kill()
            if isinstance(error, TimeoutError):
                raise _StartError(f"its worker process was not ready after {_START_LIMIT_S:g} s") from None
            if isinstance(error, _GONE):
                raise _StartError("its worker process died while starting") from None
            raise
        return worker

    async def aclose(self) -> None:
        """Kills every worker and waits for its end."""
        self._closed = True
        workers = list(self._alive)
        self._alive.clear()
        self._idle.clear()
        for worker in workers:
            worker.kill()
        await asyncio.gather(*(worker.wait() for worker in workers))


class _Worker:
    """One process and its pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    @classmethod
    async def start(cls, kind: str) -> _Worker:
        source = str(Path(__file__).parents[2])
        paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            f"from onefill.reward.worker import main; main({kind!r}, {os.getpid()})",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        return cls(process)

    def send(self, body: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(struct.pack("<I", len(body)) + body)

    async def receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        (length,) = struct.unpack("<I", await self._process.stdout.readexactly(4))
        reply: dict[str, Any] = json.loads(await self._process.stdout.readexactly(length))
        return reply

    def kill(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def wait(self) -> None:
        await self._process.wait()
