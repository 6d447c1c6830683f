"""What one engine was seen to do, and what it says of itself.

Invariant: nothing is assumed. A feature nobody has tried is `UNKNOWN`, and unknown counts as unsupported for
everything but plain text with n > 1 (see `plan.rules`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["Capabilities", "Support"]


class Support(StrEnum):
    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Support for each feature *combined with n > 1* (the single-sample form is taken to work).

    Args:
        parallel_sampling: n > 1 on plain text answers a correct list of n.
        image: every one of n samples conditions on one image.
        images: the same for several images in one prompt.
        video: the same for video.
        audio: the same for audio.
        lora: a LoRA adapter applies to all n.
        speculative: speculative decoding gives n correct samples.
        routed_experts: `return_routed_experts` comes back for all n.
        speculative_decoding: the engine runs speculative decoding (its flag).
        deterministic: the engine runs in deterministic mode: n samples of one request share a seed and are
            copies (SGLang 0.5.23 source).
        prefix_cache: singles with one prefix can share its prefill (False with `--disable-radix-cache`).
        vocab_size: ids at or above it must never be sent; None where unknown.
        context_length: prompt and response together; None where unknown.
        evidence: one line a feature on how it was found out.
    """

    parallel_sampling: Support = Support.UNKNOWN
    image: Support = Support.UNKNOWN
    images: Support = Support.UNKNOWN
    video: Support = Support.UNKNOWN
    audio: Support = Support.UNKNOWN
    lora: Support = Support.UNKNOWN
    speculative: Support = Support.UNKNOWN
    routed_experts: Support = Support.UNKNOWN
    speculative_decoding: bool = False
    deterministic: bool = False
    prefix_cache: bool = True
    vocab_size: int | None = None
    context_length: int | None = None
    evidence: Mapping[str, str] = field(default_factory=dict)
