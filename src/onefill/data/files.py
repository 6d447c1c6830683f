"""Prompts from files: JSON lines and Parquet, several of them, shuffled, over epochs.

Invariants:
- Memory is one block of rows, whatever the size of the data.
- Ids are labels: two rows may share one. Nothing that was read before changes what a row gives, or a restored
  reading would differ.
- Shuffling draws the order of files, of Parquet row groups, and of the rows within blocks of up to 8,192 rows
  from (seed, epoch) alone; it never looks at the whole file first. A row moves at most one block.
- The cursor names block and item, so a restored reading reads one block again and gives what was left of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onefill.data.block import IN_ORDER, SHUFFLED, Block, DataFile, Record, permutation
from onefill.data.cursor import Cursor
from onefill.data.errors import FieldError, RowError
from onefill.data.fields import Fields
from onefill.data.rows import prompt_from_row
from onefill.data.source import Item
from onefill.errors import ConfigError, DataError
from onefill.types import Prompt

__all__ = ["FileSource"]


class FileSource:
    """The rows of data files as prompts.

    Args:
        files: what to read, in order.
        fields: which key holds what.
        shuffle_seed: shuffles with this seed; None keeps the order of the files.
        epochs: passes over the data; None goes on for ever.
    """

    def __init__(
        self,
        files: Sequence[DataFile],
        *,
        fields: Fields | None = None,
        shuffle_seed: int | None = None,
        epochs: int | None = 1,
    ) -> None:
        if not files:
            raise ConfigError("no data files were given: name at least one")
        if epochs is not None and epochs < 1:
            raise ConfigError(f"epochs must be at least 1, got {epochs}")
        self._files = list(files)
        self._fields = fields or Fields()
        self._seed = shuffle_seed
        self._epochs = epochs
        self._window = IN_ORDER if shuffle_seed is None else SHUFFLED
        self._labels = _labels([file.path for file in files])
        self._fingerprint = _fingerprint(self._labels, [file.path.stat().st_size for file in files])

    @property
    def name(self) -> str:
        """The path of the first file, and how many follow."""
        more = f" and {len(self._files) - 1} more" if len(self._files) > 1 else ""
        return f"{self._files[0].path}{more}"

    def read(self, cursor: Cursor | None = None) -> Iterator[Item]:
        """Items from the start or from behind `cursor`. See `Source.read`."""
        start = cursor or Cursor(source=self._fingerprint, seed=self._seed)
        if start.source != self._fingerprint or start.seed != self._seed or start.file > len(self._files):
            raise ConfigError(
                f"the saved cursor is of {start.source} with shuffle seed {start.seed}, the data now is "
                f"{self._fingerprint} with {self._seed}: give the same --data and --seed, or start anew"
            )
        return self._read(start)

    def _read(self, at: Cursor) -> Iterator[Item]:
        while self._epochs is None or at.epoch < self._epochs:
            order = self._order(at.epoch)
            for place in range(at.file, len(order)):
                fresh = at.offset == 0 and at.taken == 0
                try:
                    for item in self._read_file(order[place], at):
                        at, fresh = item.cursor, False
                        yield item
                except DataError as error:  # the file breaks off: the files behind it may be fine
                    yield Item(cursor=_behind(at, place), error=error)
                    fresh = False
                at = _behind(at, place)
                if fresh:
                    yield Item(cursor=at, error=_no_rows(self._files[order[place]]))
            if not at.good:
                return  # another pass over nothing but errors would never end
            at = Cursor(source=self._fingerprint, seed=self._seed, epoch=at.epoch + 1)

    def _order(self, epoch: int) -> list[int]:
        if self._seed is None:
            return list(range(len(self._files)))
        return permutation(len(self._files), self._seed, epoch, "files")

    def _read_file(self, index: int, at: Cursor) -> Iterator[Item]:
        file, label = self._files[index], self._labels[index]
        key = None if self._seed is None else (self._seed, at.epoch)
        taken, good = at.taken, at.good
        for block in file.blocks(window=self._window, offset=at.offset, row=at.row, key=key):
            records = self._arranged(block, at.epoch, label)
            for place in range(taken, len(records)):
                result = self._prompt(file, label, records[place], at.epoch)
                good = good or isinstance(result, Prompt)
                cursor = replace(at, row=block.row, offset=block.offset, taken=place + 1, good=good)
                if isinstance(result, Prompt):
                    yield Item(cursor=cursor, prompt=result)
                else:
                    yield Item(cursor=cursor, error=result)
            taken = 0

    def _arranged(self, block: Block, epoch: int, label: str) -> list[Record]:
        if self._seed is None:
            return block.records
        order = permutation(len(block.records), self._seed, epoch, label, block.offset)
        return [block.records[i] for i in order]

    def _prompt(self, file: DataFile, label: str, record: Record, epoch: int) -> Prompt | RowError:
        try:
            if record.error is not None:
                raise record.error
            row: Any = file.decode(record)
            return prompt_from_row(
                row,
                fields=self._fields,
                default_id=f"{label}-{record.number}",
                base=file.path.parent,
                epoch=epoch,
            )
        except FieldError as error:
            return RowError(
                file=str(file.path),
                unit=file.unit,
                number=record.number,
                field=error.field,
                reason=error.reason,
                hint=error.hint,
            )


def _behind(at: Cursor, place: int) -> Cursor:
    """Behind the whole of the file at `place` in the epoch's order."""
    return replace(at, file=place + 1, row=0, offset=0, taken=0)


def _labels(paths: Sequence[Path]) -> list[str]:
    """A short name a file, unique among them: the stem, with a number where two share it."""
    stems = [path.name.split(".")[0] or path.name for path in paths]
    return [stem if stems.count(stem) == 1 else f"{stem}.{i + 1}" for i, stem in enumerate(stems)]


def _fingerprint(labels: Sequence[str], sizes: Sequence[int]) -> str:
    """Changes when a file is added, renamed, reordered, or has another size; not when the data moves."""
    files = "\n".join(f"{label} {size}" for label, size in zip(labels, sizes, strict=True))
    digest = hashlib.sha256(files.encode()).hexdigest()
    return f"files:{labels[0]}+{len(labels) - 1}:{digest[:12]}"


def _no_rows(file: DataFile) -> RowError:
    return RowError(
        file=str(file.path),
        unit=file.unit,
        number=0,
        field="",
        reason="the file holds no rows",
        hint="remove it, or check what wrote it",
    )
