"""Images, videos and audio of a row, found but not loaded.

Invariants: what comes out is `Media` whose source is an absolute path of a file that exists, a URL, a data
URL, or bytes; a relative path is relative to the data file. Order is the row's order.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from onefill.data.errors import FieldError, shown
from onefill.types import Media, Modality

__all__ = ["media_list", "media_of"]

_HINT = "give a path, a URL, a data URL, bytes, or an object with bytes or path"
_MAX_PATH = 4096


def media_list(value: Any, *, field: str, modality: Modality, base: Path) -> tuple[Media, ...]:
    """The media in a field that holds one, a list of them, or nothing (null or an empty list).

    Raises:
        FieldError: an entry is not media, or is a path that does not lead to a file.
    """
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        return (media_of(value, field=field, modality=modality, base=base),)
    return tuple(
        media_of(entry, field=f"{field}[{i}]", modality=modality, base=base) for i, entry in enumerate(value)
    )


def media_of(value: Any, *, field: str, modality: Modality, base: Path) -> Media:
    """One image, video or clip.

    Raises:
        FieldError: it is not media, or is a path that does not lead to a file.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return _media(bytes(value), field, modality)
    if isinstance(value, str):
        return _media(_located(value, field, base), field, modality)
    if isinstance(value, Mapping):
        for key in ("bytes", "path", "url", f"{modality}_url", str(modality)):
            if value.get(key) is not None:
                return media_of(value[key], field=f"{field}.{key}", modality=modality, base=base)
        raise FieldError(field, f"an object with keys {sorted(map(str, value))} holds no {modality}", _HINT)
    raise FieldError(field, f"is {type(value).__name__} ({shown(value)}), not a {modality}", _HINT)


def _media(source: str | bytes, field: str, modality: Modality) -> Media:
    if not source:
        raise FieldError(field, f"the {modality} is empty", _HINT)
    return Media(modality=modality, source=source)


def _located(source: str, field: str, base: Path) -> str:
    if source.startswith("data:"):
        if "," not in source:
            raise FieldError(field, "a data URL without a comma", "write data:image/png;base64,<data>")
        return source
    if source.startswith(("http://", "https://")):
        return source
    if source.startswith("file:"):
        source = unquote(urlsplit(source).path)
    if len(source) > _MAX_PATH:
        hint = "prefix base64 with data:image/png;base64, (or the right type)"
        raise FieldError(field, f"{len(source)} characters are no path ({shown(source)})", hint)
    path = os.path.join(base, source)  # an absolute source stays as it is
    if source and not os.path.isfile(path):
        raise FieldError(field, f"no file at {path}", f"relative paths start at {base}: check the path")
    return path if source else ""
