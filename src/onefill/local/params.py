"""The sampling parameters of one request, as SGLang 0.5.23 understands them.

Invariants: every value lies in SGLang's range; stop conditions are tuples; `greedy` is the one place that
says when a row is decoded by argmax.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["SamplingParams"]

_GREEDY_BELOW = 1e-6  # SGLang treats smaller temperatures as 0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one sample is drawn. Meanings and defaults are SGLang's.

    Args:
        max_new_tokens: None means as many as the context holds.
        logit_bias: added to the logit of each token id.
        sampling_seed: used in deterministic mode only.
        stream_interval: in a stream, tokens between two chunks; the first token is always sent.
    """

    max_new_tokens: int | None = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stream_interval: int = 1
    sampling_seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    @property
    def greedy(self) -> bool:
        """True where the next token is the argmax and its logprob that of the raw logits."""
        return self.temperature < _GREEDY_BELOW

    @property
    def filtered(self) -> bool:
        """True where top-k, top-p or min-p cut the distribution."""
        return not self.greedy and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)

    @property
    def adjusted(self) -> bool:
        """True where the logits are changed before the softmax (penalties, bias, suppressed stops)."""
        return bool(
            self.frequency_penalty
            or self.presence_penalty
            or self.repetition_penalty != 1.0
            or self.min_new_tokens
            or self.logit_bias
        )
