"""Errors about data, with their place.

One bad row is one `RowError` that names file, row and field, says what is wrong and what to do about it.
"""

from __future__ import annotations

from onefill.errors import DataError

__all__ = ["FieldError", "RowError"]

_SHOWN = 60


def shown(value: object) -> str:
    """A value, short enough for a message."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


class FieldError(ValueError):
    """One field of a row is wrong; where the row stands is added by whoever reads it.

    Args:
        field: the field, for example `prompt[1].role`; empty for the row as a whole.
        reason: what is wrong with it.
        hint: what to do.
    """

    def __init__(self, field: str, reason: str, hint: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason
        self.hint = hint


class RowError(DataError):
    """A row that cannot become a prompt.

    Args:
        file: path of the file, or the task's name.
        unit: `line` or `row`.
        number: counted from 1; 0 where the file as a whole is at fault.
        field: the field at fault; empty for the row as a whole.
        reason: what is wrong.
        hint: what to do.
    """

    def __init__(self, *, file: str, unit: str, number: int, field: str, reason: str, hint: str) -> None:
        place = f"{file}, {unit} {number}" if number else file
        about = f", field {field}" if field else ""
        super().__init__(f"{place}{about}: {reason}; {hint}")
        self.file = file
        self.number = number
        self.field = field
        self.reason = reason
