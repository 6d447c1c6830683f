"""What a reward is given and what comes of it.

Invariants: an outcome is either a finite number, or None with a reason that can be written anywhere; a reward
that could not be had is never a 0, which training would take for a bad answer.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onefill.types import Group, Sample, TokenArray

__all__ = ["RaisedError", "RewardInput", "RewardOutcome", "input_of", "outcome_of"]

_REASON = 1000


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
        if self.value is not None and not math.isfinite(self.value):
            raise ValueError(f"a reward is a finite number, got {self.value}")

    @classmethod
    def failed(cls, reason: str) -> RewardOutcome:
        """No reward, for this reason, which is cut to 1,000 characters; lone surrogates in it are escaped."""
        return cls(None, reason[:_REASON].encode(errors="backslashreplace").decode())


class RaisedError(Exception):
    """The user's code raised; the message tells what. It stands for the error, which may refuse to be shown."""

    @classmethod
    def of(cls, error: BaseException) -> RaisedError:
        """What can be told of an error. Runs code of the user's, so to be called where that may be run."""
        try:
            return cls(f"{type(error).__name__}: {error}" if isinstance(error, Exception) else repr(error))
        except BaseException:  # noqa: BLE001  an error whose text fails too
            return cls(type(error).__name__)


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
    """What a reward function returned, checked. Booleans count as 1 and 0; numpy and torch scalars are numbers.

    Runs code of the value's, which may raise (that is a reason) or hang, so not to be called on the event loop.
    """
    try:
        return _outcome_of(value, name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  one value's failure, be it sys.exit()
        return RewardOutcome.failed(f"{name} returned {type(value).__name__}, which raised {RaisedError.of(error)}")


def _outcome_of(value: Any, name: str) -> RewardOutcome:
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if value is None:
        return RewardOutcome.failed(f"{name} returned None: return a number")
    if not isinstance(value, numbers.Real):
        return RewardOutcome.failed(f"{name} returned {type(value).__name__} ({value!r:.60}): return a number")
    try:
        number = float(value)
    except OverflowError:
        return RewardOutcome.failed(f"{name} returned a number too large for a float: return a finite number")
    if not math.isfinite(number):
        return RewardOutcome.failed(f"{name} returned {number}: return a finite number")
    return RewardOutcome(number)
