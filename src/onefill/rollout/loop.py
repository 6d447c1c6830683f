"""The rollout, first form: read prompts, send groups, reward them, deliver them whole.

Invariants:
- Samples in flight never exceed the budget; groups that are open (in flight, being rewarded or delivered) are
  bounded too, so that a slow reward or disk holds admission back instead of filling memory.
- A group is delivered when all its samples finished and its reward was asked for, and then exactly once.
- Every task belongs to the run and has ended when `run` returns, whatever way it ends.
- Stopping keeps what finished: open groups are dropped whole and counted, delivered ones are on disk.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from onefill.data.source import OnError
from onefill.errors import ConfigError, DataError, OnefillError
from onefill.rollout.budget import Permit, SampleBudget
from onefill.rollout.dispatch import Dispatcher
from onefill.rollout.prompts import PromptReader
from onefill.rollout.sink import NullSink, Sink
from onefill.rollout.tally import Tally
from onefill.types import Group, GroupState, Needs, Prompt, SamplingParams

__all__ = ["Outcome", "Rewards", "Rollout", "RolloutOptions"]

_FINISHING_S = 5.0
_MOST_FAILURES_IN_A_ROW = 16
_MOST_SKIPS_IN_A_ROW = 10_000


class Rewards(Protocol):
    """Fills in the rewards of a finished group; a reward that fails leaves None and a reason in the sample."""

    async def reward(self, group: Group) -> None: ...


@dataclass(frozen=True, slots=True)
class RolloutOptions:
    """What to roll out.

    Args:
        group_size: samples a group.
        sampling: how each is drawn.
        groups: stop after this many groups; None means the whole source.
        concurrency: samples in flight at most.
        on_error: whether a bad row or a failed group ends the run.
        needs: features that every group asks of the engine.
    """

    group_size: int = 8
    sampling: SamplingParams = SamplingParams()
    groups: int | None = None
    concurrency: int = 256
    on_error: OnError = OnError.FAIL
    needs: Needs = Needs()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    Args:
        wall_s: seconds from the first prompt read to the last group on disk.
        error: what ended the run early, or None.
        interrupted: `stop` was called.
        dropped: groups that were open when the run ended early.
    """

    wall_s: float
    error: OnefillError | None = None
    interrupted: bool = False
    dropped: int = 0


class Rollout:
    """Rolls out groups from a source until enough are done.

    Args:
        prompts: where prompts come from.
        dispatcher: brings a group to its end.
        options: what to roll out.
        tally: the run's books, shared with the dispatcher.
        rewards: rewards finished groups, or None.
        sink: takes delivered groups.
        on_group: called after each delivery, for progress.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        prompts: PromptReader,
        dispatcher: Dispatcher,
        options: RolloutOptions,
        tally: Tally,
        rewards: Rewards | None = None,
        sink: Sink | None = None,
        on_group: Callable[[Group], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prompts = prompts
        self._dispatcher = dispatcher
        self._options = options
        self._tally = tally
        self._rewards = rewards
        self._sink = sink or NullSink()
        self._on_group = on_group
        self._clock = clock
        self._budget = SampleBudget(options.concurrency)
        self._open_limit = max(4, 2 * -(-options.concurrency // options.group_size))
        self._open: dict[asyncio.Task[None], Group] = {}
        self._none_open = asyncio.Event()
        self._ending = asyncio.Event()
        self._error: OnefillError | None = None
        self._crash: BaseException | None = None
        self._failures_in_a_row = 0
        self._interrupted = False

    def stop(self) -> None:
        """Ends the run early: nothing more is sent, requests in flight are dropped, what finished is kept."""
        self._interrupted = True
        self._ending.set()

    async def run(self) -> Outcome:
        """Runs to the end of the data, to the wanted number of groups, to the first error, or to `stop`.

        What ends the run is in the outcome where Onefill raised it; any other exception is a fault of ours and is
        raised, after everything has ended.
        """
        started = self._clock()
        working = asyncio.create_task(self._admit_and_drain())
        ending = asyncio.create_task(self._ending.wait())
        dropped = 0
        try:
            await asyncio.wait((working, ending), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                await _end(working)
                dropped = await self._close_down()
        finally:
            await _end(working, ending, *self._open)
            await self._close_sink()
        if not working.cancelled():
            self._note(working.exception())
        if self._crash:
            raise self._crash
        return Outcome(self._clock() - started, self._error, self._interrupted, dropped)

    async def _close_down(self) -> int:
        """Drops groups that still generate; gives finished ones a moment for their reward. Returns the dropped."""
        generating = [task for task, group in self._open.items() if not group.complete]
        finishing = [task for task, group in self._open.items() if group.complete]
        await _end(*generating)
        if finishing:
            await asyncio.wait(finishing, timeout=_FINISHING_S)
        late = [task for task in finishing if not task.done()]
        await _end(*late)
        return len(generating) + len(late)

    async def _close_sink(self) -> None:
        try:
            await self._sink.close()
        except OnefillError as error:
            self._note(error)

    def _note(self, error: BaseException | None) -> None:
        """Takes what ended the run: an error for the user, or a crash of ours."""
        if isinstance(error, OnefillError):
            self._tally.errors.add(str(error))
            self._error = self._error or error
        elif error:
            self._crash = self._crash or error

    async def _admit_and_drain(self) -> None:
        await self._admit()
        while self._open:
            self._none_open.clear()
            await self._none_open.wait()

    async def _admit(self) -> None:
        """Opens groups as the budget allows."""
        admitted = skipped_in_a_row = 0
        room = asyncio.Semaphore(self._open_limit)
        while self._options.groups is None or admitted < self._options.groups:
            await room.acquire()
            item = await self._prompts.next()
            if item is None:
                return
            if isinstance(item, DataError):
                room.release()
                self._tally.rows_skipped += self._options.on_error is OnError.SKIP
                self._report(item)
                skipped_in_a_row += 1
                if skipped_in_a_row >= _MOST_SKIPS_IN_A_ROW:  # an endless source may have nothing else to give
                    raise DataError(f"{skipped_in_a_row} rows in a row could not be used; the last: {item}")
                continue
            skipped_in_a_row = 0
            group = self._group(item, admitted)
            permit = await self._budget.take(len(group.samples))
            admitted += 1
            task = asyncio.create_task(self._one(group, permit))
            self._open[task] = group
            task.add_done_callback(lambda done: self._closed(done, room))

    def _group(self, prompt: Prompt, number: int) -> Group:
        options = self._options
        return Group.of(prompt, options.group_size, options.sampling, id=f"{number}-{prompt.id}", needs=options.needs)

    def _closed(self, task: asyncio.Task[None], room: asyncio.Semaphore) -> None:
        self._open.pop(task, None)
        room.release()
        if not self._open:
            self._none_open.set()
        if not task.cancelled() and (error := task.exception()):
            self._note(error)
            self._ending.set()

    async def _one(self, group: Group, permit: Permit) -> None:
        """One group from dispatch to delivery."""
        group.move(GroupState.IN_FLIGHT)
        try:
            await self._dispatcher.complete(group, permit)
        except OnefillError as error:
            group.error = str(error)
            group.move(GroupState.FAILED)
            self._tally.groups_failed += 1
            self._failed(error)
            return
        finally:
            permit.release()
        self._failures_in_a_row = 0
        if self._rewards:
            await self._rewards.reward(group)
        group.move(GroupState.DONE)
        self._sink.add(group)
        self._tally.delivered(group)
        self._on_group(group)
        await self._sink.drain()

    def _failed(self, error: OnefillError) -> None:
        """A group failed. Even where failures are skipped, a run that cannot succeed is not carried to its end."""
        self._report(error)
        if isinstance(error, DataError):
            return
        self._failures_in_a_row += 1
        hopeless = isinstance(error, ConfigError) or self._failures_in_a_row >= _MOST_FAILURES_IN_A_ROW
        if hopeless and not self._ending.is_set():
            self._error = self._error or error
            self._tally.warnings.add(
                f"the run was ended: {self._failures_in_a_row} groups in a row failed without one that was done"
            )
            self._ending.set()

    def _report(self, error: OnefillError) -> None:
        self._tally.errors.add(str(error))
        if self._options.on_error is OnError.FAIL:
            self._error = self._error or error
            self._ending.set()


async def _end(*tasks: asyncio.Task[Any]) -> None:
    """Cancels what still runs and waits until all of it has ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
