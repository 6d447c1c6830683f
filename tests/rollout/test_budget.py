"""The budget counts samples, in order, and gets everything back."""

from __future__ import annotations

import asyncio
import random

import pytest

from onefill.rollout.budget import SampleBudget


async def test_a_native_group_counts_as_its_samples() -> None:
    budget = SampleBudget(16)
    first, second = await budget.take(8), await budget.take(8)
    third = asyncio.create_task(budget.take(8))
    await asyncio.sleep(0)
    assert not third.done()
    first.release()
    await third
    assert budget.held == 16
    second.release()
    (await third).release()
    assert budget.held == 0


async def test_a_group_larger_than_the_budget_goes_alone() -> None:
    budget = SampleBudget(4)
    large = await budget.take(8)
    assert (large.held, budget.held) == (4, 4)
    other = asyncio.create_task(budget.take(1))
    await asyncio.sleep(0)
    assert not other.done()
    large.release()
    await other


async def test_a_large_group_is_not_overtaken_by_small_ones() -> None:
    budget = SampleBudget(8)
    held = await budget.take(4)
    order: list[str] = []

    async def taker(name: str, samples: int) -> None:
        permit = await budget.take(samples)
        order.append(name)
        permit.release()

    tasks = [asyncio.create_task(taker("large", 8)), asyncio.create_task(taker("small", 1))]
    await asyncio.sleep(0.01)
    assert order == []  # the small one would fit, but the large one came first
    held.release()
    await asyncio.gather(*tasks)
    assert order == ["large", "small"]


async def test_samples_are_given_back_bit_by_bit_and_never_twice() -> None:
    budget = SampleBudget(8)
    permit = await budget.take(8)
    permit.shrink_to(3)
    assert budget.held == 3
    permit.shrink_to(5)
    assert budget.held == 3
    permit.release()
    permit.release()
    assert budget.held == 0


async def test_note_31_a_cancelled_waiter_leaves_no_trace() -> None:
    budget = SampleBudget(4)
    held = await budget.take(4)
    waiter, behind = asyncio.create_task(budget.take(4)), asyncio.create_task(budget.take(2))
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.sleep(0)
    held.release()
    (await behind).release()
    assert budget.held == 0


async def test_a_turn_that_comes_together_with_a_cancellation_is_given_back() -> None:
    budget = SampleBudget(4)
    held = await budget.take(4)
    waiter = asyncio.create_task(budget.take(4))
    await asyncio.sleep(0)
    held.release()  # gives the waiter its turn ...
    waiter.cancel()  # ... and cancels it before it runs
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert budget.held == 0


async def test_a_cancellation_that_comes_before_a_release_in_the_same_tick_stays_a_cancellation() -> None:
    budget = SampleBudget(4)
    held = await budget.take(4)
    waiter, behind = asyncio.create_task(budget.take(4)), asyncio.create_task(budget.take(4))
    await asyncio.sleep(0)
    waiter.cancel()  # the turn is cancelled ...
    held.release()  # ... and passed over, before the waiter runs
    with pytest.raises(asyncio.CancelledError):
        await waiter
    (await behind).release()
    assert budget.held == 0


@pytest.mark.parametrize("seed", range(20))
async def test_any_mix_of_takers_and_cancellations_ends_at_zero_and_never_exceeds(seed: int) -> None:
    rng = random.Random(seed)
    budget = SampleBudget(10)

    async def taker() -> None:
        permit = await budget.take(rng.randint(1, 12))
        try:
            assert budget.held <= 10
            await asyncio.sleep(rng.random() / 500)
            permit.shrink_to(rng.randint(0, 12))
            await asyncio.sleep(rng.random() / 500)
        finally:
            permit.release()

    tasks = [asyncio.create_task(taker()) for _ in range(60)]
    for task in rng.sample(tasks, 20):
        await asyncio.sleep(rng.random() / 2000)
        task.cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
    assert budget.held == 0


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        SampleBudget(0)
