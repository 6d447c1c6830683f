"""Worker processes that can be killed: the isolation of rewards that may hang.

Invariants:
- At most `size` workers, started when first needed. A worker has one list of calls at a time.
- The time limit is for each call. A worker that is over it, that died, or whose caller was cancelled is killed
  and never used again; the calls behind the failed one are spread over the workers, so that a group of hanging
  calls does not take the limit once for each.
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

from onefill.reward.call import RaisedError, RewardOutcome, outcome_of

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
        self._size = size
        self._slots = asyncio.Semaphore(size)
        self._idle: list[_Worker] = []
        self._alive: set[_Worker] = set()
        self._ending: set[_Worker] = set()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """The processes that are alive now."""
        return [worker.pid for worker in self._alive]

    async def score(self, calls: Sequence[Call]) -> list[RewardOutcome]:
        """An outcome for each call, in order. Only cancellation raises."""
        async with self._slots:
            outcomes = await self._on_one(calls)
        rest = calls[len(outcomes) :]
        if not rest:
            return outcomes
        share = -(-len(rest) // self._size)
        parts = [rest[i : i + share] for i in range(0, len(rest), share)]
        return outcomes + [one for part in await asyncio.gather(*map(self.score, parts)) for one in part]

    async def _on_one(self, calls: Sequence[Call]) -> list[RewardOutcome]:
        """The outcomes of the first calls, as many as one worker lives for: one at least."""
        try:
            body = pickle.dumps(list(calls))
        except Exception as error:  # noqa: BLE001  any object of the user's may refuse
            reason = f"{self._kind}: the label or metadata cannot be sent to a worker ({RaisedError.of(error)})"
            return [RewardOutcome.failed(reason)] * len(calls)
        try:
            worker = self._idle_one() or await self._start()
        except _StartError as error:
            return [RewardOutcome.failed(f"{self._kind}: {error}")] * len(calls)
        outcomes: list[RewardOutcome] = []
        await self._run(worker, body, len(calls), outcomes)
        return outcomes

    def _idle_one(self) -> _Worker | None:
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            self._end(worker)  # it was killed while it had nothing to do: no sample's fault
        return None

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
                self._end(worker)

    def _outcome(self, reply: dict[str, Any]) -> RewardOutcome:
        if "value" in reply:
            return outcome_of(reply["value"], self._kind)
        return RewardOutcome.failed(f"{self._kind}: {reply['error']}")

    async def _start(self) -> _Worker:
        if self._closed:
            raise _StartError("the rewarder was closed")
        try:
            worker = await _Worker.start(self._kind)
        except OSError as error:
            raise _StartError(f"its worker process cannot start ({error})") from None
        self._alive.add(worker)
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                reply = await worker.receive()
            if "error" in reply:
                raise _StartError(f"its worker process cannot start ({reply['error']})")
        except BaseException as error:
            self._end(worker)
            if isinstance(error, TimeoutError):
                raise _StartError(f"its worker process was not ready after {_START_LIMIT_S:g} s") from None
            if isinstance(error, _GONE):
                raise _StartError("its worker process died while starting") from None
            raise
        return worker

    async def aclose(self) -> None:
        """Kills every worker and waits for its end."""
        self._closed = True
        self._idle.clear()
        for worker in list(self._alive):
            self._end(worker)
        await asyncio.gather(*(worker.wait() for worker in self._ending))

    def _end(self, worker: _Worker) -> None:
        self._alive.discard(worker)
        self._ending = {one for one in self._ending if not one.ended} | {worker}
        worker.kill()


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

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None

    @property
    def alive(self) -> bool:
        assert self._process.stdin is not None
        return not self.ended and not self._process.stdin.is_closing()

    def send(self, body: bytes) -> None:
        assert self._process.stdin is not None
        if not self.alive:  # uvloop raises RuntimeError where asyncio is silent
            raise BrokenPipeError
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
        assert self._process.stdout is not None
        await self._process.wait()
        with contextlib.suppress(*_GONE):
            await self._process.stdout.read()  # its pipes close a turn later than it ends, maybe after the loop
