"""Sends the requests of one plan to one engine and applies what comes back.

Invariants:
- Completion i of a request goes to its sample i through `Sample.append`, whole requests at a time; nothing else
  changes a sample.
- An error of one request leaves its siblings alone; a cancellation, or a fault of ours, ends them all before it goes
  on. No request outlives its plan.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from onefill.errors import OnefillError
from onefill.plan import Capabilities, Plan, Request, Support
from onefill.rollout.budget import Permit, SampleBudget
from onefill.rollout.tally import Tally
from onefill.types import Completion, Group

__all__ = ["Engine", "Generates", "Sending"]

_BROKEN_AFTER = 3


class Generates(Protocol):
    """What the dispatcher needs of an engine client (`onefill.engine.EngineClient`)."""

    async def generate(
        self, request: Request, *, on_first_token: Callable[[], None] | None = None
    ) -> list[Completion]: ...


@dataclass(slots=True, eq=False)
class Engine:
    """One engine as the rollout sees it.

    Args:
        url: names it in errors.
        client: sends requests to it.
        capabilities: what it was seen to do.
        in_flight: samples that it is working on for us.
        broken_replies: native replies that broke the contract.
        avoid_until: it failed lately; until this time others come first.
    """

    url: str
    client: Generates
    capabilities: Capabilities = Capabilities()
    in_flight: int = 0
    broken_replies: int = 0
    avoid_until: float = float("-inf")

    def broke_the_contract(self) -> None:
        """Counts a broken native reply; after a few, native sampling is barred on this engine."""
        self.broken_replies += 1
        if self.broken_replies >= _BROKEN_AFTER:
            self.capabilities = replace(self.capabilities, parallel_sampling=Support.NO)


@dataclass(slots=True)
class Sending:
    """One plan on its way to one engine.

    Args:
        group: whose samples are filled.
        engine: where it goes.
        tally: the run's books.
        permit: what the group may have in flight; shrinks as samples finish.
    """

    group: Group
    engine: Engine
    tally: Tally
    permit: Permit

    async def run(self, planned: Plan, *, narrow: bool) -> list[OnefillError]:
        """Sends every request and applies every answer; returns the errors.

        Args:
            planned: the requests.
            narrow: the permit is smaller than the plan, so not all may be in flight at once.
        """
        requests = planned.requests
        if len(requests) == 1:
            error = await self._one(requests[0], None)
            return [error] if error else []
        # A group larger than the whole budget goes through a narrower one of its own.
        gate = SampleBudget(max(1, self.permit.held)) if narrow else None
        if len(planned.waves) == 1:
            return await self._together(requests, gate)
        (lead,), rest = planned.waves
        return await self._lead_then_rest(lead, rest, gate)

    async def _lead_then_rest(
        self, lead: Request, rest: Sequence[Request], gate: SampleBudget | None
    ) -> list[OnefillError]:
        """The rest leaves when the lead has its first token, which means that the prefix is cached."""
        first_token = asyncio.Event()
        leading = asyncio.ensure_future(self._one(lead, gate, first_token.set))
        leading.add_done_callback(lambda _: first_token.set())
        try:
            await first_token.wait()
            if leading.done() and (error := leading.result()):
                return [error]  # the rest would most likely meet the same; the next round decides for all
            errors = await self._together(rest, gate)
            error = await leading
            return [*errors, error] if error else errors
        finally:
            await _end([leading])

    async def _together(self, requests: Sequence[Request], gate: SampleBudget | None) -> list[OnefillError]:
        tasks = [asyncio.ensure_future(self._one(request, gate)) for request in requests]
        try:
            return [error for error in await asyncio.gather(*tasks) if error]
        finally:
            await _end(tasks)

    async def _one(
        self, request: Request, gate: SampleBudget | None, on_first_token: Callable[[], None] | None = None
    ) -> OnefillError | None:
        """Sends one request and applies its completions; returns the error, so that siblings go on."""
        permit = await gate.take(request.n) if gate else None
        try:
            completions = await self.engine.client.generate(request, on_first_token=on_first_token)
        except OnefillError as error:
            return error
        finally:
            if permit:
                permit.release()
        self._apply(request, completions)
        return None

    def _apply(self, request: Request, completions: Sequence[Completion]) -> None:
        if len(completions) != request.n:
            raise ValueError(f"request {request.id}: {len(completions)} completions for {request.n} samples")
        for index, completion in zip(request.samples, completions, strict=True):
            self.group.samples[index].append(completion)
        self.tally.answered(request, completions)
        self.permit.shrink_to(len(self.group.unfinished))


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancels what still runs and waits until it has ended."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
