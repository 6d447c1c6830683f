"""Values that can be written again: what is let in must go into JSON and Parquet, hours later, with the results.

Invariants: a value that passes has no lone surrogates (they are no UTF-8), no integers beyond 64 bits, and is not
nested too deep. One that does not pass is refused where it is read, by the name of the field inside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from onefill.data.errors import FieldError, shown

__all__ = ["check_plain", "holds_huge_float"]

_DEPTH = 200
_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def check_plain(value: Any, field: str) -> None:
    """Refuses what could not be written.

    Raises:
        FieldError: the field names the place, for example `metadata.scores[3]`.
    """
    kind = type(value)
    if value is None or kind is float or kind is bool or (kind is str and value.isascii()):
        return
    try:
        orjson.dumps(value, default=_nothing, option=_OPTIONS)
    except TypeError as error:
        for place, inner, depth in _walk(value, field):
            _check_one(place, inner, depth)
        raise FieldError(field, f"cannot be written as JSON ({error})", "give plain values") from None


def holds_huge_float(value: Any) -> bool:
    """Whether a float of 2^63 or more is inside: orjson 3.13 reads an integer beyond 64 bits as one, in silence."""
    stack = [value]
    while stack:
        at = stack.pop()
        if type(at) is dict:
            stack.extend(at.values())
        elif type(at) is list:
            if not {float, dict, list}.isdisjoint(map(type, at)):
                stack.extend(at)
        elif type(at) is float and abs(at) >= 2**63:
            return True
    return False


def _nothing(value: Any) -> None:
    """Other objects (dates of Parquet, bytes) are written as text or left out."""


def _walk(value: Any, field: str) -> Iterator[tuple[str, Any, int]]:
    """Everything inside a value, with its place and depth; no recursion, which a file could drive too far."""
    stack: list[tuple[str, Any, int]] = [(field, value, 0)]
    while stack:
        place, at, depth = stack.pop()
        yield place, at, depth
        if depth > _DEPTH:
            continue
        if isinstance(at, Mapping):
            for key, item in list(at.items())[::-1]:
                inner = f"{place}.{_readable(str(key))}" if place else _readable(str(key))
                stack += [(inner, item, depth + 1), (inner, key, depth + 1)]
        elif isinstance(at, list | tuple):
            stack += [(f"{place}[{i}]", item, depth + 1) for i, item in list(enumerate(at))[::-1]]


def _check_one(field: str, value: Any, depth: int) -> None:
    if depth > _DEPTH:
        top = field.partition(".")[0].partition("[")[0]
        raise FieldError(top, f"is nested more than {_DEPTH} deep", "flatten it")
    if isinstance(value, str) and _readable(value) != value:
        at = next(i for i, letter in enumerate(value) if "\ud800" <= letter <= "\udfff")
        reason = f"has half a surrogate pair, \\u{ord(value[at]):04x}, at character {at + 1}"
        raise FieldError(field, reason, "it is no valid text: write the whole character, or remove it")
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise FieldError(field, f"is an integer beyond 64 bits ({shown(value)})", "write it as a string")


def _readable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
