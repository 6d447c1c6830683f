"""Blocks: the unit in which a data file is read.

Invariants:
- For one file, one `Window` and one shuffle key, the sequence of blocks is the same at every reading.
- A block is at most `Window.rows` rows and about `Window.bytes` bytes, so memory does not depend on the size of
  the file, and the first row is there after one block.
- A block can be read again from its `offset` and `row`, which is what makes a shuffled reading restorable.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from onefill.data.errors import FieldError

__all__ = ["IN_ORDER", "SHUFFLED", "Block", "DataFile", "Record", "Window", "permutation"]


@dataclass(frozen=True, slots=True)
class Window:
    """How much of a file is held at once."""

    rows: int
    bytes: int


IN_ORDER = Window(rows=256, bytes=1 << 20)
SHUFFLED = Window(rows=8192, bytes=16 << 20)


@dataclass(frozen=True, slots=True)
class Record:
    """One row before it is understood: its number in the file (from 1), and what `DataFile.decode` needs."""

    number: int
    raw: Any
    error: FieldError | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive records of a file.

    Args:
        records: in file order; may be empty (blank lines).
        offset: where the block begins, in the file's own measure.
        row: rows of the file that lie before it.
        next_offset: where the block that is visited next begins.
        next_row: rows that lie before that.
    """

    records: list[Record]
    offset: int
    row: int
    next_offset: int
    next_row: int


class DataFile(Protocol):
    """A file of rows."""

    @property
    def path(self) -> Path: ...

    @property
    def unit(self) -> str:
        """What a row is called in messages: `line` or `row`."""
        ...

    def blocks(
        self, *, window: Window, offset: int = 0, row: int = 0, key: tuple[int, int] | None = None
    ) -> Iterator[Block]:
        """The blocks from one on that begins at `offset`; in an order drawn from `key` where the file can."""
        ...

    def decode(self, record: Record) -> Any:
        """The row as Python values. Raises FieldError where it is not one."""
        ...


def permutation(count: int, *key: object) -> list[int]:
    """A permutation of 0..count-1 that depends on the key alone, on every machine."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    order = list(range(count))
    random.Random(int.from_bytes(digest[:8], "big")).shuffle(order)
    return order
