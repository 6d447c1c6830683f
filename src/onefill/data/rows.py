"""One row of a data file becomes one `Prompt`, or one `FieldError` that says why not.

Invariants: nothing of the file is trusted; what leaves is a valid `Prompt` that can be written again (see
`plain`), and whose metadata holds no bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onefill.data.attachments import media_list
from onefill.data.chat import check_messages, check_order, place_media
from onefill.data.errors import FieldError, shown
from onefill.data.fields import MISSING, Fields
from onefill.data.plain import check_plain
from onefill.types import Media, Modality, Prompt, TokenArray, token_array

__all__ = ["prompt_from_row"]


def prompt_from_row(row: Any, *, fields: Fields, default_id: str, base: Path, epoch: int = 0) -> Prompt:
    """The prompt that a row describes.

    Args:
        row: what the file holds; must be an object.
        fields: which key holds what.
        default_id: the id where the row has none.
        base: directory that relative media paths start at.
        epoch: from the second epoch on, ids get a suffix (`q7#2`), which tells the epochs apart.

    Raises:
        FieldError: the row is not usable.
    """
    if not isinstance(row, Mapping):
        hint = 'a row looks like {"prompt": "...", "label": "..."}'
        raise FieldError("", f"is {type(row).__name__} ({shown(row)}), not an object", hint)
    used: set[str] = set()
    identity = _id(row, fields, default_id, used)
    if epoch:
        identity = f"{identity}#{epoch + 1}"
    media = _media(row, fields, base, used)
    text, messages, tokens, media = _prompt(row, fields, base, media, used)
    key, label = fields.take(row, "label")
    used.add(key)
    label = None if label is MISSING else _plain(label)
    check_plain(label, key)
    return Prompt(
        id=identity,
        text=text,
        messages=messages,
        tokens=tokens,
        media=media,
        label=label,
        metadata=_metadata(row, fields, used),
    )


def _id(row: Mapping[str, Any], fields: Fields, default_id: str, used: set[str]) -> str:
    """A name for messages and results; nothing rests on its being unique."""
    key, value = fields.take(row, "id")
    used.add(key)
    if value is MISSING or (value is None and fields.id is None):
        return default_id
    if type(value) is int:
        return str(value)
    if not isinstance(value, str) or not value or not value.isprintable():
        raise FieldError(key, f"is {shown(value)}", "an id is a printable, non-empty string or an integer")
    return value


def _media(row: Mapping[str, Any], fields: Fields, base: Path, used: set[str]) -> tuple[Media, ...]:
    found: tuple[Media, ...] = ()
    for modality in Modality:
        key, value = fields.take(row, str(modality))
        if value is not MISSING:
            used.add(key)
            found += media_list(_plain(value), field=key, modality=modality, base=base)
    return found


def _prompt(
    row: Mapping[str, Any], fields: Fields, base: Path, media: tuple[Media, ...], used: set[str]
) -> tuple[str | None, tuple[Mapping[str, Any], ...] | None, TokenArray | None, tuple[Media, ...]]:
    key, value = fields.take(row, "prompt")
    if value is MISSING:
        wanted = ", ".join(Fields.usual("prompt"))
        has = ", ".join(sorted(map(str, row))[:12]) or "nothing"
        raise FieldError(
            "prompt", f"no prompt: none of {wanted} is there", f"name its key with --prompt-key (has {has})"
        )
    used.add(key)
    tokens: TokenArray | None = None
    if fields.prompt is None and key != "input_ids" and row.get("input_ids") is not None:
        used.add("input_ids")
        tokens = _tokens(_plain(row["input_ids"]), "input_ids")
    value = _plain(value)
    if key.rpartition(".")[2] == "input_ids":
        return None, None, _tokens(value, key), media
    if isinstance(value, str):
        if not value.strip():
            raise FieldError(key, "is empty", "give the prompt some text, or remove the row")
        check_plain(value, key)
        return value, None, tokens, media
    if not isinstance(value, list | tuple):
        hint = "a prompt is a string, a list of messages, or a list of token ids"
        raise FieldError(key, f"is {type(value).__name__} ({shown(value)})", hint)
    if not value:
        raise FieldError(key, "is an empty list", "give messages or token ids, or remove the row")
    if isinstance(value[0], int | float):
        return None, None, _tokens(value, key), media
    check_plain(value, key)
    messages, inside = check_messages(value, field=key, base=base)
    check_order(messages, key)
    if inside and media:
        raise FieldError(key, "has media inside messages and in a field of its own", "keep one of the two")
    return None, place_media(messages, media or inside, field=key), tokens, media or inside


def _tokens(value: Any, field: str) -> TokenArray:
    hint = "token ids are integers from 0 to 2^31-1, in one flat list"
    if not isinstance(value, list | tuple):
        raise FieldError(field, f"is {type(value).__name__} ({shown(value)})", hint)
    if not value:
        raise FieldError(field, "is an empty list", hint)
    for i, token in enumerate(value):
        if type(token) is not int or not 0 <= token < 2**31:
            raise FieldError(f"{field}[{i}]", f"is {shown(token)}", hint)
    return token_array(value)


def _metadata(row: Mapping[str, Any], fields: Fields, used: set[str]) -> dict[str, Any]:
    key, value = fields.take(row, "metadata")
    used.add(key)
    if value is MISSING or value is None:
        own: Mapping[str, Any] = {}
    elif isinstance(value, Mapping):
        own = value
    else:
        raise FieldError(key, f"is {type(value).__name__} ({shown(value)})", "metadata is an object")
    check_plain(own, key)
    if fields.metadata is not None:
        return _without_bytes(own)
    rest = {name: item for name, item in row.items() if name not in used and item is not None}
    for name, item in rest.items():
        check_plain(item, str(name))
    return _without_bytes({**rest, **own})


def _without_bytes(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        str(name): _without_bytes(item) if isinstance(item, Mapping) else item
        for name, item in values.items()
        if not isinstance(item, bytes | bytearray | memoryview)
    }


def _plain(value: Any) -> Any:
    """Numpy arrays and scalars, as pandas and datasets give them, as Python values."""
    return value.tolist() if hasattr(value, "tolist") else value
