"""A scripted engine: a real HTTP server on loopback that misbehaves on command.

    async with ScriptedEngine([status(502), reply()]) as engine:
        ...  # engine.url; engine.requests holds what arrived; the last behaviour repeats for ever

A behaviour is an async function of (aiohttp request, parsed body) that answers. `reply()` answers correctly;
`edited(change)` answers correctly but for what `change` did to the reply.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeAlias

from aiohttp import web

Body: TypeAlias = dict[str, Any]
Behaviour: TypeAlias = Callable[[web.Request, Body], Awaitable[web.StreamResponse]]


def item(index: int, body: Body, *, tokens: int | None = None) -> dict[str, Any]:
    """One correct item in the shape of SGLang 0.5.23; ids and logprobs differ from child to child."""
    prompt = len(body["input_ids"])
    count = tokens if tokens is not None else min(int(body["sampling_params"]["max_new_tokens"]), 4)
    ids = [index * 10 + step for step in range(count)]
    whole = count == body["sampling_params"]["max_new_tokens"]
    return {
        "text": f"sample {index}" if count else "",
        "output_ids": ids,
        "meta_info": {
            "id": body["rid"] if body["sampling_params"].get("n", 1) == 1 else f"child-{index}",
            "finish_reason": {"type": "length", "length": count} if whole else {"type": "stop", "matched": 2},
            "prompt_tokens": prompt,
            "weight_version": "default",
            "num_retractions": 0,
            "input_token_logprobs": [],
            "output_token_logprobs": [[-0.5 - token / 100, token, None] for token in ids],
            "output_token_logprobs_length": count,
            "completion_tokens": count,
            "cached_tokens": prompt - 1,
            "weight_versions": [{"version": "default", "start": 0, "end": count}],
            "e2e_latency": 0.01,
        },
    }


def correct(body: Body) -> Any:
    """The whole correct reply to `body`: an object, or for n > 1 a list."""
    n = body["sampling_params"].get("n", 1)
    return item(0, body) if n == 1 else [item(index, body) for index in range(n)]


def reply() -> Behaviour:
    return edited(lambda answer: answer)


def edited(change: Callable[[Any], Any]) -> Behaviour:
    """Answers with `change(correct reply)`; a change in place may return None."""

    async def behave(_: web.Request, body: Body) -> web.StreamResponse:
        answer = correct(body)
        changed = change(answer)
        return web.json_response(answer if changed is None else changed)

    return behave


def raw(data: bytes, *, content_type: str = "application/json", code: int = 200) -> Behaviour:
    async def behave(_: web.Request, __: Body) -> web.StreamResponse:
        return web.Response(body=data, status=code, content_type=content_type)

    return behave


def says(value: Any) -> Behaviour:
    """Answers with `value` as JSON."""
    return raw(json.dumps(value).encode())


def status(code: int, *, message: str = "scripted", retry_after: str | None = None) -> Behaviour:
    async def behave(_: web.Request, __: Body) -> web.StreamResponse:
        headers = {"Retry-After": retry_after} if retry_after is not None else None
        return web.json_response({"error": {"message": message}}, status=code, headers=headers)

    return behave


def hang(seconds: float = 3600.0) -> Behaviour:
    async def behave(_: web.Request, body: Body) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return web.json_response(correct(body))

    return behave


def slow(seconds: float) -> Behaviour:
    return hang(seconds)


def takes(seconds: float, behaviour: Behaviour, clock: Any) -> Behaviour:
    """`behaviour` after `seconds` of generating, by a clock of the test's."""

    async def behave(request: web.Request, body: Body) -> web.StreamResponse:
        clock.now += seconds
        return await behaviour(request, body)

    return behave


def reset(*, after: int = 40) -> Behaviour:
    """Sends the head and `after` bytes of a correct reply, then drops the connection."""

    async def behave(request: web.Request, body: Body) -> web.StreamResponse:
        data = json.dumps(correct(body)).encode()
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = len(data)
        await response.prepare(request)
        await response.write(data[:after])
        assert request.transport is not None
        request.transport.abort()
        return response

    return behave


def events(
    *,
    edit: Callable[[list[bytes]], list[bytes]] | None = None,
    reset_after: bool = False,
    held_open: float = 0.0,
) -> Behaviour:
    """A stream: first tokens, whole items, [DONE]; `edit` changes the list of chunks of bytes.

    Args:
        edit: what to do to the chunks.
        reset_after: drop the connection behind the last one.
        held_open: seconds before the body's end is sent.
    """

    async def behave(request: web.Request, body: Body) -> web.StreamResponse:
        n = body["sampling_params"].get("n", 1)
        chunks: list[bytes] = []
        for index in range(n):
            first = item(index, body, tokens=1) | {"index": index}
            first["meta_info"]["finish_reason"] = None
            chunks.append(b"data: " + json.dumps(first).encode() + b"\n\n")
        for index in reversed(range(n)):
            last = item(index, body) | {"index": index}
            chunks.append(b"data: " + json.dumps(last).encode() + b"\n\n")
        chunks.append(b"data: [DONE]\n\n")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for chunk in edit(chunks) if edit is not None else chunks:
            await response.write(chunk)
            await asyncio.sleep(0.005)
        await asyncio.sleep(held_open)
        if reset_after:
            assert request.transport is not None
            request.transport.abort()
        return response

    return behave


@dataclass(eq=False)
class ScriptedEngine:
    """Answers the k-th `/generate` with the k-th behaviour; the last one answers all that follow.

    Args:
        script: behaviours of `/generate`, in order.
        routes: other paths, as "METHOD /path" -> behaviour.
    """

    script: Sequence[Behaviour]
    routes: dict[str, Behaviour] = field(default_factory=dict)
    requests: list[Body] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    peers: set[Any] = field(default_factory=set)
    cancelled: int = 0
    url: str = ""

    async def __aenter__(self) -> ScriptedEngine:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = "http://{}:{}".format(*self._runner.addresses[0][:2])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.calls.append(f"{request.method} {request.path}")
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
        data = await request.read()
        body: Body = json.loads(data) if data else {}
        if request.path != "/generate":
            behaviour = self.routes.get(f"{request.method} {request.path}")
            if behaviour is None:
                return web.json_response({"detail": "Not Found"}, status=404)
            return await behaviour(request, body)
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        behaviour = self.script[min(len(self.requests), len(self.script)) - 1]
        try:
            return await behaviour(request, body)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
