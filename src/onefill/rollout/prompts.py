"""Reads and tokenises prompts off the event loop, a few at a time, in order.

Invariants:
- The source is read by one thread at a time and never further than a batch ahead, so memory does not grow with
  the file, and the first prompt is there as soon as it can be read.
- A bad row comes out as the `DataError` that names it, in its place; what to do about it is the caller's choice.
- An error that ends the reading (no tokenizer, a file that vanished) comes after every prompt read before it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from onefill.data.source import Item
from onefill.errors import DataError
from onefill.types import Prompt

__all__ = ["PromptReader"]

_FIRST_BATCH = 1
_BATCH = 32


class PromptReader:
    """An async view of a source.

    Args:
        items: what a source reads (`onefill.data`): prompts, or the error of a bad row in its place.
        prepare: gives a prompt its token ids; called in a thread. May raise DataError.
    """

    def __init__(self, items: Iterator[Item], prepare: Callable[[Prompt], Prompt]) -> None:
        self._items = items
        self._prepare = prepare
        self._ready: deque[Prompt | DataError] = deque()
        self._batch = _FIRST_BATCH
        self._ended = False
        self._failure: Exception | None = None

    async def next(self) -> Prompt | DataError | None:
        """The next prompt with token ids, or a bad row's error, or None at the end of the data.

        Raises:
            OnefillError: reading cannot go on.
        """
        while not self._ready and not self._ended:
            batch, self._batch = self._batch, _BATCH
            self._ready.extend(await asyncio.to_thread(self._read, batch))
        if self._ready:
            return self._ready.popleft()
        if self._failure:
            raise self._failure
        return None

    def _read(self, count: int) -> list[Prompt | DataError]:
        read: list[Prompt | DataError] = []
        try:
            while len(read) < count:
                item = next(self._items, None)
                if item is None:
                    self._ended = True
                    break
                read.append(self._prepared(item))
        except Exception as error:  # noqa: BLE001 - raised again by `next`, after what was read before it
            self._ended, self._failure = True, error
        return read

    def _prepared(self, item: Item) -> Prompt | DataError:
        if item.prompt is None:
            return item.error or DataError("a row gave neither a prompt nor an error")
        try:
            return self._prepare(item.prompt)
        except DataError as error:
            return error
