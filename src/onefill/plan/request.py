"""What the plan hands to the engine room: a request that covers one or more samples of one group.

Invariants:
- `samples` are indices into the group, strictly increasing; the reply's item i belongs to `samples[i]`.
- More than one sample means one prefix for all of them: same tokens, same media, same parameters, no seed.
"""

from __future__ import annotations

from dataclasses import dataclass

from onefill.types import Media, SamplingParams, TokenArray

__all__ = ["Request"]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One HTTP `/generate` call.

    Args:
        id: prefix-free among all requests of a run (SGLang matches abort rids by prefix).
        group_id: the routing key.
        samples: indices of the samples that it covers, in order.
        tokens: input ids, int32, shape [input tokens]: the prompt and, for a resumed sample, what it has.
        sampling: parameters, `max_new_tokens` already reduced by what a resumed sample had generated.
        media: in the order of their placeholders in `tokens`.
        seed: `sampling_seed`, only where it covers one sample.
        routed_experts: ask for `return_routed_experts`.
        lora: LoRA adapter's name.
        stream: ask for a stream, so that the first token is seen (see `Plan.waves`).
    """

    id: str
    group_id: str
    samples: tuple[int, ...]
    tokens: TokenArray
    sampling: SamplingParams
    media: tuple[Media, ...] = ()
    seed: int | None = None
    routed_experts: bool = False
    lora: str | None = None
    stream: bool = False

    def __post_init__(self) -> None:
        if not self.samples:
            raise ValueError(f"request {self.id} covers no sample")
        if any(b <= a for a, b in zip(self.samples, self.samples[1:], strict=False)):
            raise ValueError(f"request {self.id}: sample indices {self.samples} are not in order")
        if self.seed is not None and len(self.samples) > 1:
            raise ValueError(f"request {self.id}: a seed with n = {len(self.samples)} would make copies")

    @property
    def n(self) -> int:
        return len(self.samples)
