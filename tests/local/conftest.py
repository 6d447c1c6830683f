"""One server with the `tiny` model for the whole session, in a thread of its own; real HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import aiohttp
import orjson
import pytest
from aiohttp import web

from onefill.local.config import ServeConfig
from onefill.local.engine import Engine
from onefill.local.server import Server


class Served:
    """A server in a thread: its URL, and its engine for a look behind the curtain."""

    def __init__(self, config: ServeConfig) -> None:
        self.engine = Engine(config)
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop: asyncio.Event = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    async def _serve(self) -> None:
        runner = web.AppRunner(Server(self.engine).app(), handler_cancellation=True, shutdown_timeout=0.2)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        self.engine.close()


@contextmanager
def serving(**changes: object) -> Iterator[Served]:
    served = Served(ServeConfig(**{"model": "tiny", "threads": 1, "seed": 7, **changes}))
    try:
        yield served
    finally:
        served.close()


class Client:
    """Speaks to one server."""

    def __init__(self, session: aiohttp.ClientSession, served: Served) -> None:
        self.session = session
        self.url = served.url
        self.engine = served.engine

    async def post(self, path: str, body: object = None, want: int = 200) -> object:
        async with self.session.post(self.url + path, json=body) as response:
            kind = response.headers.get("Content-Type", "")
            answer = await response.json() if "json" in kind else await response.text()
            assert response.status == want, answer
            return answer

    async def get(self, path: str, want: int = 200) -> object:
        async with self.session.get(self.url + path) as response:
            kind = response.headers.get("Content-Type", "")
            answer = await response.json() if "json" in kind else await response.text()
            assert response.status == want, answer
            return answer

    async def ask(self, prompt: object, want: int = 200, **params: object):
        top = {k: params.pop(k) for k in list(params) if k in TOP_LEVEL}
        body = {"text" if _texty(prompt) else "input_ids": prompt, "sampling_params": params, **top}
        return await self.post("/generate", body, want)

    async def stream(self, prompt: list[int], **params: object) -> list[dict]:
        top = {k: params.pop(k) for k in list(params) if k in TOP_LEVEL}
        body = {"input_ids": prompt, "sampling_params": params, "stream": True, **top}
        async with self.session.post(self.url + "/generate", json=body) as response:
            assert response.status == 200
            assert response.headers["Content-Type"].startswith("text/event-stream")
            text = (await response.read()).decode()
        events = [e for e in text.split("\n\n") if e]
        assert events[-1] == "data: [DONE]"
        return [orjson.loads(e.removeprefix("data: ")) for e in events[:-1]]

    async def until(self, running: int, waiting: int = 0, within: float = 3.0) -> None:
        """Waits until the engine reads this load."""
        for _ in range(int(within / 0.01)):
            if self.engine.load() == (running, waiting):
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"load is {self.engine.load()}, not {(running, waiting)}")

    async def until_any(self) -> None:
        """Waits until the engine holds anything."""
        while not self.engine.live:
            await asyncio.sleep(0.001)

    async def metric(self, name: str) -> float:
        page = await self.get("/metrics")
        (line,) = [row for row in str(page).splitlines() if row.startswith(name + " ")]
        return float(line.split()[-1])


TOP_LEVEL = (
    "rid",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_text_in_logprobs",
    "image_data",
)


def _texty(prompt: object) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str))


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    with serving() as one:
        yield one


@pytest.fixture
async def client(served: Served) -> AsyncIterator[Client]:
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield Client(session, served)
    served.engine.resume()
    served.engine.abort_all()
    assert served.engine.wait_idle(5)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as one:
        yield one
