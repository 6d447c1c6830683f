"""One HTTP call to one engine: sent, read whole, and either a reply or an `AttemptError`.

Invariants:
- A call has an end: connecting and every silence of a stream are timed here, the whole by `EngineClient`. A peer
  that vanished without a word is noticed by TCP keepalive, within 90 s.
- A call that is cancelled, or fails half way, closes its connection. That takes its samples off the engine
  (SGLang 0.5.23: all children of n = 4 gone within 2 s), which `/abort_request` with the parent's rid does not.
- Nothing of the environment reaches it: no proxy, no netrc.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from onefill.engine.retry import AttemptError, Budget, Verdict, classify
from onefill.errors import ConfigError, InfraError

__all__ = ["Deadlines", "Transport", "base_url", "cut", "open_session", "read_end"]

_END_S = 0.1
_KEEPALIVE = (  # seconds idle (the second name is macOS's), seconds between probes, probes
    ("TCP_KEEPIDLE", 30),
    ("TCP_KEEPALIVE", 30),
    ("TCP_KEEPINTVL", 10),
    ("TCP_KEEPCNT", 6),
)


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
    after 4 s: SGLang 0.5.23 closes it after 5 s, and a request sent into a closing connection is lost. TCP
    keepalive is on: a reply comes after minutes of silence, in which a dead host looks like a busy one.

    Args:
        api_key: sent as a bearer token.
        headers: sent with every call.
    """
    sent = dict(headers or {})
    if api_key is not None:
        sent["Authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0, limit_per_host=0, keepalive_timeout=4.0, ttl_dns_cache=60, socket_factory=_socket
        ),
        timeout=aiohttp.ClientTimeout(total=None),
        trust_env=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        json_serialize=lambda value: orjson.dumps(value).decode(),
        headers=sent,
    )


def _socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket for one resolved address, with TCP keepalive as far as the platform lets it be set."""
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        option = getattr(socket, name, None)
        if option is not None:
            with suppress(OSError):  # known to Python, not to this kernel
                made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


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

    async def reply(
        self, method: str, path: str, *, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[str, bytes]:
        """Content type and whole body of a call answered with status 200.

        Raises:
            AttemptError: no connection, a lost one, a timeout, or any other status, with the server's words.
        """
        response: aiohttp.ClientResponse | None = None
        try:
            response = await self._send(method, path, body, headers, self._timeout)
            return response.content_type, await response.read()
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            raise _failure(error) from error
        finally:
            if response is not None:
                response.close()  # does nothing to a connection whose reply was read, else the engine sees us go

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, *, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answered call with status 200, whose body may now be read. Raises AttemptError like `reply`."""
        response: aiohttp.ClientResponse | None = None
        try:
            response = await self._send(method, path, body, headers, self._stream_timeout)
            yield response
            response.release()  # reuses the connection if the body was read to its end, else closes it
        except (aiohttp.ClientError, OSError) as error:
            raise _failure(error) from error
        finally:
            if response is not None:
                response.close()

    async def call(
        self, method: str, path: str, *, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> bytes:
        """The whole body of a 200 answer. Raises AttemptError like `reply`."""
        return (await self.reply(method, path, body=body, headers=headers))[1]

    async def _send(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str] | None,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - not a deadline of ours, but aiohttp's settings
    ) -> aiohttp.ClientResponse:
        response = await self._session.request(
            method, self.url + path, data=body, headers=headers, timeout=timeout, allow_redirects=False
        )
        if response.status == 200:
            return response
        try:
            raise _refusal(response, await response.read())
        finally:
            response.close()


async def read_end(response: aiohttp.ClientResponse) -> None:
    """Waits a moment for the end of a body that needs no more reading, so that its connection can be reused.

    A server that keeps the body open, or breaks it off now, spoils nothing: the connection is then closed.
    """
    with suppress(aiohttp.ClientError, OSError):
        async with asyncio.timeout(_END_S):
            await response.content.readany()


def _failure(error: aiohttp.ClientError | OSError) -> AttemptError:
    verdict = classify(error)
    words = str(error) or type(error).__name__
    unconnected = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
    return AttemptError(f"{verdict.cause}: {words}", verdict=verdict, left=not unconnected)


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
