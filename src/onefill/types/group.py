"""One prompt and its samples.

Invariant: a group's samples are numbered 0 .. n-1 in order; output i of the engine belongs to sample i.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from onefill.types.prompt import Prompt
from onefill.types.sample import Sample, Status
from onefill.types.sampling import SamplingParams

__all__ = ["Group", "GroupState", "Needs"]


@dataclass(frozen=True, slots=True)
class Needs:
    """What a group asks of an engine beyond plain sampling. Each can bar native sampling (`plan.rules`).

    Args:
        evaluation: the group measures the policy and is not trained on.
        distillation: on-policy distillation: per-token scores of other tokens or of a teacher are wanted.
        routed_experts: `return_routed_experts`, to replay a mixture-of-experts model's routing.
        lora: name of a LoRA adapter.
        custom_generate: the user's own generate function makes the requests.
    """

    evaluation: bool = False
    distillation: bool = False
    routed_experts: bool = False
    lora: str | None = None
    custom_generate: bool = False


class GroupState(StrEnum):
    PENDING = "pending"
    IN_FLIGHT = "in_flight"
    DONE = "done"
    FAILED = "failed"


_NEXT = {
    GroupState.PENDING: {GroupState.IN_FLIGHT, GroupState.FAILED},
    GroupState.IN_FLIGHT: {GroupState.PENDING, GroupState.DONE, GroupState.FAILED},
    GroupState.DONE: set[GroupState](),
    GroupState.FAILED: set[GroupState](),
}


@dataclass(slots=True, eq=False)
class Group:
    """One prompt and its n samples.

    Args:
        id: unique in a run; also the routing key.
        prompt: the prompt, with token ids.
        sampling: how its samples are drawn.
        samples: numbered 0 .. n-1 in order.
        needs: features it asks of the engine.
        strategy: how it was sent in the end (`native`, `split`, `fanout`), once it was sent.
        error: why it failed, if it did.
    """

    id: str
    prompt: Prompt
    sampling: SamplingParams
    samples: list[Sample]
    needs: Needs = Needs()
    state: GroupState = GroupState.PENDING
    strategy: str = ""
    error: str = ""

    def __post_init__(self) -> None:
        if not self.samples:
            raise ValueError(f"group {self.id} has no samples")
        if [s.index for s in self.samples] != list(range(len(self.samples))):
            raise ValueError(f"group {self.id}: samples must be numbered 0..n-1 in order")

    @classmethod
    def of(
        cls, prompt: Prompt, n: int, sampling: SamplingParams, *, id: str = "", needs: Needs | None = None
    ) -> Group:
        """A fresh group of `n` samples. Raises ValueError where n < 1."""
        if n < 1:
            raise ValueError(f"a group needs at least one sample, got n={n}")
        return cls(
            id=id or prompt.id,
            prompt=prompt,
            sampling=sampling,
            samples=[Sample(index=i) for i in range(n)],
            needs=needs or Needs(),
        )

    def move(self, state: GroupState) -> None:
        """Moves to `state`. Raises ValueError on a step that makes no sense (a done group never changes)."""
        if state not in _NEXT[self.state]:
            raise ValueError(f"group {self.id} cannot go from {self.state} to {state}")
        self.state = state

    @property
    def unfinished(self) -> list[Sample]:
        """Samples that still need tokens, in order (failed ones do not: they are lost)."""
        return [s for s in self.samples if not s.status.finished and s.status is not Status.FAILED]

    @property
    def complete(self) -> bool:
        """True when every sample finished."""
        return all(s.status.finished for s in self.samples)
