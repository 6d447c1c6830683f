"""Checks of many groups share their hops, and each caller gets its own answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from onefill.reward.call import RewardInput, RewardOutcome
from onefill.reward.together import Together


class Hops:
    """Counts hops, and lets them go one by one."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.gate = asyncio.Event()

    async def __call__(self, job: Callable[[], list[list[RewardOutcome]]]) -> list[list[RewardOutcome]]:
        self.batches.append(0)
        await self.gate.wait()
        outcomes = job()
        self.batches[-1] = len(outcomes)
        return outcomes


def check(inputs: Sequence[Any]) -> list[RewardOutcome]:
    return [RewardOutcome(float(value)) for value in inputs]


async def test_groups_that_finish_during_a_hop_share_the_next_and_get_their_own_answers() -> None:
    hops = Hops()
    together = Together(check=check, hop=hops)
    asked = [asyncio.create_task(together.score([i, i + 0.5])) for i in range(5)]  # type: ignore[list-item]
    await asyncio.sleep(0)
    hops.gate.set()
    answers = await asyncio.gather(*asked)
    assert [[o.value for o in answer] for answer in answers] == [[i, i + 0.5] for i in range(5)]
    assert sum(hops.batches) == 5
    assert len(hops.batches) <= 2


async def test_a_caller_that_goes_away_costs_the_others_nothing() -> None:
    hops = Hops()
    together = Together(check=check, hop=hops)
    first, second = (asyncio.create_task(together.score([i])) for i in (1, 2))  # type: ignore[list-item]
    await asyncio.sleep(0.01)
    first.cancel()
    hops.gate.set()
    assert [o.value for o in await second] == [2.0]


async def test_a_hop_that_breaks_tells_all_who_wait_and_the_next_call_works() -> None:
    broken = True

    async def hop(job: Callable[[], list[list[RewardOutcome]]]) -> list[list[RewardOutcome]]:
        if broken:
            raise RuntimeError("no thread")
        return job()

    together = Together(check=check, hop=hop)
    with pytest.raises(RuntimeError, match="no thread"):
        await together.score([1])  # type: ignore[list-item]
    broken = False
    assert [o.value for o in await together.score([3])] == [3.0]  # type: ignore[list-item]


async def test_closing_cancels_who_waits_and_leaves_no_task() -> None:
    together = Together(check=check, hop=Hops())
    waiting = asyncio.create_task(together.score([RewardInput]))  # type: ignore[list-item]
    await asyncio.sleep(0.01)
    await together.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len(asyncio.all_tasks()) == 1
