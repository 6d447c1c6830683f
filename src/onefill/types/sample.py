"""One response, with everything that training needs of it.

Invariants:
- Tokens, logprobs and loss mask always have one length; they grow only through `Sample.append`, which takes a
  `Completion` that was checked when it was built. Every strategy uses that one method.
- A finished sample never changes its tokens again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from onefill.types.arrays import LogprobArray, MaskArray, TokenArray, read_only
from onefill.types.completion import Completion, FinishReason, Timing, VersionSpan
from onefill.types.prompt import Prompt

__all__ = ["Sample", "Status"]

_NO_TOKENS: TokenArray = read_only(np.empty(0, dtype=np.int32))
_NO_LOGPROBS: LogprobArray = read_only(np.empty(0, dtype=np.float32))
_NO_MASK: MaskArray = read_only(np.empty(0, dtype=np.uint8))
_ONES: MaskArray = read_only(np.ones(1 << 16, dtype=np.uint8))


class Status(StrEnum):
    """Where a sample stands. COMPLETED and TRUNCATED are finished; ABORTED may be resumed; FAILED is lost."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def finished(self) -> bool:
        return self is Status.COMPLETED or self is Status.TRUNCATED


_OPEN = (Status.PENDING, Status.ABORTED)
_STATUS_OF = {
    FinishReason.STOP: Status.COMPLETED,
    FinishReason.LENGTH: Status.TRUNCATED,
    FinishReason.ABORT: Status.ABORTED,
}


@dataclass(slots=True, eq=False)
class Sample:
    """One response to a prompt, with everything that training needs of it.

    Args:
        index: its place in the group.
        prompt: its own prompt, where it differs from the group's (multi-turn); None means the group's.
        seed: its own sampling seed, or None.
    """

    index: int
    prompt: Prompt | None = None
    seed: int | None = None
    status: Status = Status.PENDING
    tokens: TokenArray = field(default_factory=lambda: _NO_TOKENS)
    logprobs: LogprobArray = field(default_factory=lambda: _NO_LOGPROBS)
    loss_mask: MaskArray = field(default_factory=lambda: _NO_MASK)
    text: str = ""
    finish_reason: FinishReason | None = None
    versions: tuple[VersionSpan, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    replaced_placeholders: int = 0
    engine: str = ""
    request_id: str = ""
    timing: Timing | None = None
    reward: float | None = None
    reward_error: str = ""
    error: str = ""

    def append(self, completion: Completion) -> None:
        """Adds what an engine generated: the only way in which a sample grows.

        A resumed sample keeps what it had; loss mask 1 is given to every new token; version spans are shifted
        behind the earlier ones. `prompt_tokens` and `cached_tokens` are the first request's.

        Raises:
            ValueError: the sample had finished or failed.
        """
        if self.status not in _OPEN:
            raise ValueError(f"sample {self.index} is {self.status} and takes no more tokens")
        first = self.finish_reason is None
        offset = self.tokens.size
        new = completion.tokens
        if new.size:
            mask = _ones(new.size)
            self.tokens = new if offset == 0 else read_only(np.concatenate((self.tokens, new)))
            self.logprobs = (
                completion.logprobs
                if offset == 0
                else read_only(np.concatenate((self.logprobs, completion.logprobs)))
            )
            self.loss_mask = mask if offset == 0 else read_only(np.concatenate((self.loss_mask, mask)))
        self.text += completion.text
        self.versions = _join(self.versions, completion.versions, offset)
        self.finish_reason = completion.finish_reason
        self.status = _STATUS_OF[completion.finish_reason]
        if first or self.prompt_tokens == 0:
            self.prompt_tokens = completion.prompt_tokens
            self.cached_tokens = completion.cached_tokens
        self.replaced_placeholders += completion.replaced_placeholders
        self.engine = completion.engine
        self.request_id = completion.request_id
        self.timing = completion.timing
        self.error = completion.message

    def truncate(self) -> None:
        """Ends a sample that was aborted with its whole token budget spent: nothing is left to ask for.

        Raises:
            ValueError: the sample was not aborted.
        """
        if self.status is not Status.ABORTED:
            raise ValueError(f"sample {self.index} is {self.status}, only an aborted one can be truncated")
        self.status = Status.TRUNCATED
        self.finish_reason = FinishReason.LENGTH
        self.error = ""

    def revive(self) -> None:
        """Makes a sample that was aborted before its first token as it was before it was sent.

        Raises:
            ValueError: the sample was not aborted, or holds tokens.
        """
        if self.status is not Status.ABORTED or self.tokens.size or self.text:
            raise ValueError(f"sample {self.index} is {self.status} with {self.tokens.size} tokens, not pristine")
        self.status = Status.PENDING
        self.finish_reason = None
        self.versions = ()
        self.prompt_tokens = self.cached_tokens = 0
        self.engine = self.request_id = self.error = ""
        self.timing = None

    def fail(self, reason: str) -> None:
        """Marks the sample as lost, with the reason. What it had generated stays for inspection.

        Raises:
            ValueError: the sample had finished.
        """
        if self.status.finished:
            raise ValueError(f"sample {self.index} is {self.status} and cannot fail")
        self.status = Status.FAILED
        self.error = reason

    @property
    def untouched(self) -> bool:
        """True while it holds nothing: no tokens, no text, no loss mask, and nothing happened to it."""
        return self.status is Status.PENDING and not self.tokens.size and not self.text and not self.loss_mask.size


def _ones(count: int) -> MaskArray:
    """A loss mask of ones: one buffer for all samples that fit into it."""
    return _ONES[:count] if count <= _ONES.size else read_only(np.ones(count, dtype=np.uint8))


def _join(before: tuple[VersionSpan, ...], after: tuple[VersionSpan, ...], offset: int) -> tuple[VersionSpan, ...]:
    if not before and not offset and len(after) == 1 and after[0].end > after[0].start:
        return after  # nearly always
    spans = list(before)
    if offset and not spans and after:
        spans.append(VersionSpan("", 0, offset))  # earlier tokens, whose version nobody told
    for span in after:
        if span.start == span.end:
            continue
        if spans and spans[-1].version == span.version:
            spans[-1] = VersionSpan(span.version, spans[-1].start, span.end + offset)
        else:
            spans.append(VersionSpan(span.version, span.start + offset, span.end + offset))
    return tuple(spans)
