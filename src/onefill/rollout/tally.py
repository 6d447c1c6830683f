"""The books of a run: what was asked, what came, what it cost.

Invariants:
- Every figure of the summary is counted here, as things happen; nothing is estimated at the end.
- Memory does not grow with the run: sums, not lists; messages are kept once each and capped.
- Tokens saved are never negative and never above the prompt tokens, whatever the engine reports.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from onefill.plan import Form, Request
from onefill.types import Completion, FinishReason, Group

__all__ = ["Moments", "Notes", "Tally", "saved_tokens"]

_COPY_FROM_TOKENS = 8
_ENOUGH_TO_COMPARE = 3


def saved_tokens(request: Request, completions: Sequence[Completion]) -> int:
    """Prompt tokens of one request that were not prefilled thanks to sharing.

    SGLang 0.5.23 reports prompt - 1 cached for every child of an n > 1 request, cold or warm: the one prefill is
    a hidden warm-up whose cost no item shows. So of n > 1 one whole prompt is taken off the sum.
    """
    cached = sum(c.cached_tokens for c in completions)
    if request.n > 1:
        cached -= max((c.prompt_tokens for c in completions), default=0)
    return max(0, cached)


@dataclass(slots=True)
class Moments:
    """Mean and population standard deviation of a stream of numbers (Welford 1962)."""

    count: int = 0
    mean: float = 0.0
    _squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        delta = value - self.mean
        self.mean += delta / self.count
        self._squares += delta * (value - self.mean)

    @property
    def std(self) -> float:
        return math.sqrt(self._squares / self.count) if self.count else 0.0


@dataclass(slots=True)
class Notes:
    """Messages for the user: each kept once with its count, at most `most` different ones."""

    most: int = 100
    _counts: dict[str, int] = field(default_factory=dict)
    _texts: dict[str, str] = field(default_factory=dict)
    _more: int = 0

    def add(self, message: str, *, key: str = "") -> None:
        """Takes a message.

        Args:
            message: the line for the user.
            key: what makes it the same as an earlier one, of which only the count grows; by default the message.
        """
        key = key or message
        if key in self._counts:
            self._counts[key] += 1
        elif len(self._counts) >= self.most:
            self._more += 1
        else:
            self._counts[key] = 1
            self._texts[key] = message

    def lines(self) -> list[str]:
        """One line a message, with how often it came."""
        counted = ((self._texts[key], count) for key, count in self._counts.items())
        shown = [text if count == 1 else f"{text} ({count} times)" for text, count in counted]
        return [*shown, f"... and {self._more} more"] if self._more else shown

    def __len__(self) -> int:
        return len(self._counts)


@dataclass(slots=True)
class Tally:
    """Counts of one run. `summary` gives the object that `--json` prints.

    Args:
        asked: what the user asked for, to say once where it could not be had.
    """

    asked: Form = Form.AUTO
    groups_done: int = 0
    groups_failed: int = 0
    rows_skipped: int = 0
    samples_done: int = 0
    forms: Counter[str] = field(default_factory=Counter)
    ineligible: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    saved_tokens: int = 0
    response_tokens: int = 0
    reward: Moments = field(default_factory=Moments)
    rewards_failed: int = 0
    reward_errors: Notes = field(default_factory=Notes)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    duplicate_samples: int = 0
    replaced_placeholders: int = 0
    warnings: Notes = field(default_factory=Notes)
    errors: Notes = field(default_factory=Notes)
    _comparable: int = 0

    def sent_as(self, form: Form, barred_by: Iterable[tuple[str, str]]) -> None:
        """Books a group under what it was sent as in the end, and tells once why native was not to be had.

        Args:
            form: native, split or fanout.
            barred_by: names and reasons of the rules that kept it from native sampling.
        """
        self.forms[str(form)] += 1
        for name, reason in barred_by:
            self.ineligible[name] += 1
            if self.asked in (Form.NATIVE, Form.SPLIT):
                self.warnings.add(f"{self.asked} was asked for, but groups went out singly: {name}: {reason}")

    def answered(self, request: Request, completions: Sequence[Completion]) -> None:
        """Counts what one request cost in prompt tokens and what sharing saved."""
        self.prompt_tokens += sum(c.prompt_tokens for c in completions)
        self.saved_tokens += saved_tokens(request, completions)

    def delivered(self, group: Group) -> None:
        """Counts a finished group."""
        self.groups_done += 1
        self.samples_done += len(group.samples)
        seen: set[bytes] = set()
        for sample in group.samples:
            self.response_tokens += int(sample.tokens.size)
            self.finish_reasons[str(sample.finish_reason)] += 1
            self.replaced_placeholders += sample.replaced_placeholders
            if sample.reward is not None:
                self.reward.add(sample.reward)
            elif sample.reward_error:
                self.rewards_failed += 1
                self.reward_errors.add(sample.reward_error)
            if sample.tokens.size > _COPY_FROM_TOKENS and not group.sampling.greedy:
                self._compare(sample.tokens.tobytes(), seen)

    def _compare(self, tokens: bytes, seen: set[bytes]) -> None:
        self._comparable += bool(seen)
        self.duplicate_samples += tokens in seen
        seen.add(tokens)

    def _closing_warnings(self) -> Iterable[str]:
        if self._comparable >= _ENOUGH_TO_COMPARE and 2 * self.duplicate_samples > self._comparable:
            yield (
                f"{self.duplicate_samples} of {self._comparable} samples are copies of an earlier one of their group "
                "at temperature > 0: the engine is not sampling (deterministic mode with one seed? greedy decoding?) "
                "and group advantages will be zero"
            )
        if self.replaced_placeholders:
            yield (
                f"{self.replaced_placeholders} media placeholder tokens that the model made up were replaced by the "
                "pad id, since a trainer would look for media that is not there"
            )
        if self.rewards_failed:
            yield f"{self.rewards_failed} samples have no reward: {'; '.join(self.reward_errors.lines()[:3])}"
        if self.rows_skipped:
            yield f"{self.rows_skipped} rows of the data were skipped, see errors"

    def summary(self, *, wall_s: float, requests_sent: int, requests_retried: int) -> dict[str, Any]:
        """The run in figures. Times in seconds, tokens/s over the whole wall time."""
        return {
            "groups_done": self.groups_done,
            "groups_failed": self.groups_failed,
            "rows_skipped": self.rows_skipped,
            "samples_done": self.samples_done,
            "requests_sent": requests_sent,
            "requests_retried": requests_retried,
            "groups_by_strategy": {str(f): self.forms[f] for f in (Form.NATIVE, Form.SPLIT, Form.FANOUT)},
            "ineligible": dict(self.ineligible),
            "prompt_tokens": self.prompt_tokens,
            "prefill_tokens": self.prompt_tokens - self.saved_tokens,
            "saved_tokens": self.saved_tokens,
            "response_tokens": self.response_tokens,
            "tokens_per_s": round(self.response_tokens / wall_s, 2) if wall_s > 0 else 0.0,
            "wall_s": round(wall_s, 3),
            "reward_mean": self.reward.mean if self.reward.count else None,
            "reward_std": self.reward.std if self.reward.count else None,
            "rewards_failed": self.rewards_failed,
            "finish_reasons": {str(r): self.finish_reasons[r] for r in FinishReason},
            "duplicate_samples": self.duplicate_samples,
            "warnings": [*self.warnings.lines(), *self._closing_warnings()],
            "errors": self.errors.lines(),
        }
