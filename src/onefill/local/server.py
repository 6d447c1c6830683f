"""The HTTP server of the embedded engine: routes, life and death.

Invariants:
- The event loop never waits for the generation thread: whatever parks it runs in a worker thread.
- A handler whose client is gone is cancelled.
- SIGINT and SIGTERM end the process with status 0, whatever is running.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError

from onefill.errors import ConfigError, InfraError
from onefill.local import info
from onefill.local.config import ServeConfig
from onefill.local.engine import Engine
from onefill.local.generate import generate, health_probe, run_jobs
from onefill.local.metrics import HttpCounts, render
from onefill.local.wire import Malformed, Refusal, parse_body

__all__ = ["Server", "run"]

READY = "onefill-local is listening on"
_LARGEST_BODY = 512 * 1024 * 1024
_HEALTH_S = 20.0
_log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Body = TypeVar("Body", bound=BaseModel)


class _Abort(BaseModel):
    model_config = ConfigDict(extra="ignore")
    rid: str = ""
    abort_all: bool = False


class _Pause(BaseModel):
    model_config = ConfigDict(extra="ignore")
    mode: Literal["abort", "retract", "in_place"] = "abort"


class _Update(BaseModel):
    model_config = ConfigDict(extra="ignore")
    model_path: str
    load_format: str | None = None
    weight_version: str | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True
    keep_pause: bool = False


class Server:
    """The routes over one engine.

    Args:
        engine: what generates.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._counts = HttpCounts()
        self._started = time.time()

    def app(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=_LARGEST_BODY, middlewares=[self._outcome])
        both, post, get = ("GET", "POST"), ("POST",), ("GET",)
        for methods, path, handler in (
            (("POST", "PUT"), "/generate", self._generate),
            (post, "/abort_request", self._abort),
            (get, "/health", self._health),
            (get, "/health_generate", self._health_generate),
            (get, "/server_info", self._server_info),
            (get, "/get_server_info", self._server_info),
            (get, "/model_info", self._model_info),
            (get, "/get_model_info", self._model_info),
            (get, "/v1/loads", self._loads),
            (both, "/flush_cache", self._flush),
            (post, "/pause_generation", self._pause),
            (post, "/continue_generation", self._continue),
            (post, "/update_weights_from_disk", self._update),
            (get, "/metrics", self._metrics),
        ):
            for method in methods:
                app.router.add_route(method, path, handler)
        return app

    @web.middleware
    async def _outcome(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turns refusals into answers, and counts what was answered."""
        path = request.match_info.route.resource.canonical if request.match_info.route.resource else "other"
        try:
            response = await handler(request)
        except Refusal as refusal:
            response = _json(refusal.body(), refusal.status)
        except InfraError as error:
            response = _json({"error": {"message": str(error)}}, 503)
        except web.HTTPException as error:
            self._counts.add(path, error.status)
            raise
        except asyncio.CancelledError:
            self._counts.add(path, 499)  # the client closed the connection
            raise
        self._counts.add(path, response.status)
        return response

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        return await generate(request, self._engine)

    async def _abort(self, request: web.Request) -> web.Response:
        body = await _read(request, _Abort)
        if body.abort_all:
            self._engine.abort_all()
        elif body.rid:
            self._engine.abort_matching(body.rid)
        return web.Response()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.alive else 503)

    async def _health_generate(self, _: web.Request) -> web.Response:
        """Generates one token, unless the engine is busy already and so shows that it lives."""
        if self._engine.alive and self._engine.load()[0] and not self._engine.paused:
            return web.Response()
        try:
            async with asyncio.timeout(_HEALTH_S):
                await run_jobs(self._engine, health_probe())
        except (TimeoutError, Refusal):
            return web.Response(status=503)
        return web.Response()

    async def _server_info(self, _: web.Request) -> web.Response:
        return _json(info.server_info(self._engine, self._started))

    async def _model_info(self, _: web.Request) -> web.Response:
        return _json(info.model_info(self._engine))

    async def _loads(self, _: web.Request) -> web.Response:
        return _json(info.loads(self._engine))

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=render(self._counts, info.metrics(self._engine)), content_type="text/plain")

    async def _flush(self, request: web.Request) -> web.Response:
        try:
            timeout = float(request.query.get("timeout", "0"))
        except ValueError as error:
            raise Malformed(f"timeout: {error}") from error
        if await asyncio.to_thread(self._engine.flush_cache, max(0.0, timeout)):
            return web.Response(text="Cache flushed.\n")
        return web.Response(text="Flush cache failed. There are requests queued or running.\n", status=400)

    async def _pause(self, request: web.Request) -> web.Response:
        body = await _read(request, _Pause)
        await asyncio.to_thread(self._engine.pause, body.mode)
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, _: web.Request) -> web.Response:
        self._engine.resume()
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def _update(self, request: web.Request) -> web.Response:
        body = await _read(request, _Update)
        try:
            retracted = await asyncio.to_thread(
                self._engine.update_weights,
                body.model_path,
                version=body.weight_version,
                flush=body.flush_cache,
                abort=body.abort_all_requests,
                keep_pause=body.keep_pause,
            )
        except ConfigError as error:
            return _json({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        message = "Succeeded to update model weights."
        return _json({"success": True, "message": message, "num_paused_requests": retracted})


def _json(content: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(content), status=status, content_type="application/json")


async def _read(request: web.Request, kind: type[Body]) -> Body:
    try:
        return kind.model_validate(parse_body(await request.read()))
    except ValidationError as error:
        raise Malformed(str(error)) from error


def run(config: ServeConfig, listener: socket.socket) -> None:
    """Loads the engine and serves until SIGINT or SIGTERM. Blocks.

    Args:
        config: what to serve.
        listener: a bound socket that does not listen yet; closed at the end.

    Raises:
        ConfigError: the model cannot be loaded.
    """
    engine = Engine(config)
    try:
        asyncio.run(_serve(engine, listener, config.parent_pid))
    finally:
        engine.close()


async def _serve(engine: Engine, listener: socket.socket, parent: int) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    runner = web.AppRunner(Server(engine).app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        try:
            await web.SockSite(runner, listener, backlog=4096).start()
        except OSError as error:
            raise ConfigError(f"cannot listen on {listener.getsockname()}: {error}") from error
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"{READY} http://{shown}:{port}", file=sys.stderr, flush=True)
        await _until_stopped(stop, parent)
    finally:
        await runner.cleanup()


async def _until_stopped(stop: asyncio.Event, parent: int) -> None:
    """Waits for a signal, or for the parent process to be gone."""
    while not stop.is_set():
        if parent and os.getppid() != parent:
            _log.warning("the parent process %d is gone: stopping", parent)
            return
        try:
            async with asyncio.timeout(0.5):
                await stop.wait()
        except TimeoutError:
            continue
