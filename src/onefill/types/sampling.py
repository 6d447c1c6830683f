"""How the samples of a group are drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["SamplingParams"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How every sample of a group is drawn. `n` is not here: it is the group's size, and the plan's business.

    Defaults and meanings are SGLang's (`sampling/sampling_params.py`, 0.5.23). `temperature` 0 is greedy;
    `top_k` -1 is off.

    Raises:
        ValueError: a value is out of its range; the message names the field.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, good, want in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", math.isfinite(self.temperature) and self.temperature >= 0, "0 (greedy) or more"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k == -1 or self.top_k >= 1, "-1 (off) or at least 1"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("min_new_tokens", 0 <= self.min_new_tokens <= self.max_new_tokens, "in 0..max_new_tokens"),
            ("stop", all(self.stop), "non-empty strings"),
            ("stop_token_ids", all(i >= 0 for i in self.stop_token_ids), "non-negative ids"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "in [-2, 2]"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "in [-2, 2]"),
            ("repetition_penalty", 0 < self.repetition_penalty <= 2, "in (0, 2]"),
        ):
            if not good:
                raise ValueError(f"{name} must be {want}, got {getattr(self, name)!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1
