"""Which key of a row holds what.

Invariants: a key that the user named must be there, in every row; where none was named, the first of the
usual names that the row has is taken. A dotted key walks into objects (`reward_model.ground_truth`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onefill.data.errors import FieldError

__all__ = ["MISSING", "Fields"]

_USUAL: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt", "messages", "question", "problem", "input_ids"),
    "label": ("label", "answer", "solution", "ground_truth", "reward_model.ground_truth"),
    "image": ("images", "image"),
    "video": ("videos", "video"),
    "audio": ("audios", "audio"),
    "id": ("id", "uid"),
    "metadata": ("metadata",),
}


class _Missing:
    """Stands for a key that is not there, since null is a value."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING = _Missing()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """The keys of a row, each a name, a dotted path, or None to detect it.

    Args:
        prompt: a string, chat messages, or token ids (`prompt`, `messages`, `question`, `problem`, `input_ids`).
        label: the reference answer (`label`, `answer`, `solution`, `ground_truth`, `reward_model.ground_truth`).
        image: one image or a list (`images`, `image`).
        video: one video or a list (`videos`, `video`).
        audio: one clip or a list (`audios`, `audio`).
        id: names the prompt (`id`, `uid`).
        metadata: an object that is passed through. Not named, everything that is left of the row is passed too.
    """

    prompt: str | None = None
    label: str | None = None
    image: str | None = None
    video: str | None = None
    audio: str | None = None
    id: str | None = None
    metadata: str | None = None

    def take(self, row: Mapping[str, Any], name: str) -> tuple[str, Any]:
        """The key and the value of one field; `("", MISSING)` where nothing was named and nothing found.

        Raises:
            FieldError: the user named a key that the row lacks.
        """
        named: str | None = getattr(self, name)
        if named is not None:
            value = _walk(row, named)
            if value is MISSING:
                raise FieldError(
                    named,
                    "the row does not have it",
                    f"name the key that holds the {name} (the row has {', '.join(sorted(row)[:12])})",
                )
            return named, value
        for key in _USUAL[name]:
            value = _walk(row, key)
            if value is not MISSING:
                return key, value
        return "", MISSING

    @staticmethod
    def usual(name: str) -> tuple[str, ...]:
        """The keys that are looked for where none is named."""
        return _USUAL[name]


def _walk(row: Mapping[str, Any], key: str) -> Any:
    if key in row:
        return row[key]
    at: Any = row
    for part in key.split("."):
        if not isinstance(at, Mapping) or part not in at:
            return MISSING
        at = at[part]
    return at
