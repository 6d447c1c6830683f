"""Requests, clients and sleeps for the engine tests."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from onefill.engine import Deadlines, EngineClient, RetryPolicy, open_session
from onefill.plan.request import Request
from onefill.types import SamplingParams, token_array


def make_request(n: int = 1, *, length: int = 5, max_new_tokens: int = 8, **fields: Any) -> Request:
    sampling = fields.pop("sampling", SamplingParams(max_new_tokens=max_new_tokens))
    defaults = {"id": "r-1", "group_id": "g", "samples": tuple(range(n)), "tokens": token_array(range(length))}
    return Request(**(defaults | {"sampling": sampling} | fields))


class Sleeps:
    """Stands in for asyncio.sleep: takes no time and remembers."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.waits.append(seconds)


class Clock:
    """Stands in for time.monotonic: moves only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def client_of(url: str, **options: Any) -> AsyncIterator[tuple[EngineClient, Sleeps]]:
    sleeps = Sleeps()
    options = {
        "policy": RetryPolicy(),
        "deadlines": Deadlines(total=5.0, control=5.0),
        "rng": random.Random(0),
        "sleep": sleeps,
    } | options
    async with open_session() as session:
        yield EngineClient(url, session=session, **options), sleeps
