"""Faults of the network and of HTTP, over real sockets."""

from __future__ import annotations

import asyncio
import random
import socket
from typing import Any

import pytest

from onefill.engine import Deadlines, EngineClient, RetryPolicy, open_session
from onefill.engine.codec import encode
from onefill.errors import ConfigError, DataError, InfraError, OnefillError
from tests.engine.scripted import ScriptedEngine, events, hang, raw, reply, reset, status, takes
from tests.engine.support import Clock, client_of, make_request


async def test_502_twice_then_good_is_retried_and_counted() -> None:
    script = [status(502), status(502), reply()]
    async with ScriptedEngine(script) as engine, client_of(engine.url) as (client, sleeps):
        assert len(await client.generate(make_request(4))) == 4
        assert len(engine.requests) == client.stats.requests_sent == 3
        assert client.stats.requests_retried == 2
        assert client.stats.retries_by_cause == {"http_502": 2}
        assert len(sleeps.waits) == 2
        assert engine.requests[0] == engine.requests[2]


async def test_503_for_ever_ends_in_an_infra_error_with_the_servers_words() -> None:
    policy = RetryPolicy(retries=3)
    script = [status(503, message="no_available_workers")]
    async with ScriptedEngine(script) as engine, client_of(engine.url, policy=policy) as (client, sleeps):
        with pytest.raises(InfraError, match=r"HTTP 503: no_available_workers \(tried 4 times\)"):
            await client.generate(make_request())
        assert len(engine.requests) == 4
        assert all(wait <= policy.cap for wait in sleeps.waits)
        assert client.stats.failures_by_cause == {"http_503": 1}


async def test_500_is_retried_a_bounded_few() -> None:
    async with ScriptedEngine([status(500)]) as engine, client_of(engine.url) as (client, _):
        with pytest.raises(InfraError, match="HTTP 500"):
            await client.generate(make_request())
        assert len(engine.requests) == 3


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (400, DataError),
        (413, DataError),
        (422, DataError),
        (401, ConfigError),
        (403, ConfigError),
        (404, ConfigError),
        (307, ConfigError),
        (409, InfraError),
    ],
)
async def test_note_21_a_refusal_fails_at_once_with_the_servers_words(code: int, error: type[OnefillError]) -> None:
    script = [status(code, message="because so")]
    async with ScriptedEngine(script) as engine, client_of(engine.url) as (client, sleeps):
        with pytest.raises(error, match=f"request r-1 of group g: HTTP {code}: because so"):
            await client.generate(make_request())
        assert len(engine.requests) == 1
        assert sleeps.waits == []


@pytest.mark.parametrize(
    "body",
    [
        b'{"error": "words"}',
        b'{"error": {"message": "words"}}',
        b'{"object": "error", "message": "words"}',
        b'{"detail": "words"}',
        b"words",
    ],
)
async def test_every_shape_of_error_shows_the_servers_words(body: bytes) -> None:
    async with ScriptedEngine([raw(body, code=400)]) as engine, client_of(engine.url) as (client, _):
        with pytest.raises(DataError, match="HTTP 400: words"):
            await client.generate(make_request())


@pytest.mark.parametrize(("header", "least", "most"), [("3", 3.0, 3.5), ("100000", 60.0, 60.5), ("x", 0.0, 0.5)])
async def test_429_waits_as_long_as_asked_but_not_longer_than_bounded(header: str, least: float, most: float) -> None:
    script = [status(429, retry_after=header), reply()]
    deadlines = Deadlines(total=600.0)
    async with ScriptedEngine(script) as engine, client_of(engine.url, deadlines=deadlines) as (client, sleeps):
        await client.generate(make_request())
        assert least <= sleeps.waits[0] <= most


async def test_a_hang_ends_at_the_deadline() -> None:
    async with ScriptedEngine([hang()]) as engine:
        async with client_of(engine.url, deadlines=Deadlines(total=0.2)) as (client, _):
            began = asyncio.get_running_loop().time()
            with pytest.raises(InfraError, match=r"no answer within 0.2 s"):
                await client.generate(make_request(4))
            assert asyncio.get_running_loop().time() - began < 2
        await _until(lambda: engine.cancelled == 1)


async def test_the_deadline_covers_the_waits_between_tries_too() -> None:
    async with ScriptedEngine([status(503)]) as engine:
        options = {
            "deadlines": Deadlines(total=0.3),
            "policy": RetryPolicy(retries=100, base=0.2),
            "sleep": asyncio.sleep,
        }
        async with client_of(engine.url, **options) as (client, _):
            with pytest.raises(InfraError, match="the last fault was HTTP 503"):
                await client.generate(make_request())


async def test_a_reset_in_the_body_is_retried() -> None:
    async with ScriptedEngine([reset(), reply()]) as engine, client_of(engine.url) as (client, _):
        assert len(await client.generate(make_request(4))) == 4
        assert client.stats.retries_by_cause == {"reset": 1}
    async with ScriptedEngine([reset()]) as engine, client_of(engine.url) as (client, _):
        with pytest.raises(InfraError, match="reset"):
            await client.generate(make_request(4))


async def test_a_long_generation_that_broke_off_is_retried_and_so_often_only() -> None:
    clock = Clock()
    script = [takes(601, reset(), clock), takes(601, reset(), clock), reply()]
    async with ScriptedEngine(script) as engine, client_of(engine.url, clock=clock) as (client, _):
        assert len(await client.generate(make_request(4))) == 4
        assert client.stats.retries_by_cause == {"reset": 2}
    async with ScriptedEngine([takes(601, reset(), clock)]) as engine:
        async with client_of(engine.url, clock=clock, policy=RetryPolicy(retries=3)) as (client, _):
            with pytest.raises(InfraError, match="tried 4 times"):
                await client.generate(make_request())


async def test_tries_that_got_nowhere_are_not_repeated_past_the_retry_deadline() -> None:
    clock = Clock()
    async with ScriptedEngine([takes(250, status(503), clock)]) as engine:
        async with client_of(engine.url, clock=clock) as (client, _):
            with pytest.raises(InfraError, match="HTTP 503"):
                await client.generate(make_request())
        assert len(engine.requests) == 3


async def test_waits_count_against_the_retry_deadline() -> None:
    async with ScriptedEngine([status(503, retry_after="60")]) as engine:
        async with client_of(engine.url, policy=RetryPolicy(deadline=150)) as (client, sleeps):
            with pytest.raises(InfraError, match="HTTP 503"):
                await client.generate(make_request())
        assert len(sleeps.waits) == 2


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="the platform names its options otherwise")
async def test_a_connection_probes_a_silent_peer() -> None:
    async with ScriptedEngine([events()]) as engine, open_session() as session:
        body = encode(make_request(stream=True))
        async with session.post(engine.url + "/generate", data=body) as response:
            assert response.connection is not None and response.connection.transport is not None
            live = response.connection.transport.get_extra_info("socket")
            options = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
            assert live.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert [live.getsockopt(socket.IPPROTO_TCP, getattr(socket, o)) for o in options] == [30, 10, 6]


async def test_a_platform_without_keepalive_settings_still_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TCP_KEEPIDLE", "TCP_KEEPALIVE", "TCP_KEEPINTVL"):
        monkeypatch.delattr(socket, name, raising=False)
    monkeypatch.setattr(socket, "TCP_KEEPCNT", 1 << 20, raising=False)  # no such option in any kernel
    async with ScriptedEngine([reply()]) as engine, client_of(engine.url) as (client, _):
        assert len(await client.generate(make_request())) == 1


async def test_a_connection_that_is_not_made_in_time_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: Any) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", never)
    options = {"policy": RetryPolicy(retries=1), "deadlines": Deadlines(connect=0.05)}
    async with client_of("http://127.0.0.1:9", **options) as (client, _):
        with pytest.raises(InfraError, match="timeout"):
            await client.generate(make_request())
        assert client.stats.requests_sent == 0
        assert client.stats.retries_by_cause == {"timeout": 1}


async def test_a_refused_connection_is_an_infra_error_and_sends_nothing() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    async with client_of(url, policy=RetryPolicy(retries=2)) as (client, _):
        with pytest.raises(InfraError, match="connection"):
            await client.generate(make_request())
        assert client.stats.requests_sent == 0
        assert client.stats.retries_by_cause == {"connection": 2}


async def test_cancelling_closes_the_connection_and_is_not_swallowed() -> None:
    async with ScriptedEngine([hang()]) as engine, client_of(engine.url) as (client, _):
        task = asyncio.create_task(client.generate(make_request(4)))
        await _until(lambda: len(engine.requests) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await _until(lambda: engine.cancelled == 1)


async def test_cancelling_while_waiting_to_retry_is_not_swallowed() -> None:
    async with ScriptedEngine([status(503, retry_after="50")]) as engine:
        options = {"sleep": asyncio.sleep, "deadlines": Deadlines(total=600)}
        async with client_of(engine.url, **options) as (client, _):
            task = asyncio.create_task(client.generate(make_request()))
            await _until(lambda: client.stats.requests_retried == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(engine.requests) == 1


async def test_connections_are_reused_and_many_may_be_open() -> None:
    async with ScriptedEngine([reply()]) as engine, client_of(engine.url) as (client, _):
        for _ in range(5):
            await client.generate(make_request())
        assert len(engine.peers) == 1
    async with ScriptedEngine([hang(0.3)]) as engine, client_of(engine.url) as (client, _):
        await asyncio.gather(*(client.generate(make_request()) for _ in range(150)))
        assert len(engine.peers) == 150


async def test_proxies_in_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with ScriptedEngine([reply()]) as engine, client_of(engine.url) as (client, sleeps):
        assert len(await client.generate(make_request())) == 1
        assert sleeps.waits == []


@pytest.mark.parametrize("url", ["localhost:30000", "ftp://x", "http://", "/a"])
async def test_an_address_that_is_none_is_a_config_error(url: str) -> None:
    async with open_session() as session:
        with pytest.raises(ConfigError, match="http://HOST:PORT"):
            EngineClient(url, session=session, rng=random.Random(0))


async def test_the_api_key_goes_along() -> None:
    async with ScriptedEngine([reply()]) as engine, open_session(api_key="k") as session:
        await EngineClient(engine.url + "/", session=session, rng=random.Random(0)).generate(make_request())
        assert engine.headers[0]["Authorization"] == "Bearer k"


async def _until(true: Any) -> None:
    async with asyncio.timeout(5):
        while not true():
            await asyncio.sleep(0.01)
