"""Parquet, read a batch of rows at a time.

Invariants: at most one block of rows is decoded at a time; an offset is the ordinal of a block in the order of
visiting. With a shuffle key the row groups are visited in a random order, the blocks of one in file order.
pyarrow is imported when a file is opened, not before.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onefill.data.block import Block, Record, Window, permutation
from onefill.data.errors import FieldError
from onefill.errors import DataError

__all__ = ["ParquetRows"]


class ParquetRows:
    """A `.parquet` file. Rows are counted from 1."""

    unit = "row"

    def __init__(self, path: Path) -> None:
        self.path = path

    def blocks(
        self, *, window: Window, offset: int = 0, row: int = 0, key: tuple[int, int] | None = None
    ) -> Iterator[Block]:
        """Blocks from the `offset`-th on; `row` is the number of rows in the blocks before it."""
        import pyarrow as pa  # noqa: PLC0415
        import pyarrow.parquet as pq  # noqa: PLC0415

        try:
            with pq.ParquetFile(self.path, buffer_size=1 << 20, pre_buffer=False) as file:
                yield from self._visit(file, window, offset, row, key)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{self.path}: cannot be read as Parquet ({error}); check the file") from error

    def _visit(
        self, file: Any, window: Window, offset: int, row: int, key: tuple[int, int] | None
    ) -> Iterator[Block]:
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        order = permutation(len(sizes), *key, "row groups") if key else list(range(len(sizes)))
        ordinal = 0
        for group in order:
            per_block = _rows_a_block(file.metadata.row_group(group), window)
            count = -(-sizes[group] // per_block)
            if ordinal + count <= offset:
                ordinal += count
                continue
            first = starts[group]
            for batch in file.iter_batches(batch_size=per_block, row_groups=[group]):
                if ordinal >= offset:
                    yield _block(batch, first, ordinal, row)
                    row += batch.num_rows
                ordinal += 1
                first += batch.num_rows

    def decode(self, record: Record) -> Any:
        """The row as Python values: lists, dicts, strings, numbers, bytes."""
        batch, i = record.raw
        try:
            return {name: column[i].as_py() for name, column in zip(batch.schema.names, batch.columns, strict=True)}
        except (ValueError, UnicodeDecodeError) as error:
            raise FieldError("", f"a cell cannot be read ({error})", "write the column again") from None


def _rows_a_block(group: Any, window: Window) -> int:
    """Rows that take about `window.bytes` uncompressed, so that a file of images is read in small steps."""
    a_row = max(1, group.total_byte_size // max(1, group.num_rows))
    return int(max(1, min(window.rows, window.bytes // a_row)))


def _block(batch: Any, first: int, ordinal: int, row: int) -> Block:
    records = [Record(first + i + 1, (batch, i)) for i in range(batch.num_rows)]
    return Block(records, ordinal, row, ordinal + 1, row + batch.num_rows)
