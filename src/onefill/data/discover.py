"""From what the user typed to files: paths, directories, globs.

Invariants: the order is sorted and so the same everywhere; nothing is opened, and a path that leads nowhere is
an error here, before the first request leaves.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from onefill.data.block import DataFile
from onefill.data.fields import Fields
from onefill.data.files import FileSource
from onefill.data.jsonl import JsonLines
from onefill.data.parquet import ParquetRows
from onefill.errors import DataError

__all__ = ["SUFFIXES", "find_files", "open_files"]

SUFFIXES = (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".parquet")


def open_files(
    paths: Sequence[str | Path],
    *,
    fields: Fields | None = None,
    shuffle_seed: int | None = None,
    epochs: int | None = 1,
) -> FileSource:
    """A source over files, directories and globs.

    Args:
        paths: each a file, a directory (its data files, not those of directories below), or a glob.
        fields: which key holds what.
        shuffle_seed: shuffles with this seed; None keeps the order.
        epochs: passes over the data; None goes on for ever.

    Raises:
        DataError: a path leads nowhere, a directory or glob holds no data, a file is empty or of unknown type.
    """
    found = [file for path in paths for file in find_files(path)]
    unique = list(dict.fromkeys(found))
    return FileSource([_open(path) for path in unique], fields=fields, shuffle_seed=shuffle_seed, epochs=epochs)


def find_files(path: str | Path) -> list[Path]:
    """The data files that one path stands for, sorted.

    Raises:
        DataError: there are none.
    """
    at = Path(path)
    known = ", ".join(SUFFIXES)
    if at.is_dir():
        inside = sorted(child for child in at.iterdir() if child.is_file() and child.name.endswith(SUFFIXES))
        if not inside:
            raise DataError(f"{at}: the directory holds no data files; put files of {known} there")
        return [_checked(child) for child in inside]
    if at.is_file():
        if not at.name.endswith(SUFFIXES):
            raise DataError(f"{at}: unknown type of file; use one of {known}")
        return [_checked(at)]
    if glob.has_magic(str(path)):
        matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
        inside = [match for match in matches if match.is_file() and match.name.endswith(SUFFIXES)]
        if not inside:
            raise DataError(f"{path}: no data file matches; check the pattern (types are {known})")
        return [_checked(match) for match in inside]
    raise DataError(f"{at}: no such file or directory; check the path (now in {Path.cwd()})")


def _checked(path: Path) -> Path:
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty; remove it, or check what wrote it")
    return path


def _open(path: Path) -> DataFile:
    return ParquetRows(path) if path.name.endswith(".parquet") else JsonLines(path)
