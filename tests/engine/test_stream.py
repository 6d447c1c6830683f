"""Streams over real HTTP: the first token is seen, and only a whole stream has a result."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from onefill.engine.stream import Events
from onefill.errors import DataError, InfraError, ProtocolError
from onefill.types import Completion
from tests.engine.scripted import ScriptedEngine, events, raw, reply, reset
from tests.engine.support import client_of, make_request


def data(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


async def streamed(*script: Any, n: int = 1, seen: list[int] | None = None) -> list[Completion]:
    async with ScriptedEngine(script) as engine, client_of(engine.url) as (client, _):
        mark = (lambda: seen.append(1)) if seen is not None else None
        return await client.generate(make_request(n, stream=True), on_first_token=mark)


@pytest.mark.parametrize("n", [1, 4])
async def test_a_stream_gives_what_the_plain_reply_gives(n: int) -> None:
    async with ScriptedEngine([reply()]) as engine, client_of(engine.url) as (client, _):
        plain = await client.generate(make_request(n))
    seen: list[int] = []
    done = await streamed(events(), n=n, seen=seen)
    assert [c.tokens.tolist() for c in done] == [c.tokens.tolist() for c in plain]
    assert [c.logprobs.tolist() for c in done] == [c.logprobs.tolist() for c in plain]
    assert [c.text for c in done] == [c.text for c in plain]
    assert seen == [1]


async def test_the_first_token_is_seen_before_the_end() -> None:
    order: list[str] = []
    async with ScriptedEngine([events()]) as engine, client_of(engine.url) as (client, _):
        ask = make_request(stream=True)
        await client.generate(ask, on_first_token=lambda: order.append("first"))
        order.append("done")
        assert engine.requests[0]["stream"] is True
        assert engine.requests[0]["sampling_params"]["stream_interval"] > 100_000
    assert order == ["first", "done"]


@pytest.mark.parametrize("size", [1, 7, 100])
async def test_a_stream_may_be_cut_into_any_pieces(size: int) -> None:
    def slice_up(chunks: list[bytes]) -> list[bytes]:
        whole = b": comment\n\nevent: x\n" + b"".join(chunks).replace(b"\n", b"\r\n")
        pieces = max(len(whole) // 20, size)
        return [whole[at : at + pieces] for at in range(0, len(whole), pieces)]

    assert len(await streamed(events(edit=slice_up), n=2)) == 2


def test_events_come_out_whole_byte_by_byte() -> None:
    cutter, found = Events(), []
    for byte in b"data: a\ndata: b\n\n: note\n\ndata:c\r\n\r\ndata: rest":
        found += list(cutter.feed(bytes([byte])))
    assert found == [b"a\nb", b"c"]


async def test_note_47_a_stream_without_its_end_is_never_a_response() -> None:
    for edit in (lambda c: c[:-1], lambda c: c[:1], lambda c: [*c[:-2], c[-2][:30]], lambda _: []):
        with pytest.raises(InfraError, match=r"without \[DONE\]"):
            await streamed(events(edit=edit))
    with pytest.raises(InfraError):
        await streamed(events(edit=lambda c: c[:-1], reset_after=True))


async def test_nothing_is_waited_for_after_the_end_of_a_stream() -> None:
    script = [events(held_open=3600), events()]
    async with ScriptedEngine(script) as engine, client_of(engine.url) as (client, _):
        async with asyncio.timeout(2):
            assert len(await client.generate(make_request(4, stream=True))) == 4
            while not engine.cancelled:  # the body is not over: that connection can only be closed
                await asyncio.sleep(0.01)
            assert len(await client.generate(make_request(4, stream=True))) == 4
        assert len(engine.peers) == 2
        assert client.stats.requests_retried == 0


async def test_a_connection_that_breaks_after_the_end_of_a_stream_spoils_nothing() -> None:
    script = [events(held_open=0.05, reset_after=True), reply()]
    async with ScriptedEngine(script) as engine, client_of(engine.url) as (client, _):
        assert len(await client.generate(make_request(2, stream=True))) == 2
        assert len(await client.generate(make_request(2))) == 2
        assert client.stats.requests_retried == 0


@pytest.mark.parametrize("behaviour", [events(), events(held_open=0.02)])
async def test_the_connection_of_a_whole_stream_is_reused(behaviour: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onefill.engine.transport._END_S", 5.0)
    async with ScriptedEngine([behaviour]) as engine, client_of(engine.url) as (client, _):
        for _ in range(3):
            await client.generate(make_request(2, stream=True))
        assert len(engine.peers) == 1


async def test_a_stream_that_is_cut_is_tried_again_and_its_first_token_announced_once() -> None:
    seen: list[int] = []
    cut_off = events(edit=lambda c: c[:-1], reset_after=True)
    async with ScriptedEngine([cut_off, reset(), events()]) as engine, client_of(engine.url) as (client, _):
        done = await client.generate(make_request(stream=True), on_first_token=lambda: seen.append(1))
        assert client.stats.requests_retried == 2
    assert len(done) == 1
    assert seen == [1]


async def test_note_47_a_mixed_or_unfinished_stream_is_refused() -> None:
    with pytest.raises(ProtocolError, match="finish_reason"):
        await streamed(events(edit=lambda c: [c[0], c[-1]]))
    with pytest.raises(ProtocolError, match="asked for 4 samples, got 3"):
        await streamed(events(edit=lambda c: [*c[:3], *c[5:]]), n=4)
    with pytest.raises(ProtocolError, match="mixed"):
        await streamed(events(edit=lambda c: [c[2], c[0], *c[2:]]), n=2)
    with pytest.raises(ProtocolError, match="index"):
        await streamed(events(edit=lambda c: [c[0].replace(b'"index": 0', b'"index": 7'), *c[1:]]))
    with pytest.raises(ProtocolError, match="not JSON"):
        await streamed(events(edit=lambda c: [b"data: {oops\n\n", *c]))
    with pytest.raises(ProtocolError, match="must hold an object"):
        await streamed(events(edit=lambda c: [data([1]), *c]))
    with pytest.raises(ProtocolError, match="asked for 1 samples, got 0"):
        await streamed(events(edit=lambda c: [c[-1]]))


async def test_an_error_in_a_stream_counts_as_its_status() -> None:
    bad = {"error": {"message": "too long", "type": "invalid_request_error", "code": 400}}
    for edit in (lambda _: [data(bad)], lambda c: [c[0], data(bad), c[-1]], lambda c: [c[0], c[0], data(bad)]):
        with pytest.raises(DataError, match="too long"):
            await streamed(events(edit=edit))
    busy = events(edit=lambda c: [data({"error": {"message": "busy", "code": 503}}), c[-1]])
    assert len(await streamed(busy, events())) == 1
    with pytest.raises(ProtocolError, match="odd"):
        await streamed(events(edit=lambda c: [data({"error": "odd"}), c[-1]]))


async def test_an_error_first_is_no_first_token() -> None:
    seen: list[int] = []
    with pytest.raises(ProtocolError):
        await streamed(events(edit=lambda c: [data({"error": "odd"}), c[-1]]), seen=seen)
    assert seen == []


async def test_pieces_that_are_not_cumulative_are_refused() -> None:
    def only_new(chunks: list[bytes]) -> list[bytes]:
        last = json.loads(chunks[1][6:])
        last["output_ids"] = last["output_ids"][1:]
        return [chunks[0], data(last), chunks[2]]

    with pytest.raises(ProtocolError, match="completion_tokens"):
        await streamed(events(edit=only_new))


async def test_a_server_that_answers_a_stream_request_with_json_is_understood() -> None:
    seen: list[int] = []
    assert len(await streamed(reply(), seen=seen)) == 1
    assert seen == [1]
    with pytest.raises(ProtocolError, match="text/html"):
        await streamed(raw(b"<html>", content_type="text/html"))
