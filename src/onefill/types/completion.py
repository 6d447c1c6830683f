"""What an engine's item adds to a sample, checked where it is made."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from onefill.types.arrays import LogprobArray, TokenArray

__all__ = ["Completion", "FinishReason", "Timing", "VersionSpan"]


class FinishReason(StrEnum):
    """Why the engine stopped generating."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens [start, end) came from the weights called `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds on the rollout's monotonic clock: when the request left, and when its reply was complete."""

    sent: float
    done: float


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What one engine item adds to one sample, checked whole.

    Args:
        tokens: sampled ids, int32, shape [new tokens].
        logprobs: log softmax(logits / temperature) at each sampled id, float32, shape [new tokens].
        text: the decoded text of these tokens, as the engine gave it.
        finish_reason: why the engine stopped.
        prompt_tokens: how many tokens the engine counted in the prompt (0 if it was aborted in the queue).
        cached_tokens: how many of them came from the prefix cache, 0 <= cached <= prompt_tokens.
        versions: spans that cover 0 .. new tokens without gaps, or () where the engine told none.
        engine: base URL of the engine.
        request_id: our id of the request.
        replaced_placeholders: media placeholder ids that the model made up, replaced by the pad id.
        timing: when it was sent and done.
        message: the engine's words, for an abort.

    Raises:
        ValueError: lengths disagree, a logprob is NaN or positive, spans do not tile the tokens.
    """

    tokens: TokenArray
    logprobs: LogprobArray
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int = 0
    versions: tuple[VersionSpan, ...] = ()
    engine: str = ""
    request_id: str = ""
    replaced_placeholders: int = 0
    timing: Timing = Timing(0.0, 0.0)
    message: str = ""

    def __post_init__(self) -> None:
        if self.tokens.shape != self.logprobs.shape:
            raise ValueError(f"{self.tokens.size} tokens but {self.logprobs.size} logprobs")
        logprobs = self.logprobs  # argmax takes a NaN for the highest, which then fails; half the cost of max()
        if logprobs.size and not logprobs.item(logprobs.argmax()) <= 1e-5:
            raise ValueError("logprobs must be numbers, not above 0")
        if not 0 <= self.cached_tokens <= max(self.prompt_tokens, 0):
            raise ValueError(f"cached_tokens {self.cached_tokens} outside 0..{self.prompt_tokens}")
        at = 0
        for span in self.versions:
            if span.start != at or span.end < span.start:
                raise ValueError(f"weight version spans {self.versions} do not tile the tokens")
            at = span.end
        if self.versions and at != self.tokens.size:
            raise ValueError(f"weight version spans end at {at}, tokens at {self.tokens.size}")
