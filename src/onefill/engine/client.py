"""The client of one inference server, the only thing of this room that others need at run time.

Invariants:
- `generate` gives exactly `request.n` completions, in order, or raises; there is nothing in between.
- Nothing is sent that `guards.check` refuses, and nothing is handed out that `codec.decode` did not check whole.
- Every wait ends: one deadline covers all tries of a call, and every retry is counted by cause.
- Cancelling a call closes its connection, so that the engine drops the work, and is never swallowed.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from onefill.engine.codec import Frame, decode_reply, encode, headers, parse
from onefill.engine.control import Control
from onefill.engine.guards import Limits, check
from onefill.engine.info import EngineInfo, EngineLoad
from onefill.engine.placeholders import Placeholders
from onefill.engine.retry import AttemptError, Budget, RetryPolicy
from onefill.engine.stream import Collector, Events
from onefill.engine.transport import Deadlines, Transport, base_url, cut, read_end
from onefill.errors import InfraError, OnefillError, ProtocolError
from onefill.plan.request import Request
from onefill.types import Completion, Timing

__all__ = ["ClientStats", "EngineClient"]

T = TypeVar("T")


@dataclass(slots=True)
class ClientStats:
    """What one client did.

    Args:
        requests_sent: `/generate` calls that left, retries included (a refused connection does not count).
        requests_retried: `/generate` calls that were retries.
        control_retried: retries of control calls.
        retries_by_cause: both kinds of retries by cause: `connection`, `reset`, `timeout`, `http_502` ...
        failures_by_cause: `generate` calls that ended in an error, by the cause of the last try.
    """

    requests_sent: int = 0
    requests_retried: int = 0
    control_retried: int = 0
    retries_by_cause: Counter[str] = field(default_factory=Counter)
    failures_by_cause: Counter[str] = field(default_factory=Counter)


class EngineClient:
    """One engine, or a router in front of several.

    Args:
        url: base URL.
        session: from `transport.open_session`; shared between clients, closed by the caller.
        policy: how often faults are retried, and after what waits.
        deadlines: longest waits.
        limits: vocabulary and context of the model; set later with `limits` once they are known.
        placeholders: media placeholder ids that must not reach a sample.
        rng: draws the jitter of retries.
        clock: monotonic seconds, for `Timing` and the retry deadline.
        sleep: waits between retries.

    Raises:
        ConfigError: `url` is no http(s) address.
    """

    def __init__(
        self,
        url: str,
        *,
        session: aiohttp.ClientSession,
        policy: RetryPolicy | None = None,
        deadlines: Deadlines | None = None,
        limits: Limits | None = None,
        placeholders: Placeholders | None = None,
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.url = base_url(url)
        self.limits = limits or Limits()
        self.placeholders = placeholders
        self.stats = ClientStats()
        self._policy = policy or RetryPolicy()
        self._deadlines = deadlines or Deadlines()
        self._rng = rng
        self._clock = clock
        self._sleep = sleep
        self._transport = Transport(url=self.url, session=session, deadlines=self._deadlines)
        self._control = Control(transport=self._transport, run=self._controlled)

    async def generate(
        self, request: Request, *, on_first_token: Callable[[], None] | None = None
    ) -> list[Completion]:
        """Exactly `request.n` completions, in the order of `request.samples`.

        Args:
            request: what to generate.
            on_first_token: called once, when a streamed request's first token is there, or the whole reply.

        Raises:
            DataError: the request must not be sent, or the server says that it is at fault (400, 413, 422).
            ConfigError: the address or the key is wrong (401, 403, 404, 405, a redirect).
            ProtocolError: the reply breaks the contract; nothing of it may be used.
            InfraError: the engine failed, and went on failing as often as the policy retries.
        """
        check(request, self.limits)
        body, head = encode(request), headers(request)
        first = _once(on_first_token) if on_first_token is not None else _nothing
        try:
            return await self._retried(
                lambda: self._attempt(request, body, head, first),
                what=f"request {request.id} of group {request.group_id}",
                total=self._deadlines.total,
                count=self._count_retry,
            )
        except ProtocolError:
            self.stats.failures_by_cause["protocol"] += 1
            raise

    async def _attempt(
        self, request: Request, body: bytes, head: dict[str, str], first: Callable[[], None]
    ) -> list[Completion]:
        self.stats.requests_sent += 1
        sent = self._clock()
        try:
            if request.stream:
                return await self._streamed(request, body, head, sent, first)
            content_type, raw = await self._transport.reply("POST", "/generate", body=body, headers=head)
            return self._decoded(content_type, raw, request, sent, first)
        except AttemptError as error:
            self.stats.requests_sent -= not error.left
            raise

    def _decoded(
        self, content_type: str, raw: bytes, request: Request, sent: float, first: Callable[[], None]
    ) -> list[Completion]:
        frame = self._frame(request, Timing(sent, self._clock()))
        if "json" not in content_type:
            start = raw[:60].decode(errors="replace")
            raise frame.error("Content-Type", f"reply is {content_type}, not JSON; it begins {start!r}")
        first()
        return decode_reply(parse(raw, frame), frame)

    async def _streamed(
        self, request: Request, body: bytes, head: dict[str, str], sent: float, first: Callable[[], None]
    ) -> list[Completion]:
        async with self._transport.stream("POST", "/generate", body=body, headers=head) as response:
            if response.content_type != "text/event-stream":
                return self._decoded(response.content_type, await response.read(), request, sent, first)
            reply = await self._collected(response, request, sent, first)
        return decode_reply(reply, self._frame(request, Timing(sent, self._clock())))

    async def _collected(
        self, response: aiohttp.ClientResponse, request: Request, sent: float, first: Callable[[], None]
    ) -> Any:
        """The reply that a stream adds up to. What comes after its `[DONE]`, even the end, is not waited for."""
        collector = Collector(self._frame(request, Timing(sent, sent)))
        events = Events()
        async for chunk in response.content.iter_any():
            for data in events.feed(chunk):
                collector.add(data)
                if collector.started:
                    first()
            if collector.done:
                await read_end(response)
                return collector.reply()
        raise cut("the stream ended without [DONE]")

    def _frame(self, request: Request, timing: Timing) -> Frame:
        return Frame(
            request=request,
            engine=self.url,
            timing=timing,
            placeholders=self.placeholders,
            vocab_size=self.limits.reply_vocab_size,
        )

    async def _retried(
        self,
        attempt: Callable[[], Awaitable[T]],
        *,
        what: str,
        total: float,
        count: Callable[[str], None],
    ) -> T:
        """Tries until it works, the policy gives up, or `total` seconds are over."""
        spent = 0.0
        made: dict[Budget, int] = {}
        last: AttemptError | None = None
        deadline = asyncio.timeout(total)
        try:
            async with deadline:
                while True:
                    began = self._clock()
                    try:
                        return await attempt()
                    except AttemptError as error:
                        last = error
                        if not error.broke_off:
                            spent += self._clock() - began
                        wait = self._policy.wait(error, made=made, spent=spent, rng=self._rng)
                        if wait is None:
                            raise self._gave_up(error, what, made) from error
                    made[last.verdict.budget] = made.get(last.verdict.budget, 0) + 1
                    count(last.verdict.cause)
                    await self._sleep(wait)
                    spent += wait
        except TimeoutError as error:
            if not deadline.expired():
                raise
            self.stats.failures_by_cause["deadline"] += 1
            before = f"; the last fault was {last}" if last is not None else ""
            raise InfraError(
                f"engine {self.url}: {what}: no answer within {total:g} s, {_tries(made)}{before}"
            ) from error

    def _gave_up(self, error: AttemptError, what: str, made: dict[Budget, int]) -> OnefillError:
        self.stats.failures_by_cause[error.verdict.cause] += 1
        kind = error.verdict.error
        if kind is ProtocolError:
            return ProtocolError(f"{what}: {error}", engine=self.url)
        tried = f" ({_tries(made)})" if made else ""
        return kind(f"engine {self.url}: {what}: {error}{tried}")

    def _count_retry(self, cause: str) -> None:
        self.stats.requests_retried += 1
        self.stats.retries_by_cause[cause] += 1

    def _count_control_retry(self, cause: str) -> None:
        self.stats.control_retried += 1
        self.stats.retries_by_cause[cause] += 1

    async def _controlled(self, attempt: Callable[[], Awaitable[T]], what: str) -> T:
        return await self._retried(attempt, what=what, total=self._deadlines.control, count=self._count_control_retry)

    async def describe(self) -> EngineInfo:
        """What the server says of itself; missing or odd fields become unknown, never an error.

        Raises:
            InfraError: it cannot be reached.
            ConfigError: it refuses our key.
        """
        return await self._control.describe()

    async def loads(self) -> EngineLoad:
        """How busy it is. Raises InfraError where it cannot say."""
        return await self._control.loads()

    async def abort(self, rid: str) -> None:
        """Aborts the requests whose rid begins with `rid`. Raises InfraError where the server has no such route.

        Real SGLang (0.5.23) answers 200 and does nothing for the rid of a request with n > 1: cancel its
        `generate` instead, which closes the connection.
        """
        await self._control.abort(rid)

    async def abort_all(self) -> None:
        """Aborts everything on the engine. Raises InfraError where the server has no such route.

        An abort during the hidden warm-up of n > 1 does not stop its children (SGLang 0.5.23): repeat until
        `loads().idle`.
        """
        await self._control.abort_all()

    async def flush_cache(self, *, wait: float = 0.0) -> bool:
        """Empties the prefix cache. False where the server refused, as it does while it is busy.

        Args:
            wait: seconds that the server may wait to become idle first.
        """
        return await self._control.flush_cache(wait=wait)

    async def healthy(self) -> bool:
        """Whether `/health` answers 200 within the control deadline; one try, never an error.

        SGLang 0.5.23 takes about 1 s for it, and does not answer while it is paused.
        """
        return await self._control.healthy(self._deadlines.control)


def _nothing() -> None:
    """Nobody asked to hear of the first token."""


def _once(call: Callable[[], None]) -> Callable[[], None]:
    """`call` the first time, then nothing: a retry must not announce a second first token."""
    waiting = [call]

    def first() -> None:
        if waiting:
            waiting.pop()()

    return first


def _tries(made: dict[Budget, int]) -> str:
    count = sum(made.values()) + 1
    return f"tried {count} time{'' if count == 1 else 's'}"
