"""Rewards groups, off the event loop and within a time limit.

Invariants:
- Each finished sample gets a number or a reason; nothing that a reward does raises here (only cancellation).
- A sample without a reward has `reward` None, never 0: what infrastructure lost is not a bad answer.
- One sample's failure leaves the others alone; a group reward sees the finished samples, in sample order.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from onefill.reward.call import RaisedError, RewardInput, RewardOutcome, input_of, outcome_of
from onefill.reward.parse import Place, Reward, parse
from onefill.reward.pool import WorkerPool
from onefill.reward.threads import AbandonedError, OverTimeError, UserCalls
from onefill.reward.together import Together
from onefill.types import Group

__all__ = ["Rewarder"]

_MAX_WORKERS = 4


class Rewarder:
    """Computes one reward for the samples of groups. Belongs to one event loop.

    Args:
        reward: which reward.
        time_limit_s: seconds that one call may take: one sample, or one group for a group reward.
        workers: processes for `math` and `reasoning-gym`; by default one a core, at most 4.
        threads: calls of a user's function at once.
    """

    def __init__(
        self, reward: Reward, *, time_limit_s: float = 30.0, workers: int | None = None, threads: int = 32
    ) -> None:
        if not time_limit_s > 0:
            raise ValueError(f"time_limit_s must be above 0, got {time_limit_s}")
        self._reward = reward
        self._time_limit_s = time_limit_s
        self._calls = UserCalls(limit=threads, time_limit_s=time_limit_s)
        self._together = Together(check=partial(_checked, reward), hop=self._calls.own)
        size = workers or min(_MAX_WORKERS, os.cpu_count() or 1)
        self._pool = WorkerPool(kind=reward.name, size=size, time_limit_s=time_limit_s)

    @classmethod
    def from_names(
        cls, *, reward: str | None = None, group_reward: str | None = None, timeout_s: float = 30.0
    ) -> Rewarder | None:
        """The rewarder of the command line's options; None where neither is given.

        Raises:
            ConfigError: an unknown name, or one that cannot be imported.
            ValueError: both are given.
        """
        if reward and group_reward:
            raise ValueError("a sample has one reward: give reward or group_reward, not both")
        if group_reward:
            return cls(parse(group_reward, per_group=True), time_limit_s=timeout_s)
        return cls(parse(reward), time_limit_s=timeout_s) if reward else None

    @property
    def pool(self) -> WorkerPool:
        """The worker processes."""
        return self._pool

    async def reward(self, group: Group) -> None:
        """Fills in `reward` of every sample, or None and the reason in `reward_error`."""
        for sample, outcome in zip(group.samples, await self.score(group), strict=True):
            sample.reward = outcome.value
            if outcome.reason and sample.status.finished:
                sample.reward_error = outcome.reason

    async def score(self, group: Group) -> list[RewardOutcome]:
        """An outcome for every sample, in sample order; the group is not changed."""
        finished = [sample for sample in group.samples if sample.status.finished]
        inputs = [input_of(group, sample) for sample in finished]
        scored = iter(await self._score(inputs) if inputs else [])
        return [
            next(scored)
            if sample.status.finished
            else RewardOutcome.failed(f"the sample is {sample.status}{_because(sample.error)}")
            for sample in group.samples
        ]

    async def aclose(self) -> None:
        """Ends the worker processes and the idle threads."""
        await self._together.close()
        self._calls.close()
        await self._pool.aclose()

    async def _score(self, inputs: Sequence[RewardInput]) -> list[RewardOutcome]:
        reward = self._reward
        if reward.place is Place.INLINE:
            return await self._together.score(inputs)
        if reward.place is Place.WORKER:
            return await self._worked(inputs)
        if reward.per_group:
            return await self._group(inputs)
        return await asyncio.gather(*(self._one(call) for call in inputs))

    async def _worked(self, inputs: Sequence[RewardInput]) -> list[RewardOutcome]:
        own = self._reward.name == "reasoning-gym"  # it knows its label by the entry, which is in the metadata
        if not own and any(call.label is None for call in inputs):
            reason = "the prompt has no label to compare with: name its key with --label-key"
            return [RewardOutcome.failed(reason)] * len(inputs)
        return await self._pool.score(
            [(call.text, call.label, call.metadata.get("reasoning_gym") if own else None) for call in inputs]
        )

    async def _one(self, call: RewardInput) -> RewardOutcome:
        name = self._reward.name
        (outcome,) = await self._called([call], lambda value: [outcome_of(value, name)])
        return outcome

    async def _group(self, inputs: Sequence[RewardInput]) -> list[RewardOutcome]:
        name, want = self._reward.name, len(inputs)
        return await self._called(inputs, lambda values: _outcomes(values, name, want))

    async def _called(
        self, inputs: Sequence[RewardInput], finish: Callable[[Any], list[RewardOutcome]]
    ) -> list[RewardOutcome]:
        """What `finish` makes of what the user's function returned, or why it did not, for each input."""
        reward = self._reward
        assert reward.function is not None
        assert reward.arguments is not None
        args, kwargs = reward.arguments(inputs)
        try:
            return await self._calls.call(  # type: ignore[no-any-return]
                reward.function, args, kwargs, coroutine=reward.coroutine, finish=finish
            )
        except OverTimeError:
            reason = f"{reward.name} took longer than {self._time_limit_s:g} s and was given up"
        except AbandonedError as error:
            reason = f"{reward.name}: {error}"
        except RaisedError as error:
            reason = f"{reward.name} raised {error}"
        return [RewardOutcome.failed(reason)] * len(inputs)


def _checked(reward: Reward, inputs: Sequence[RewardInput]) -> list[RewardOutcome]:
    assert reward.check is not None
    outcomes = []
    for call in inputs:
        try:
            outcomes.append(reward.check(call))
        except BaseException as error:  # noqa: BLE001  a label of the user's that cannot be made text
            outcomes.append(RewardOutcome.failed(f"{reward.name} raised {RaisedError.of(error)}"))
    return outcomes


def _outcomes(values: Any, name: str, want: int) -> list[RewardOutcome]:
    """What a group reward returned, checked."""
    if not _is_list(values):
        reason = f"{name} returned {type(values).__name__}: a group reward returns a list of {want} numbers"
    elif len(values) != want:
        reason = f"{name} returned {len(values)} rewards for {want} samples"
    else:
        return [outcome_of(values[i], name) for i in range(want)]
    return [RewardOutcome.failed(reason)] * want


def _because(error: str) -> str:
    return f": {error}" if error else ""


def _is_list(values: Any) -> bool:
    """A list, tuple, array or tensor; not a string or a dict, and no scalar."""
    if isinstance(values, list | tuple):
        return True
    return getattr(values, "ndim", None) == 1 and hasattr(values, "__getitem__")
