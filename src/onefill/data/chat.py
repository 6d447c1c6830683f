"""Chat messages of a row: checked, and with their media in place.

Invariants:
- A message that leaves here is a dict with a known `role` and a `content` that is a string or a list of parts,
  each with a `type`; a media part holds no media any more, since that is in `Prompt.media` in the same order.
- The number of media parts of each modality equals the number of media of that modality, unless text markers
  or parts give no place at all: then media go before the text of the first user message, as TRL does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onefill.data.attachments import media_of
from onefill.data.errors import FieldError, shown
from onefill.types import Media, Modality

__all__ = ["check_messages", "check_order", "place_media", "with_system"]

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_MARKER = re.compile(r"<(image|video|audio)>")
_PART_KEYS = {
    "image": Modality.IMAGE,
    "image_url": Modality.IMAGE,
    "video": Modality.VIDEO,
    "video_url": Modality.VIDEO,
    "audio": Modality.AUDIO,
    "audio_url": Modality.AUDIO,
    "input_audio": Modality.AUDIO,
}


def check_messages(
    value: Sequence[Any], *, field: str, base: Path
) -> tuple[tuple[dict[str, Any], ...], tuple[Media, ...]]:
    """Messages as they are kept, and the media that stood inside their parts.

    Raises:
        FieldError: a message is not one; the field names it, for example `prompt[1].role`.
    """
    messages: list[dict[str, Any]] = []
    media: list[Media] = []
    for i, raw in enumerate(value):
        where = f"{field}[{i}]"
        if not isinstance(raw, Mapping):
            hint = 'a chat message looks like {"role": "user", "content": "..."}'
            raise FieldError(where, f"is {type(raw).__name__}, not a message", hint)
        role = raw.get("role")
        if role not in _ROLES:
            raise FieldError(f"{where}.role", f"is {shown(role)}", f"use one of {', '.join(sorted(_ROLES))}")
        message = {key: item for key, item in raw.items() if item is not None}
        message["content"] = _content(raw, f"{where}.content", base, media)
        messages.append(message)
    if not messages:
        raise FieldError(field, "is an empty list", "give at least one message")
    return tuple(messages), tuple(media)


def check_order(messages: Sequence[Mapping[str, Any]], field: str) -> None:
    """Refuses a conversation that ends with the answer.

    Raises:
        FieldError: the last message is not one that the model would answer.
    """
    last = messages[-1]["role"]
    if last in {"assistant", "system", "developer"}:
        hint = "end with a user or tool message, which the model then answers"
        raise FieldError(f"{field}[{len(messages) - 1}].role", f"the last message is the {last}'s", hint)
    if all(not m["content"] for m in messages if m["role"] != "system"):
        raise FieldError(field, "every message is empty", "give the user's message some content")


def _content(raw: Mapping[str, Any], field: str, base: Path, media: list[Media]) -> str | list[dict[str, Any]]:
    content = raw.get("content")
    if isinstance(content, str):
        return content
    if content is None and raw.get("role") == "assistant" and raw.get("tool_calls"):
        return ""
    if not isinstance(content, list | tuple):
        raise FieldError(field, f"is {type(content).__name__}", "give a string or a list of parts")
    return [_part(part, f"{field}[{i}]", base, media) for i, part in enumerate(content)]


def _part(part: Any, field: str, base: Path, media: list[Media]) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise FieldError(field, f"is {type(part).__name__}", 'a part looks like {"type": "text", "text": "..."}')
    kind = part.get("type")
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise FieldError(f"{field}.text", f"is {shown(part.get('text'))}", "give a string")
        return {"type": "text", "text": part["text"]}
    modality = _PART_KEYS.get(str(kind))
    if modality is None:
        raise FieldError(f"{field}.type", f"is {shown(kind)}", "use text, image, video or audio")
    for key in (str(kind), str(modality), "url", "path", "bytes"):
        if part.get(key) is not None:
            media.append(media_of(part[key], field=f"{field}.{key}", modality=modality, base=base))
            break
    return {"type": str(modality)}


def with_system(messages: Sequence[Mapping[str, Any]], system: str | None) -> list[Mapping[str, Any]]:
    """The messages with `system` in front; a system message of their own wins over it."""
    if system and messages[0]["role"] not in {"system", "developer"}:
        return [{"role": "system", "content": system}, *messages]
    return list(messages)


def place_media(
    messages: Sequence[Mapping[str, Any]], media: Sequence[Media], *, field: str
) -> tuple[Mapping[str, Any], ...]:
    """The messages with a part for each image, video and clip, so that a chat template shows its place.

    `<image>`, `<video>` and `<audio>` in user text become parts, as in verl and slime.

    Raises:
        FieldError: markers or parts of a modality do not match the number of its media.
    """
    if not media and not any(isinstance(m["content"], list) for m in messages):
        return tuple(messages)
    given = {m: sum(1 for x in media if x.modality is m) for m in Modality}
    parts = {m: _count_parts(messages, m) for m in Modality}
    split = {m for m in Modality if given[m] and not parts[m]}
    out = [_split(m, split) if m["role"] in {"user", "tool"} else m for m in messages]
    for modality in Modality:
        found = _count_parts(out, modality)
        if found == 0 and given[modality]:
            out = _lead(out, modality, given[modality], field)
        elif found != given[modality]:
            raise FieldError(
                field,
                f"has {found} places for {given[modality]} {modality}(s)",
                f"give one {modality} for each <{modality}> marker or {modality} part",
            )
    return tuple(out)


def _count_parts(messages: Sequence[Mapping[str, Any]], modality: Modality) -> int:
    return sum(
        1
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == modality
    )


def _split(message: Mapping[str, Any], modalities: set[Modality]) -> Mapping[str, Any]:
    content = message["content"]
    texts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    parts: list[dict[str, Any]] = []
    for part in texts:
        if part["type"] != "text":
            parts.append(part)
            continue
        for i, piece in enumerate(_MARKER.split(part["text"])):
            if i % 2 == 0:
                parts += [{"type": "text", "text": piece}] if piece else []
            elif piece in modalities:
                parts.append({"type": piece})
            else:
                parts.append({"type": "text", "text": f"<{piece}>"})
    if isinstance(content, str) and all(part["type"] == "text" for part in parts):
        return message
    return {**message, "content": parts}


def _lead(
    messages: Sequence[Mapping[str, Any]], modality: Modality, count: int, field: str
) -> list[Mapping[str, Any]]:
    for i, message in enumerate(messages):
        if message["role"] == "user":
            content = message["content"]
            texts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            led = {**message, "content": [{"type": str(modality)} for _ in range(count)] + texts}
            return [*messages[:i], led, *messages[i + 1 :]]
    raise FieldError(field, f"no user message to put the {modality} in", "add a user message")
