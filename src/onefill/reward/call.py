"""What a reward is given and what comes of it.

Invariants: an outcome is either a finite number, or None with a reason; a reward that could not be had is never
a 0, which training would take for a bad answer.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onefill.types import Group, Sample, TokenArray

__all__ = ["RewardInput", "RewardOutcome", "input_of", "outcome_of"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewardInput:
    """One finished sample, as a reward sees it.

    Args:
        text: the response.
        tokens: its ids, int32, shape [response tokens].
        label: the reference answer of the row; None where it has none.
        prompt: the prompt as the row gave it: a string, a list of messages, or None for bare token ids.
        metadata: the rest of the row.
        finish_reason: `stop` or `length`.
        index: the sample's place in its group.
        group_id: the group.
    """

    text: str
    tokens: TokenArray
    label: Any = None
    prompt: str | list[Mapping[str, Any]] | None = None
    metadata: Mapping[str, Any]
    finish_reason: str = "stop"
    index: int = 0
    group_id: str = ""


@dataclass(frozen=True, slots=True)
class RewardOutcome:
    """A reward, or why there is none.

    Args:
        value: a finite number; None where the reward failed.
        reason: why it failed; empty where it did not.
    """

    value: float | None
    reason: str = ""

    def __post_init__(self) -> None:
        if (self.value is None) != bool(self.reason):
            raise ValueError("an outcome is a value, or a reason why there is none")

    @classmethod
    def failed(cls, reason: str) -> RewardOutcome:
        """No reward, for this reason."""
        return cls(None, reason)


def input_of(group: Group, sample: Sample) -> RewardInput:
    """What the reward of one sample is given."""
    prompt = sample.prompt or group.prompt
    return RewardInput(
        text=sample.text,
        tokens=sample.tokens,
        label=prompt.label,
        prompt=list(prompt.messages) if prompt.messages is not None else prompt.text,
        metadata=prompt.metadata,
        finish_reason=str(sample.finish_reason or ""),
        index=sample.index,
        group_id=group.id,
    )


def outcome_of(value: Any, name: str) -> RewardOutcome:
    """What a reward function returned, checked. Booleans count as 1 and 0; numpy and torch scalars are numbers."""
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if value is None:
        return RewardOutcome.failed(f"{name} returned None: return a number")
    if not isinstance(value, numbers.Real):
        return RewardOutcome.failed(f"{name} returned {type(value).__name__} ({value!r:.60}): return a number")
    number = float(value)
    if not math.isfinite(number):
        return RewardOutcome.failed(f"{name} returned {number}: return a finite number")
    return RewardOutcome(number)
