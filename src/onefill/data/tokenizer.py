"""Text and messages to token ids, without importing transformers where the model has a tokenizer.json.

Invariants:
- The ids equal those of transformers 5.24: `encode(text)` those of `tokenizer(text)`, `chat(messages)` those of
  `apply_chat_template(messages, add_generation_prompt=True)`. Tested against it.
- A loaded tokenizer never changes, so threads may use it at once.
- Importing transformers takes about 4 s; a request should leave within 2 s of the start. It is the fallback.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from onefill.data.template import ChatTemplate
from onefill.errors import ConfigError, DataError
from onefill.types import TokenArray

__all__ = ["PLACEHOLDERS", "Backend", "Tokenizer"]

PLACEHOLDERS = (
    "<|image_pad|>",
    "<|video_pad|>",
    "<|audio_pad|>",
    "<image>",
    "<video>",
    "<audio>",
    "<|image|>",
    "<|video|>",
    "<|audio|>",
    "<image_soft_token>",
    "<audio_soft_token>",
    "<IMG_CONTEXT>",
    "<|AUDIO|>",
    "<|IMAGE|>",
    "<|VIDEO|>",
    "[IMG]",
)


class Backend(Protocol):
    """What turns text into ids and back."""

    def encode(self, text: str, *, special: bool) -> Sequence[int]:
        """Ids of a text, with or without the special tokens that the tokenizer adds around it."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """The text of ids."""
        ...

    def token_to_id(self, token: str) -> int | None:
        """The id of one token of the vocabulary."""
        ...

    @property
    def size(self) -> int:
        """Ids in the vocabulary, added tokens included: the largest id plus 1."""
        ...


class Tokenizer:
    """A model's tokenizer and chat template.

    Args:
        backend: what encodes and decodes.
        template: the chat template; None where the model has none.
        origin: where it was loaded from, for messages.
        eos: the end-of-sequence token.
        pad: the padding token; the end-of-sequence token where there is none.
    """

    def __init__(
        self, *, backend: Backend, template: ChatTemplate | None, origin: str, eos: str | None, pad: str | None
    ) -> None:
        self._backend = backend
        self._template = template
        self._origin = origin
        self.vocab_size: int = backend.size
        self.eos_id: int | None = None if eos is None else backend.token_to_id(eos)
        padding = None if pad is None else backend.token_to_id(pad)
        self.pad_id: int | None = self.eos_id if padding is None else padding
        ids = (backend.token_to_id(token) for token in PLACEHOLDERS)
        self.placeholder_ids: frozenset[int] = frozenset(i for i in ids if i is not None)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """The tokenizer in a directory, or of a model on the hub.

        Args:
            path: a directory with tokenizer.json, a tokenizer.json, a directory that transformers can load, or
                a hub name (`org/model`).

        Raises:
            ConfigError: there is no tokenizer, it is broken, or what would load it is not installed.
        """
        from onefill.data.loading import load_tokenizer  # noqa: PLC0415  it imports this module

        return load_tokenizer(path)

    @property
    def has_template(self) -> bool:
        """Whether messages can be encoded."""
        return self._template is not None

    def encode(self, text: str) -> TokenArray:
        """Ids of a text as it stands, int32, shape [tokens]; special tokens written in it count as such."""
        return _ids(self._backend.encode(text, special=True))

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Messages as the text that the model reads, up to where its answer begins.

        Raises:
            ConfigError: the model has no chat template.
            DataError: the template refuses the messages.
        """
        if self._template is None:
            raise ConfigError(
                f"the tokenizer of {self._origin} has no chat template, so messages cannot be sent: use an "
                "instruct model, put a chat_template.jinja beside its tokenizer.json, or give prompts as strings "
                "with --raw"
            )
        return self._template.render(messages)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> TokenArray:
        """Ids of messages, int32, shape [tokens]. Raises as `render`, and DataError where nothing comes out."""
        ids = _ids(self._backend.encode(self.render(messages), special=False))
        if not ids.size:
            raise DataError(f"the chat template of {self._origin} renders the messages to nothing; check them")
        return ids

    def decode(self, ids: Sequence[int] | TokenArray, skip_special_tokens: bool = True) -> str:
        """The text of ids."""
        plain = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        return self._backend.decode(plain, skip_special=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """The id of one token, or None where the vocabulary lacks it."""
        return self._backend.token_to_id(token)


def _ids(ids: Sequence[int]) -> TokenArray:
    array = np.array(ids, dtype=np.int32)
    array.setflags(write=False)
    return array
