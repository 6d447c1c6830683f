"""Prompts and their media, before anything is loaded or sent."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from onefill.types.arrays import TokenArray, token_array

__all__ = ["Media", "Modality", "Prompt"]


class Modality(StrEnum):
    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


@dataclass(frozen=True, slots=True)
class Media:
    """One image, video or audio clip of a prompt, not yet loaded.

    Args:
        modality: what it is.
        source: a path, a URL, a data URL, or the file's bytes.
    """

    modality: Modality
    source: str | bytes

    def __post_init__(self) -> None:
        if not self.source:
            raise ValueError(f"{self.modality} is empty")

    @property
    def digest(self) -> str:
        """SHA-256 of the source (the bytes where bytes were given, else the path or URL), 64 hex digits."""
        raw = self.source if isinstance(self.source, bytes) else self.source.encode()
        return hashlib.sha256(raw).hexdigest()

    def reference(self) -> dict[str, str]:
        """What may be saved of it: never the bytes, never a data URL's body."""
        shown = "" if isinstance(self.source, bytes) or self.source.startswith("data:") else self.source
        return {"modality": str(self.modality), "source": shown, "sha256": self.digest}

    def __repr__(self) -> str:
        return f"Media({self.modality}, {self.reference()['source'] or self.digest[:12]})"


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One training question.

    Exactly one of `text`, `messages` and `tokens` says what the user gave; `tokens` may be added later by
    tokenisation (`with_tokens`) and is what engines are sent.

    Args:
        id: names the prompt in results and errors.
        text: the prompt as a string.
        messages: chat messages, each a mapping with at least `role` and `content`.
        tokens: token ids, int32, shape [prompt tokens].
        media: images, video and audio in the order of their placeholders.
        label: the reference answer, passed to the reward untouched.
        metadata: anything else of the row, passed through.
    """

    id: str
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    tokens: TokenArray | None = None
    media: tuple[Media, ...] = ()
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError("a prompt needs an id")
        if self.text is None and self.messages is None and self.tokens is None:
            raise ValueError(f"prompt {self.id}: needs text, messages or token ids")
        if self.text is not None and self.messages is not None:
            raise ValueError(f"prompt {self.id}: has both text and messages")
        if self.text == "" or self.messages == () or (self.tokens is not None and self.tokens.size == 0):
            raise ValueError(f"prompt {self.id}: is empty")

    def with_tokens(self, tokens: Sequence[int] | TokenArray) -> Prompt:
        """The same prompt with its token ids filled in."""
        return Prompt(
            id=self.id,
            text=self.text,
            messages=self.messages,
            tokens=token_array(tokens),
            media=self.media,
            label=self.label,
            metadata=self.metadata,
        )
