"""Media placeholder ids that a model made up.

A model can sample `<|image_pad|>` like any other token. Training then counts one image token more than there are
image features and crashes hours later ("image features and image tokens do not match"). So such ids never reach
a sample: they are replaced by the pad id, their logprobs stay, and the number is kept on the completion.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onefill.types import TokenArray

__all__ = ["Placeholders"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholders:
    """Which ids stand for media, and what replaces them in a response.

    Args:
        ids: placeholder ids of all modalities, for example those of `<|image_pad|>` and `<|video_pad|>`.
        pad_id: the tokenizer's pad id.

    Raises:
        ValueError: the pad id is itself a placeholder, or an id is negative.
    """

    ids: frozenset[int]
    pad_id: int

    def __post_init__(self) -> None:
        if self.pad_id in self.ids:
            raise ValueError(f"pad id {self.pad_id} is itself a media placeholder")
        if self.pad_id < 0 or any(i < 0 for i in self.ids):
            raise ValueError("pad id and placeholder ids must not be negative")

    def replace(self, tokens: TokenArray) -> tuple[TokenArray, int]:
        """Returns the response without placeholders (the same array where there were none), and how many."""
        if not self.ids or not tokens.size:
            return tokens, 0
        hits: NDArray[np.bool_] = np.zeros(tokens.size, dtype=np.bool_)
        for placeholder in self.ids:
            hits |= tokens == placeholder
        count = int(np.count_nonzero(hits))
        if not count:
            return tokens, 0
        replaced = tokens.copy()
        replaced[hits] = self.pad_id
        replaced.setflags(write=False)
        return replaced, count
