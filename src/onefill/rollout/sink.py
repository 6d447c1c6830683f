"""Writes delivered groups to `samples.parquet`, one row a sample.

Invariants:
- Whole groups only, in the order in which they were delivered.
- Memory is bounded: rows go to disk every `ROWS_A_WRITE` rows, off the event loop.
- The file appears under its name only when it is readable (a Parquet file without its footer is not) and holds
  every group that was added; until then, and for ever after a failed write, it is `samples.parquet.part`.
- A row that cannot be written as it is (a lone surrogate, a huge integer) is made writable; it costs no other row.
- No media, no base64: of media a row holds a reference and a hash, inside `metadata`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from onefill.errors import ConfigError, InfraError
from onefill.types import Group, Sample

__all__ = ["SCHEMA", "NullSink", "ParquetSink", "Sink"]

ROWS_A_WRITE = 1024

_TOKENS = pa.list_(pa.field("element", pa.int32(), nullable=False))
SCHEMA = pa.schema(
    [
        ("group_id", pa.string()),
        ("prompt_id", pa.string()),
        ("sample_index", pa.int32()),
        ("prompt_tokens", _TOKENS),
        ("response_tokens", _TOKENS),
        ("logprobs", pa.list_(pa.field("element", pa.float32(), nullable=False))),
        ("loss_mask", pa.list_(pa.field("element", pa.uint8(), nullable=False))),
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("status", pa.string()),
        ("reward", pa.float64()),
        ("reward_error", pa.string()),
        ("label", pa.string()),
        ("weight_version", pa.string()),
        ("engine", pa.string()),
        ("request_id", pa.string()),
        ("strategy", pa.string()),
        ("cached_tokens", pa.int32()),
        ("metadata", pa.string()),
    ]
)
"""One row a sample. `label` and `metadata` are strings; what is not a string is JSON. `weight_version` is the one
that produced the last token. `reward` is null where it failed, and `reward_error` says why."""

_REPEATING = ["group_id", "prompt_id", "finish_reason", "status", "label", "weight_version", "engine", "strategy"]


class Sink(Protocol):
    """Takes delivered groups."""

    def add(self, group: Group) -> None: ...
    async def drain(self) -> None: ...
    async def close(self) -> None: ...


class NullSink:
    """Keeps nothing."""

    def add(self, group: Group) -> None:
        """Forgets the group."""

    async def drain(self) -> None:
        """Does nothing."""

    async def close(self) -> None:
        """Does nothing."""


class ParquetSink:
    """Writes `samples.parquet` in a directory.

    Args:
        directory: made if it is missing.

    Files of an earlier run stay until this run's is complete, and for good where this run delivers no group: a typo
    must not cost a night's samples. `samples.parquet` and `summary.json` are never of different runs.

    Raises:
        ConfigError: the directory cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "samples.parquet"
        self._part = directory / "samples.parquet.part"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(self._part, SCHEMA, compression="zstd", use_dictionary=_REPEATING)
        except OSError as error:
            raise ConfigError(f"cannot write to {directory}: {error}; choose another --out") from error
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="onefill-sink")
        self._groups: list[Group] = []
        self._rows = 0
        self._any = False
        self._failed = False

    def add(self, group: Group) -> None:
        """Takes a delivered group. From here on it will be in the file."""
        self._any = True
        self._groups.append(group)
        self._rows += len(group.samples)

    async def drain(self) -> None:
        """Writes when enough rows have gathered, and waits for it: a slow disk holds the run back.

        Raises:
            InfraError: the disk refused.
        """
        if self._rows >= ROWS_A_WRITE:
            await self._submit(last=False)

    async def close(self) -> None:
        """Writes what is left and gives the file its name, where there is any. More calls do nothing.

        Raises:
            InfraError: the disk refused.
        """
        if self._writer.is_open:
            await self._submit(last=True)
            self._thread.shutdown(wait=False)

    async def _submit(self, *, last: bool) -> None:
        groups, self._groups, self._rows = self._groups, [], 0
        writing = asyncio.get_running_loop().run_in_executor(self._thread, self._write, groups, last)
        try:
            await asyncio.shield(writing)  # one thread, in order: a cancelled waiter leaves the write whole
        except (OSError, pa.ArrowException) as error:
            raise InfraError(
                f"cannot write {self._part}: {error}; what was written stays there; free the disk and run again"
            ) from error

    def _write(self, groups: Sequence[Group], last: bool) -> None:
        try:
            if groups and not self._failed:
                self._writer.write_table(_table(groups))
        except BaseException:
            self._failed = True
            raise
        finally:
            if last:
                self._writer.close()
        if last and not self._any:
            self._part.unlink()
        elif last and not self._failed:
            self.path.with_name("summary.json").unlink(missing_ok=True)
            self._part.replace(self.path)


def _table(groups: Sequence[Group]) -> pa.Table:
    rows = [(group, sample) for group in groups for sample in group.samples]
    labels = {id(group): _label(group.prompt.label) for group in groups}
    ids = {id(group): _text(group.id) for group in groups}
    metadata = {id(group): _metadata(group) for group in groups}
    samples = [sample for _, sample in rows]
    columns: dict[str, Any] = {
        "group_id": [ids[id(g)] for g, _ in rows],
        "prompt_id": [_text((s.prompt or g.prompt).id) for g, s in rows],
        "sample_index": [s.index for s in samples],
        "prompt_tokens": _lists([_prompt_tokens(g, s) for g, s in rows], np.int32),
        "response_tokens": _lists([s.tokens for s in samples], np.int32),
        "logprobs": _lists([s.logprobs for s in samples], np.float32),
        "loss_mask": _lists([s.loss_mask for s in samples], np.uint8),
        "text": [s.text for s in samples],
        "finish_reason": [s.finish_reason for s in samples],
        "status": [s.status for s in samples],
        "reward": [s.reward for s in samples],
        "reward_error": [s.reward_error or None for s in samples],
        "label": [labels[id(g)] for g, _ in rows],
        "weight_version": [s.versions[-1].version if s.versions else None for s in samples],
        "engine": [s.engine for s in samples],
        "request_id": [s.request_id for s in samples],
        "strategy": [g.strategy for g, _ in rows],
        "cached_tokens": [s.cached_tokens for s in samples],
        "metadata": [metadata[id(g)] for g, _ in rows],
    }
    arrays = [
        columns[field.name]
        if isinstance(columns[field.name], pa.Array)
        else pa.array(columns[field.name], field.type)
        for field in SCHEMA
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _prompt_tokens(group: Group, sample: Sample) -> Any:
    tokens = (sample.prompt or group.prompt).tokens
    return tokens if tokens is not None else np.empty(0, dtype=np.int32)


def _lists(arrays: Sequence[Any], dtype: type[np.generic]) -> pa.Array:
    offsets = np.zeros(len(arrays) + 1, dtype=np.int32)
    np.cumsum([a.size for a in arrays], out=offsets[1:])
    values = np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype)
    item = pa.field("element", pa.from_numpy_dtype(np.dtype(dtype)), nullable=False)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), type=pa.list_(item))


def _label(value: Any) -> str | None:
    if value is None:
        return None
    return _text(value) if isinstance(value, str) else _json(value)


def _text(value: str) -> str:
    """The string, with a question mark where it is no Unicode text (a lone surrogate, which UTF-8 cannot hold)."""
    return value if value.isascii() else value.encode(errors="replace").decode()


def _metadata(group: Group) -> str:
    metadata = dict(group.prompt.metadata)
    if group.prompt.media:
        metadata["media"] = [media.reference() for media in group.prompt.media]
    return _json(metadata)


def _json(value: Any) -> str:
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        return orjson.dumps(value, default=str, option=options).decode()
    except orjson.JSONEncodeError:  # an integer past 64 bits, a lone surrogate
        return json.dumps(value, default=str, skipkeys=True)
