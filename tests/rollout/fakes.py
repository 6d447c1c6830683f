"""An engine in memory that obeys a script, for faults and orders that HTTP cannot be made to show on cue."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from onefill.data.cursor import Cursor
from onefill.data.source import Item
from onefill.errors import DataError, OnefillError
from onefill.plan import Capabilities, Request, Strategy
from onefill.rollout import Dispatcher, Engine, Tally
from onefill.types import Completion, FinishReason, Group, Prompt, SamplingParams, Timing, VersionSpan, token_array

Step: TypeAlias = "OnefillError | FinishReason | list[FinishReason] | None"


@dataclass
class ScriptedClient:
    """Answers each request with the next step: an error, or a finish reason (for all, or one a sample)."""

    url: str = "http://one"
    script: list[Step] = field(default_factory=list)
    aborted_tokens: int = 2
    delay: float = 0.0
    gate: asyncio.Event | None = None
    requests: list[Request] = field(default_factory=list)
    cancelled: int = 0
    in_flight: int = 0
    peak: int = 0
    unique: Iterator[int] = field(default_factory=lambda: itertools.count(1000))

    async def generate(
        self, request: Request, *, on_first_token: Callable[[], None] | None = None
    ) -> list[Completion]:
        self.requests.append(request)
        step = self.script.pop(0) if self.script else FinishReason.STOP
        self.in_flight += request.n
        self.peak = max(self.peak, self.in_flight)
        try:
            await asyncio.sleep(self.delay)
            if isinstance(step, OnefillError):
                raise step
            if on_first_token:
                on_first_token()
            if self.gate:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= request.n
        reasons = step if isinstance(step, list) else [step or FinishReason.STOP] * request.n
        return [self._completion(request, reason, i) for i, reason in enumerate(reasons)]

    def _completion(self, request: Request, reason: FinishReason, i: int) -> Completion:
        size = self.aborted_tokens if reason is FinishReason.ABORT else min(4, request.sampling.max_new_tokens)
        prompt = int(request.tokens.size)
        return Completion(
            tokens=token_array([next(self.unique) for _ in range(size)]),
            logprobs=np.full(size, -0.5, dtype=np.float32),
            text="w " * size,
            finish_reason=reason,
            prompt_tokens=prompt,
            cached_tokens=prompt - 1 if request.n > 1 or i else 0,
            versions=(VersionSpan("v1", 0, size),) if size else (),
            engine=self.url,
            request_id=request.id,
            timing=Timing(0.0, 1.0),
        )


def an_engine(script: Sequence[Step] = (), url: str = "http://one", **client: object) -> Engine:
    return Engine(url=url, client=ScriptedClient(url=url, script=list(script), **client))  # type: ignore[arg-type]


def client_of(engine: Engine) -> ScriptedClient:
    assert isinstance(engine.client, ScriptedClient)
    return engine.client


async def no_wait(_: float) -> None:
    await asyncio.sleep(0)


def a_dispatcher(*engines: Engine, strategy: str = "native", tally: Tally | None = None) -> Dispatcher:
    counter = itertools.count()
    return Dispatcher(
        engines=engines,
        strategy=Strategy.parse(strategy),
        new_id=lambda: f"{next(counter):08x}",
        tally=tally if tally is not None else Tally(),
        sleep=no_wait,
    )


def a_prompt(id: str = "p", tokens: int = 100) -> Prompt:
    return Prompt(id=id, tokens=token_array(np.arange(tokens) + 1), label="42", metadata={"row": id})


def a_group(n: int = 4, prompt_tokens: int = 100, **sampling: object) -> Group:
    params = SamplingParams(**({"max_new_tokens": 8} | sampling))  # type: ignore[arg-type]
    return Group.of(a_prompt(tokens=prompt_tokens), n, params)


def items(count: int, bad: Sequence[int] = ()) -> Iterator[Item]:
    for i in range(count):
        cursor = Cursor(source="fake", row=i + 1)
        if i in bad:
            yield Item(cursor=cursor, error=DataError(f"data.jsonl line {i + 1}: prompt is empty"))
        else:
            yield Item(cursor=cursor, prompt=a_prompt(f"p{i}"))


NO_SHARING = Capabilities(prefix_cache=False)
