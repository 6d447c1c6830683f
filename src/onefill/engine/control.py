"""The control plane of one engine: what it is, how busy it is, abort, flush, health.

Invariants:
- A control call is retried like a request (one 502 on such a call once sent a training run back to step 0), and
  has one short deadline for all its tries.
- A call that the server does not have is an error, never a success: aborts posted to a router, which has no
  such route, once left orphans running whose samples came back twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeVar
from urllib.parse import urlencode

import orjson

from onefill.engine.info import EngineInfo, EngineLoad, engine_info, engine_load
from onefill.engine.retry import AttemptError
from onefill.engine.transport import Transport
from onefill.errors import InfraError

__all__ = ["Control"]

T = TypeVar("T")
_JSON = {"Content-Type": "application/json"}
_MISSING = frozenset({"http_404", "http_405", "http_501"})
_REFUSED_KEY = frozenset({"http_401", "http_403"})


class _Run(Protocol):
    """Runs an attempt with retries and a deadline."""

    async def __call__(self, attempt: Callable[[], Awaitable[T]], what: str) -> T: ...


class Control:
    """Control calls of one engine.

    Args:
        transport: makes the calls.
        run: `EngineClient`'s retries and deadline.
    """

    def __init__(self, *, transport: Transport, run: _Run) -> None:
        self._transport = transport
        self._run = run

    async def describe(self) -> EngineInfo:
        server = await self._first("/server_info", "/get_server_info")
        model = await self._first("/model_info", "/get_model_info", needed=False)
        models = await self._first("/v1/models", needed=False)
        workers = await self._first("/workers", needed=False)
        return engine_info(self._transport.url, server=server, model=model, models=models, workers=workers)

    async def loads(self) -> EngineLoad:
        body = await self._first("/v1/loads", "/get_load", "/get_loads")
        load = engine_load(body)
        if load is None:
            raise InfraError(f"engine {self._transport.url}: tells no load (/v1/loads)")
        return load

    async def abort(self, rid: str) -> None:
        if not rid:
            raise ValueError("an abort needs a rid: every rid begins with the empty one")
        await self._abort({"rid": rid})

    async def abort_all(self) -> None:
        await self._abort({"rid": "", "abort_all": True})

    async def _abort(self, body: dict[str, Any]) -> None:
        async def attempt() -> bool:
            try:
                await self._transport.call("POST", "/abort_request", body=orjson.dumps(body), headers=_JSON)
            except AttemptError as error:
                if error.verdict.cause in _MISSING:
                    return False
                raise
            return True

        if not await self._run(attempt, "/abort_request"):
            raise InfraError(
                f"engine {self._transport.url}: has no /abort_request, as routers do not; "
                "send the abort to each engine behind it (`describe().workers`)"
            )

    async def flush_cache(self, *, wait: float) -> bool:
        query = f"?{urlencode({'timeout': wait})}" if wait else ""

        async def attempt() -> bool:
            try:
                await self._transport.call("POST", f"/flush_cache{query}")
            except AttemptError as error:
                if error.verdict.cause == "http_400":
                    return False
                raise
            return True

        return await self._run(attempt, "/flush_cache")

    async def healthy(self, within: float) -> bool:
        try:
            async with asyncio.timeout(within):
                await self._transport.call("GET", "/health")
        except (AttemptError, TimeoutError):
            return False
        return True

    async def _first(self, *paths: str, needed: bool = True) -> Any:
        """The JSON of the first path that the server has; None where it has none, or answers no JSON.

        Args:
            paths: the endpoint's names, newest first.
            needed: False takes any failure but a refused key for "has none", after one try.
        """
        for path in paths:
            attempt = partial(self._get, path, needed=needed)
            found, body = await self._run(attempt, path)
            if found:
                return body
        return None

    async def _get(self, path: str, *, needed: bool) -> tuple[bool, Any]:
        try:
            body = await self._transport.call("GET", path)
        except AttemptError as error:
            cause = error.verdict.cause
            if cause in _MISSING or cause == "http_400" or not (needed or cause in _REFUSED_KEY):
                return False, None
            raise
        try:
            return True, orjson.loads(body)
        except orjson.JSONDecodeError:
            return False, None
