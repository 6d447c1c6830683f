"""JSON lines, plain or gzipped, read a block at a time.

Invariants: a line is read whole or refused for its length, never held beyond `MAX_LINE`; offsets are bytes of
the (uncompressed) file; blank lines are passed over but counted, so numbers match an editor's.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import orjson

from onefill.data.block import Block, Record, Window
from onefill.data.errors import FieldError
from onefill.data.plain import check_plain, holds_huge_float
from onefill.errors import DataError

__all__ = ["MAX_LINE", "JsonLines"]

MAX_LINE = 256 * 1024 * 1024
_BOM = b"\xef\xbb\xbf"


class JsonLines:
    """A `.jsonl` or `.json` file with one JSON object a line.

    Args:
        path: the file; `.gz` is unpacked on the way.
        max_line: bytes a line may have.
    """

    unit = "line"

    def __init__(self, path: Path, *, max_line: int = MAX_LINE) -> None:
        self.path = path
        self._max_line = max_line

    def blocks(
        self, *, window: Window, offset: int = 0, row: int = 0, key: tuple[int, int] | None = None
    ) -> Iterator[Block]:
        """Blocks in file order. `key` changes nothing: a JSON lines file cannot be entered at a random row."""
        del key
        try:
            with self._open() as file:
                file.seek(offset)
                while True:
                    block = self._block(file, window, offset, row)
                    if block.next_offset == offset:
                        return
                    yield block
                    offset, row = block.next_offset, block.next_row
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{self.path}, after line {row}: cannot be read ({error}); check the file") from error

    def _open(self) -> IO[bytes]:
        if self.path.suffix == ".gz":
            return cast(IO[bytes], gzip.open(self.path, "rb"))
        return self.path.open("rb", buffering=1 << 18)

    def _block(self, file: IO[bytes], window: Window, offset: int, row: int) -> Block:
        records: list[Record] = []
        at, number = offset, row
        readline, limit = file.readline, self._max_line + 1
        while number - row < window.rows and at - offset < window.bytes:
            line = readline(limit)
            if not line:
                break
            number += 1
            at += len(line)
            if len(line) == limit and not line.endswith(b"\n"):
                at += _skip_line(file)
                hint = "is this file JSON lines, one object a line?"
                error = FieldError("", f"the line is longer than {self._max_line} bytes", hint)
                records.append(Record(number, b"", error))
            elif not line.isspace():
                records.append(Record(number, line.removeprefix(_BOM) if number == 1 else line))
        return Block(records, offset, row, at, number)

    def decode(self, record: Record) -> Any:
        """The JSON value of a line. NaN and Infinity, which Python writes and JSON lacks, are read too."""
        try:
            value = orjson.loads(record.raw)
        except orjson.JSONDecodeError as error:
            return _second_reading(record, f"{error.msg} at column {error.colno}")
        return _second_reading(record, "") if holds_huge_float(value) else value


def _second_reading(record: Record, first: str) -> Any:
    """What json makes of a line that orjson refused or rounded; it lets in more than can be written later."""
    try:
        text = record.raw.decode()
    except UnicodeDecodeError as error:
        reason = f"byte {error.start + 1} of the line is not UTF-8"
        raise FieldError("", reason, "save the file as UTF-8") from None
    try:
        value = json.loads(text, parse_int=_integer)
    except (json.JSONDecodeError, RecursionError):
        pass
    else:
        check_plain(value, "")
        return value
    if record.number == 1 and text.strip() in {"[", "{"}:
        hint = "this is one JSON document over many lines: convert it, for example with jq -c '.[]'"
    else:
        hint = "each line must be one whole JSON object"
    raise FieldError("", f"invalid JSON ({first})", hint) from None


def _integer(digits: str) -> int:
    """Beyond 64 bits it is refused anyway, and beyond 4,300 digits Python refuses to read it."""
    return int(digits[:100])


def _skip_line(file: IO[bytes]) -> int:
    skipped = 0
    while piece := file.readline(1 << 20):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped
