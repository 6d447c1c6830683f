"""Brings one group to its end: plan, send, apply, and what to do when that fails.

Invariants:
- The plan decides the form; from there on there is one path. Completion i of a request goes to its sample i
  through `Sample.append`, whole requests at a time, and nothing else changes a sample.
- Every failure has one outcome, by its kind: `ProtocolError` of a request for several samples sends the group's
  unfinished samples singly, once; `InfraError` (after the engine client's own retries) sends them to another
  engine; aborted samples go on from their tokens; anything else fails the group.
- The number of rounds is bounded; samples that finished in an earlier round stay finished.
- Cancelling a group cancels its requests, which drops their connections, which frees the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from onefill.errors import DataError, InfraError, OnefillError, ProtocolError
from onefill.plan import Capabilities, Context, Form, Plan, Request, Strategy, Support, plan
from onefill.rollout.budget import Permit, SampleBudget
from onefill.rollout.tally import Tally
from onefill.types import Completion, Group, Status

__all__ = ["Dispatcher", "Engine", "Generates"]

_BROKEN_AFTER = 3
_MOST_ABORTS = 3


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
    """

    url: str
    client: Generates
    capabilities: Capabilities = Capabilities()
    in_flight: int = 0
    broken_replies: int = 0

    def broke_the_contract(self) -> None:
        """Counts a broken native reply; after a few, native sampling is barred on this engine."""
        self.broken_replies += 1
        if self.broken_replies >= _BROKEN_AFTER:
            self.capabilities = replace(self.capabilities, parallel_sampling=Support.NO)


class Dispatcher:
    """Sends groups to engines until they are complete.

    Args:
        engines: at least one; a group goes to the one with the fewest samples in flight.
        strategy: what the user asked for.
        new_id: prefix-free request ids.
        tally: the run's books.
        group_reward: a group reward is configured.
        group_reward_required: see `plan.Context`.
    """

    def __init__(
        self,
        *,
        engines: Sequence[Engine],
        strategy: Strategy,
        new_id: Callable[[], str],
        tally: Tally,
        group_reward: bool = False,
        group_reward_required: bool = False,
    ) -> None:
        if not engines:
            raise ValueError("a dispatcher needs at least one engine")
        self._engines = list(engines)
        self._strategy = strategy
        self._new_id = new_id
        self._tally = tally
        self._group_reward = group_reward
        self._group_reward_required = group_reward_required

    async def complete(self, group: Group, permit: Permit) -> None:
        """Fills every sample of `group`.

        Args:
            group: with token ids in its prompt.
            permit: what it may have in flight; shrinks as its samples finish.

        Raises:
            OnefillError: the group cannot be completed. Finished samples keep what they have, the others too.
        """
        attempt = _Attempt(strategy=self._strategy)
        while group.unfinished:
            engine = self._place(attempt.left_out)
            planned = self._plan(group, engine, attempt)
            errors = await self._send(group, engine, planned, permit)
            self._settle(group, engine, planned, errors, attempt)

    def _place(self, left_out: set[str]) -> Engine:
        """The engine with the fewest samples in flight among those that have not failed this group."""
        return min((e for e in self._engines if e.url not in left_out), key=lambda e: e.in_flight)

    def _plan(self, group: Group, engine: Engine, attempt: _Attempt) -> Plan:
        context = Context(engine.capabilities, self._group_reward, self._group_reward_required)
        planned = plan(group, strategy=attempt.strategy, context=context, new_id=self._new_id)
        if not group.strategy:
            group.strategy = str(planned.form)
            self._tally.planned(planned)
        return planned

    async def _send(self, group: Group, engine: Engine, planned: Plan, permit: Permit) -> list[OnefillError]:
        """Sends a plan's requests, wave after wave, and applies what comes. Returns the errors."""
        samples = sum(r.n for r in planned.requests)
        sending = _Sending(group=group, engine=engine, tally=self._tally, permit=permit)
        engine.in_flight += samples
        try:
            return await sending.run(planned, narrow=permit.held < samples)
        finally:
            engine.in_flight -= samples

    def _settle(
        self, group: Group, engine: Engine, planned: Plan, errors: list[OnefillError], attempt: _Attempt
    ) -> None:
        """Decides what the next round does about errors and aborts, or raises."""
        for error in errors:
            if not isinstance(error, ProtocolError | InfraError):
                raise error
        broken = [e for e in errors if isinstance(e, ProtocolError)]
        if broken:
            if planned.form is Form.FANOUT or attempt.fell_back:
                raise broken[0]
            engine.broke_the_contract()
            attempt.fell_back = True
            attempt.strategy = Strategy(Form.FANOUT)
            self._tally.fell_back(planned.form, "native-reply-broken")
            self._tally.warnings.add(f"a native reply broke the contract, so the group was sent singly: {broken[0]}")
            group.strategy = str(Form.FANOUT)
        elif errors:
            attempt.left_out.add(engine.url)
            if len(attempt.left_out) == len(self._engines):
                raise errors[0]
            self._tally.warnings.add(f"engine {engine.url} failed, its groups went to another: {errors[0]}")
        self._resume_aborted(group, attempt)

    def _resume_aborted(self, group: Group, attempt: _Attempt) -> None:
        aborted = [s for s in group.samples if s.status is Status.ABORTED]
        if not aborted:
            return
        attempt.aborts += 1
        if attempt.aborts > _MOST_ABORTS:
            raise InfraError(
                f"group {group.id} was aborted {attempt.aborts} times by engine {aborted[0].engine}; "
                "let whatever aborts its requests finish, then run it again"
            )
        for sample in aborted:
            if not sample.tokens.size:
                sample.revive()
            elif sample.tokens.size >= group.sampling.max_new_tokens:
                sample.truncate()


@dataclass(slots=True)
class _Attempt:
    """What was tried for one group so far."""

    strategy: Strategy
    left_out: set[str] = field(default_factory=set)
    fell_back: bool = False
    aborts: int = 0


@dataclass(slots=True)
class _Sending:
    """One plan on its way to one engine."""

    group: Group
    engine: Engine
    tally: Tally
    permit: Permit

    async def run(self, planned: Plan, *, narrow: bool) -> list[OnefillError]:
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
            if not leading.done():
                leading.cancel()
                await asyncio.gather(leading, return_exceptions=True)

    async def _together(self, requests: Sequence[Request], gate: SampleBudget | None) -> list[OnefillError]:
        outcomes = await asyncio.gather(*(self._one(request, gate) for request in requests))
        return [error for error in outcomes if error]

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
            raise DataError(f"request {request.id}: {len(completions)} completions for {request.n} samples")
        for index, completion in zip(request.samples, completions, strict=True):
            self.group.samples[index].append(completion)
        self.tally.answered(request, completions)
        self.permit.shrink_to(len(self.group.unfinished))
