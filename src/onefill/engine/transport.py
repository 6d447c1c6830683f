"""One HTTP call to one engine: sent, read whole, and either a reply or an `AttemptError`.

Invariants:
- A call has an end: connecting and every silence of a stream are timed here, the whole by `EngineClient`.
- A call that is cancelled, or fails half way, closes its connection. That takes its samples off the engine
  (SGLang 0.5.23: all children of n = 4 gone within 2 s), which `/abort_request` with the parent's rid does not.
- Nothing of the environment reaches it: no proxy, no netrc.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from onefill.engine.retry import AttemptError, Budget, Verdict, classify
from onefill.errors import ConfigError, InfraError

__all__ = ["Deadlines", "Transport", "base_url", "cut", "open_session"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Longest waits, in seconds. All are finite.

    Args:
        connect: for a connection to be made.
        total: for one `generate`, all its tries and waits together.
        between_bytes: for the next byte of a stream. Between its first token and its last item a stream is
            silent for the whole generation, so this is no smaller than a long response takes.
        control: for one control call, with its retries.

    Raises:
        ValueError: one is not above 0 and finite.
    """

    connect: float = 10.0
    total: float = 1800.0
    between_bytes: float = 1800.0
    control: float = 30.0

    def __post_init__(self) -> None:
        for name in ("connect", "total", "between_bytes", "control"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"deadline {name} must be above 0 and finite, got {getattr(self, name)!r}")


def open_session(*, api_key: str | None = None, headers: Mapping[str, str] | None = None) -> aiohttp.ClientSession:
    """A session for any number of engines; the caller closes it.

    Connections are reused and not limited (concurrency is bounded by whoever sends). An idle one is dropped
    after 4 s: SGLang 0.5.23 closes it after 5 s, and a request sent into a closing connection is lost.

    Args:
        api_key: sent as a bearer token.
        headers: sent with every call.
    """
    sent = dict(headers or {})
    if api_key is not None:
        sent["Authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=4.0, ttl_dns_cache=60),
        timeout=aiohttp.ClientTimeout(total=None),
        trust_env=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        json_serialize=lambda value: orjson.dumps(value).decode(),
        headers=sent,
    )


def base_url(url: str) -> str:
    """`url` without its trailing slash. Raises ConfigError where it is no http(s) address."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"engine {url!r} is no address: give it as http://HOST:PORT")
    return url.rstrip("/")


class Transport:
    """Makes calls to one base URL.

    Args:
        url: base URL of the engine.
        session: from `open_session`.
        deadlines: `connect` and `between_bytes` are used here.
    """

    def __init__(self, *, url: str, session: aiohttp.ClientSession, deadlines: Deadlines) -> None:
        self.url = url
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=deadlines.connect)
        self._stream_timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=deadlines.connect, sock_read=deadlines.between_bytes
        )

    @asynccontextmanager
    async def open(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        stream: bool = False,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answered call with status 200, whose body may now be read.

        Raises:
            AttemptError: no connection, a lost one, a timeout, or any other status, with the server's words.
        """
        response: aiohttp.ClientResponse | None = None
        try:
            response = await self._session.request(
                method,
                self.url + path,
                data=body,
                headers=headers,
                timeout=self._stream_timeout if stream else self._timeout,
                allow_redirects=False,
            )
            if response.status != 200:
                raise _refusal(response, await response.read())
            yield response
            response.release()
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            raise _failure(error) from error
        finally:
            if response is not None:
                response.close()  # does nothing after `release`, else the engine sees us go

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """The whole body of a 200 answer. Raises AttemptError like `open`."""
        async with self.open(method, path, body=body, headers=headers) as response:
            return await response.read()


def _failure(error: aiohttp.ClientError | OSError) -> AttemptError:
    verdict = classify(error)
    words = str(error) or type(error).__name__
    return AttemptError(
        f"{verdict.cause}: {words}", verdict=verdict, left=not isinstance(error, aiohttp.ClientConnectorError)
    )


def _refusal(response: aiohttp.ClientResponse, body: bytes) -> AttemptError:
    verdict = classify(response.status)
    words = server_words(body) or response.reason or "no message"
    return AttemptError(
        f"HTTP {response.status}: {words}",
        verdict=verdict,
        retry_after=_seconds(response.headers.get("Retry-After")) if verdict.budget is not Budget.NEVER else None,
    )


def server_words(body: bytes) -> str:
    """The message of an error body: SGLang's three shapes, FastAPI's `detail`, or the text as it is."""
    try:
        said: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return " ".join(body[:300].decode(errors="replace").split())
    for key in ("error", "message", "detail"):
        if isinstance(said, dict) and said.get(key):
            said = said[key]
    return (said if isinstance(said, str) else orjson.dumps(said).decode())[:500]


def _seconds(header: str | None) -> float | None:
    """`Retry-After` in seconds; its date form is left out (no engine sends it, and clocks differ)."""
    try:
        seconds = float(header) if header is not None else None
    except ValueError:
        return None
    return seconds if seconds is not None and 0 <= seconds < float("inf") else None


def cut(what: str) -> AttemptError:
    """A reply that stopped before its end: the same as a connection lost half way."""
    return AttemptError(f"reset: {what}", verdict=Verdict("reset", Budget.TRANSIENT, InfraError))
