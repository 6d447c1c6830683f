"""Brings one group to its end: plan, send, and what to do when that fails.

Invariants:
- The plan decides the form; from there on there is one path (`sending`).
- Every failure has one outcome, by its kind: `ProtocolError` of a request for several samples sends the group's
  unfinished samples singly, once; `InfraError` (after the engine client's own retries) sends them to another
  engine; aborted samples go on from their tokens; anything else fails the group.
- The number of rounds is bounded; samples that finished in an earlier round stay finished.
- A group is booked once, when it is complete or has failed, as what it was sent as in the end.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from onefill.errors import InfraError, OnefillError, ProtocolError
from onefill.plan import Context, Form, Plan, Strategy, plan
from onefill.rollout.budget import Permit
from onefill.rollout.sending import Engine, Sending
from onefill.rollout.tally import Tally
from onefill.types import Group, Status

__all__ = ["Dispatcher"]

_ABORTS_WITHOUT_PROGRESS = 5
_MOST_ABORTS = 100
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 10.0
_AVOID_S = 30.0


class Dispatcher:
    """Sends groups to engines until they are complete.

    Args:
        engines: at least one; a group goes to the one with the fewest samples in flight.
        strategy: what the user asked for.
        new_id: prefix-free request ids.
        tally: the run's books.
        seed: the run's, for sampling seeds in deterministic mode.
        group_reward: a group reward is configured.
        group_reward_required: see `plan.Context`.
        rng: draws the jitter of waits.
        sleep: waits before aborted samples are sent again.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        engines: Sequence[Engine],
        strategy: Strategy,
        new_id: Callable[[], str],
        tally: Tally,
        seed: int = 0,
        group_reward: bool = False,
        group_reward_required: bool = False,
        rng: random.Random | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not engines or len({engine.url for engine in engines}) < len(engines):
            raise ValueError("a dispatcher needs at least one engine, and each only once")
        self._engines = list(engines)
        self._strategy = strategy
        self._new_id = new_id
        self._tally = tally
        self._seed = seed
        self._group_reward = group_reward
        self._group_reward_required = group_reward_required
        self._rng = rng or random.Random()
        self._sleep = sleep
        self._clock = clock

    async def complete(self, group: Group, permit: Permit) -> None:
        """Fills every sample of `group`.

        Args:
            group: with token ids in its prompt.
            permit: what it may have in flight; shrinks as its samples finish.

        Raises:
            OnefillError: the group cannot be completed. Finished samples keep what they have, the others too.
        """
        attempt = _Attempt(strategy=self._strategy)
        try:
            while group.unfinished:
                engine = self._place(attempt.left_out)
                planned = self._plan(group, engine, attempt)
                errors = await self._send(group, engine, planned, permit)
                self._settle(engine, planned, errors, attempt)
                await self._resume_aborted(group, attempt)
        except OnefillError:
            self._book(group, attempt)
            raise
        self._book(group, attempt)

    def _place(self, left_out: set[str]) -> Engine:
        """The engine with the fewest samples in flight; those that failed lately come last, or not at all."""
        now = self._clock()
        free = [engine for engine in self._engines if engine.url not in left_out]
        return min(free, key=lambda engine: (engine.avoid_until > now, engine.in_flight))

    def _plan(self, group: Group, engine: Engine, attempt: _Attempt) -> Plan:
        context = Context(engine.capabilities, self._seed, self._group_reward, self._group_reward_required)
        planned = plan(group, strategy=attempt.strategy, context=context, new_id=self._new_id)
        fresh = attempt.form is None or all(sample.untouched for sample in group.samples)
        if fresh and not attempt.fell_back:
            attempt.form = planned.form
            attempt.rules = [(rule.name, rule.reason) for rule in planned.barred_by]
        return planned

    def _book(self, group: Group, attempt: _Attempt) -> None:
        if attempt.form is not None:
            group.strategy = str(attempt.form)
            self._tally.sent_as(attempt.form, attempt.rules)

    async def _send(self, group: Group, engine: Engine, planned: Plan, permit: Permit) -> list[OnefillError]:
        """Sends a plan's requests, wave after wave, and applies what comes. Returns the errors."""
        samples = sum(r.n for r in planned.requests)
        sending = Sending(group=group, engine=engine, tally=self._tally, permit=permit)
        engine.in_flight += samples
        try:
            return await sending.run(planned, narrow=permit.held < samples)
        finally:
            engine.in_flight -= samples

    def _settle(self, engine: Engine, planned: Plan, errors: list[OnefillError], attempt: _Attempt) -> None:
        """Decides what the next round does about errors, or raises."""
        for error in errors:
            if not isinstance(error, ProtocolError | InfraError):
                raise error
        broken = next((e for e in errors if isinstance(e, ProtocolError)), None)
        if broken:
            self._fall_back(engine, planned, broken, attempt)
        elif errors:
            engine.avoid_until = self._clock() + _AVOID_S
            attempt.left_out.add(engine.url)
            if len(attempt.left_out) == len(self._engines):
                raise errors[0]
            self._tally.warnings.add(
                f"engine {engine.url} failed, its groups went to another; first: {errors[0]}",
                key=f"moved {engine.url}",
            )

    def _fall_back(self, engine: Engine, planned: Plan, broken: ProtocolError, attempt: _Attempt) -> None:
        if planned.form is Form.FANOUT or attempt.fell_back:
            raise broken
        engine.broke_the_contract()
        attempt.fell_back = True
        attempt.strategy = Strategy(Form.FANOUT)
        attempt.form = Form.FANOUT
        attempt.rules = [("native-reply-broken", "the engine's reply broke the contract")]
        self._tally.warnings.add(
            f"native replies of {engine.url} broke the contract, so groups were sent singly; first: {broken}",
            key=f"broken {engine.url} {broken.field.partition(']')[2]}",
        )

    async def _resume_aborted(self, group: Group, attempt: _Attempt) -> None:
        """Readies aborted samples to go on from their tokens, after a wait: whoever aborts may not be done yet."""
        aborted = [s for s in group.samples if s.status is Status.ABORTED]
        if not aborted:
            return
        tokens = sum(int(s.tokens.size) for s in group.samples)
        attempt.aborts += 1
        attempt.stuck = attempt.stuck + 1 if tokens == attempt.tokens else 0
        attempt.tokens = tokens
        if attempt.stuck >= _ABORTS_WITHOUT_PROGRESS or attempt.aborts >= _MOST_ABORTS:
            raise InfraError(
                f"group {group.id} was aborted {attempt.aborts} times by engine {aborted[0].engine}, "
                f"{attempt.stuck} times in a row without a new token; let whatever aborts requests there finish first"
            )
        for sample in aborted:
            if not sample.tokens.size:
                sample.revive()
            elif sample.tokens.size >= group.sampling.max_new_tokens:
                sample.truncate()
        if group.unfinished:
            longest = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2**attempt.stuck)
            await self._sleep(longest * (0.5 + 0.5 * self._rng.random()))


@dataclass(slots=True)
class _Attempt:
    """What was tried for one group so far."""

    strategy: Strategy
    left_out: set[str] = field(default_factory=set)
    fell_back: bool = False
    form: Form | None = None
    rules: list[tuple[str, str]] = field(default_factory=list)
    aborts: int = 0
    stuck: int = 0
    tokens: int = -1
