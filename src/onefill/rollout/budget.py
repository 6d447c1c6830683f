"""How many samples may be in flight: a native request of 8 counts as 8, not as 1.

Invariants:
- Never more than `size` samples are held, except that one group larger than the budget goes alone.
- First come, first served: a large group is not overtaken for ever by small ones.
- What was taken is given back exactly once, also when the taker is cancelled.
"""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["Permit", "SampleBudget"]


class SampleBudget:
    """A semaphore that counts samples.

    Args:
        size: samples that may be in flight together, at least 1.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"concurrency must be at least one sample, got {size}")
        self.size = size
        self._held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def held(self) -> int:
        """Samples in flight now."""
        return self._held

    async def take(self, samples: int) -> Permit:
        """Waits until `samples` fit and takes them (the whole budget, where they exceed it)."""
        need = min(samples, self.size)
        if self._waiting or self._held + need > self.size:
            await self._wait(need)
        else:
            self._held += need
        return Permit(self, need)

    async def _wait(self, need: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (need, turn)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give(need)  # the turn came in the same tick as the cancellation
            elif entry in self._waiting:  # unless a release in this tick has already passed it over
                self._waiting.remove(entry)
                self._wake()
            raise

    def _give(self, samples: int) -> None:
        self._held -= samples
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self._held + self._waiting[0][0] <= self.size:
            need, turn = self._waiting.popleft()
            if turn.cancelled():
                continue
            self._held += need
            turn.set_result(None)


class Permit:
    """Samples taken from a budget, given back bit by bit as they finish.

    Args:
        budget: where they came from.
        held: how many.
    """

    def __init__(self, budget: SampleBudget, held: int) -> None:
        self._budget = budget
        self.held = held

    def shrink_to(self, samples: int) -> None:
        """Gives back what is held beyond `samples`."""
        if (surplus := self.held - max(samples, 0)) > 0:
            self.held -= surplus
            self._budget._give(surplus)

    def release(self) -> None:
        """Gives back everything; more calls do nothing."""
        self.shrink_to(0)
