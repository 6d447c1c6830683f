"""Where reading stands, as a value that can be saved as JSON.

Invariants:
- A cursor is the position *behind* an item: reading from it gives exactly the items that an uninterrupted
  reading would have given next, also with shuffling and across epochs.
- It names the source it belongs to (`source`), and a source refuses a cursor of another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from onefill.errors import ConfigError

__all__ = ["Cursor"]

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """The position behind an item of a source.

    Args:
        source: fingerprint of the source: its files, or its task with options.
        seed: shuffle seed, or a task's seed; None for files read in order.
        epoch: passes that were completed.
        file: place of the current file in this epoch's order of files.
        row: records that lie before `offset` in the file (lines, blank ones too, or Parquet rows); for a task,
            the index of the next question.
        offset: byte (JSON lines), or batch (Parquet), where the current block begins.
        taken: items of the current block that were given, in the order in which they are given; 0 for a task.
        good: whether this epoch has given a usable prompt yet (an epoch without any ends the reading).
    """

    source: str
    seed: int | None = None
    epoch: int = 0
    file: int = 0
    row: int = 0
    offset: int = 0
    taken: int = 0
    good: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The cursor as plain JSON values."""
        return {"version": _VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Cursor:
        """The cursor that `to_dict` saved.

        Raises:
            ConfigError: it is of another version, or its fields are not what `to_dict` writes.
        """
        if saved.get("version") != _VERSION:
            raise ConfigError(
                f"the saved cursor has version {saved.get('version')!r}, this release reads {_VERSION}: "
                "start the data from the beginning, or use the release that saved it"
            )
        values = {name: value for name, value in saved.items() if name != "version"}
        want = {field.name for field in fields(cls)}
        if set(values) != want:
            raise ConfigError(f"the saved cursor has fields {sorted(values)}, expected {sorted(want)}")
        for name, value in values.items():
            good = {
                "source": isinstance(value, str),
                "seed": value is None or type(value) is int,
                "good": isinstance(value, bool),
            }.get(name, type(value) is int and value >= 0)
            if not good:
                raise ConfigError(f"the saved cursor's {name} is {value!r}, which no cursor holds")
        return cls(**values)
