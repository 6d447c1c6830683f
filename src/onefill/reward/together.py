"""One hop to a thread for the checks of many groups.

A hop costs more than comparing eight strings. While one batch is in the thread the groups that finish meanwhile
gather for the next, so that the hops grow fewer as the load grows, and nobody waits for company.

Invariants:
- Each caller gets the answer to its own inputs, or the exception of its batch; none waits for a later batch.
- The task that carries the batches ends when nobody waits, or with `close`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from onefill.reward.call import RewardInput, RewardOutcome

__all__ = ["Together"]

_Waiting = tuple[Sequence[RewardInput], "asyncio.Future[list[RewardOutcome]]"]


class Together:
    """Carries checks to a thread, several groups at a time.

    Args:
        check: outcomes of one group's inputs; must not raise.
        hop: runs a function in a thread.
    """

    def __init__(
        self,
        *,
        check: Callable[[Sequence[RewardInput]], list[RewardOutcome]],
        hop: Callable[[Callable[[], list[list[RewardOutcome]]]], Awaitable[list[list[RewardOutcome]]]],
    ) -> None:
        self._check = check
        self._hop = hop
        self._waiting: list[_Waiting] = []
        self._carrying: asyncio.Task[None] | None = None

    async def score(self, inputs: Sequence[RewardInput]) -> list[RewardOutcome]:
        """Outcomes of one group."""
        answer: asyncio.Future[list[RewardOutcome]] = asyncio.get_running_loop().create_future()
        self._waiting.append((inputs, answer))
        if self._carrying is None or self._carrying.done():
            self._carrying = asyncio.create_task(self._carry())
        return await answer

    async def _carry(self) -> None:
        batch: list[_Waiting] = []
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                groups = [inputs for inputs, _ in batch]
                outcomes = await self._hop(lambda groups=groups: [self._check(inputs) for inputs in groups])  # type: ignore[misc]
                for (_, answer), outcome in zip(batch, outcomes, strict=True):
                    if not answer.done():
                        answer.set_result(outcome)
        except BaseException as error:
            for _, answer in (*batch, *self._waiting):
                if not answer.done():
                    answer.set_exception(error) if isinstance(error, Exception) else answer.cancel()
            self._waiting = []
            raise

    async def close(self) -> None:
        """Ends the task; whoever still waits is cancelled."""
        if self._carrying is not None and not self._carrying.done():
            self._carrying.cancel()
            await asyncio.gather(self._carrying, return_exceptions=True)
