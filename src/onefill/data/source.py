"""What every source of prompts gives: items, each with the cursor behind it.

Invariants: reading is lazy, one item at a time; a bad row is an item too, so that whoever reads decides
whether it ends the run (`OnError.FAIL`) or is counted and passed over (`OnError.SKIP`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from onefill.data.cursor import Cursor
from onefill.errors import DataError
from onefill.types import Prompt

__all__ = ["Item", "OnError", "Source", "prompts"]


class OnError(StrEnum):
    """What a bad row does to the run."""

    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt, or the error of a row that is none; exactly one of the two.

    Args:
        cursor: the position behind this item: save it once the item is dealt with.
        prompt: the prompt.
        error: what is wrong with the row, naming file, line and field.
    """

    cursor: Cursor
    prompt: Prompt | None = None
    error: DataError | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.error is None):
            raise ValueError("an item is either a prompt or an error")


class Source(Protocol):
    """Where prompts come from."""

    @property
    def name(self) -> str:
        """What the source is called in messages."""
        ...

    def read(self, cursor: Cursor | None = None) -> Iterator[Item]:
        """Items from the start, or from behind the item that `cursor` came with.

        Raises:
            ConfigError: the cursor belongs to another source.
            DataError: a file as a whole cannot be read.
        """
        ...


def prompts(
    source: Source,
    *,
    on_error: OnError = OnError.FAIL,
    cursor: Cursor | None = None,
    on_skip: Callable[[DataError], None] | None = None,
) -> Iterator[tuple[Prompt, Cursor]]:
    """The good prompts of a source, each with the cursor behind it.

    Args:
        source: what to read.
        on_error: whether a bad row raises or is passed over.
        cursor: where to go on.
        on_skip: called with the error of each row that is passed over.

    Raises:
        DataError: a bad row, where `on_error` is FAIL.
    """
    for item in source.read(cursor):
        if item.prompt is not None:
            yield item.prompt, item.cursor
        elif item.error is not None:
            if on_error is OnError.FAIL:
                raise item.error
            if on_skip is not None:
                on_skip(item.error)
