"""Arrays of ids, logprobs and masks: numpy, one dimension, read-only once they are in a sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["LogprobArray", "MaskArray", "TokenArray", "read_only", "token_array"]

TokenArray: TypeAlias = NDArray[np.int32]
LogprobArray: TypeAlias = NDArray[np.float32]
MaskArray: TypeAlias = NDArray[np.uint8]

_MAX_ID = 2**31 - 1


def token_array(ids: Sequence[int] | NDArray[Any]) -> TokenArray:
    """Turns token ids into a read-only int32 array of shape [tokens].

    Raises:
        ValueError: an id is negative, is not an integer, or does not fit int32; or the shape is not flat.
    """
    raw = np.asarray(ids)
    if raw.ndim != 1:
        raise ValueError(f"token ids must be a flat list, got shape {raw.shape}")
    if raw.size == 0:
        return read_only(np.empty(0, dtype=np.int32))
    if raw.dtype.kind not in "iu":
        raise ValueError(f"token ids must be integers, got {raw.dtype}")
    lowest, highest = raw.item(raw.argmin()), raw.item(raw.argmax())  # on short arrays faster than min and max
    if lowest < 0 or highest > _MAX_ID:
        raise ValueError(f"token ids must lie in 0..2^31-1, got {lowest}..{highest}")
    return read_only(raw.astype(np.int32))


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    array.setflags(write=False)
    return array
