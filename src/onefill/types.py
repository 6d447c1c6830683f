"""The nouns of Onefill: what a group, a sample and a prompt are.

Invariants:
- A sample's tokens, logprobs and loss mask always have one length; they grow only through `Sample.append`,
  which takes a `Completion` that was checked when it was built. Every strategy uses that one method.
- A finished sample never changes its tokens again.
- A group's samples are numbered 0 .. n-1 in order; output i of the engine belongs to sample i.
- Arrays are numpy (`int32` ids, `float32` logprobs, `uint8` mask) and read-only once they are here.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Completion",
    "FinishReason",
    "Group",
    "GroupState",
    "LogprobArray",
    "MaskArray",
    "Media",
    "Modality",
    "Needs",
    "Prompt",
    "Sample",
    "SamplingParams",
    "Status",
    "Timing",
    "TokenArray",
    "VersionSpan",
    "token_array",
]

TokenArray: TypeAlias = NDArray[np.int32]
LogprobArray: TypeAlias = NDArray[np.float32]
MaskArray: TypeAlias = NDArray[np.uint8]

_MAX_ID = 2**31 - 1


def token_array(ids: Sequence[int] | NDArray[Any]) -> TokenArray:
    """Turns token ids into a read-only int32 array of shape [tokens].

    Raises:
        ValueError: an id is negative, is not an integer, or does not fit int32; or the shape is not flat.
    """
    raw = np.asarray(ids)
    if raw.ndim != 1:
        raise ValueError(f"token ids must be a flat list, got shape {raw.shape}")
    if raw.size == 0:
        return _read_only(np.empty(0, dtype=np.int32))
    if raw.dtype.kind not in "iu":
        raise ValueError(f"token ids must be integers, got {raw.dtype}")
    lowest, highest = raw.item(raw.argmin()), raw.item(raw.argmax())  # on short arrays faster than min and max
    if lowest < 0 or highest > _MAX_ID:
        raise ValueError(f"token ids must lie in 0..2^31-1, got {lowest}..{highest}")
    return _read_only(raw.astype(np.int32))


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    array.setflags(write=False)
    return array


_NO_TOKENS: TokenArray = _read_only(np.empty(0, dtype=np.int32))
_NO_LOGPROBS: LogprobArray = _read_only(np.empty(0, dtype=np.float32))
_NO_MASK: MaskArray = _read_only(np.empty(0, dtype=np.uint8))
_ONES: MaskArray = _read_only(np.ones(1 << 16, dtype=np.uint8))


class FinishReason(StrEnum):
    """Why the engine stopped generating."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


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


class Modality(StrEnum):
    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


@dataclass(frozen=True, slots=True)
class Media:
    """One image, video or audio clip of a prompt, not yet loaded.

    Args:
        modality: what it is.
        source: a path, a URL, a data URL, or the file's bytes.
    """

    modality: Modality
    source: str | bytes

    def __post_init__(self) -> None:
        if not self.source:
            raise ValueError(f"{self.modality} is empty")

    @property
    def digest(self) -> str:
        """SHA-256 of the source (the bytes where bytes were given, else the path or URL), 64 hex digits."""
        raw = self.source if isinstance(self.source, bytes) else self.source.encode()
        return hashlib.sha256(raw).hexdigest()

    def reference(self) -> dict[str, str]:
        """What may be saved of it: never the bytes, never a data URL's body."""
        shown = "" if isinstance(self.source, bytes) or self.source.startswith("data:") else self.source
        return {"modality": str(self.modality), "source": shown, "sha256": self.digest}

    def __repr__(self) -> str:
        return f"Media({self.modality}, {self.reference()['source'] or self.digest[:12]})"


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One training question.

    Exactly one of `text`, `messages` and `tokens` says what the user gave; `tokens` may be added later by
    tokenisation (`with_tokens`) and is what engines are sent.

    Args:
        id: names the prompt in results and errors.
        text: the prompt as a string.
        messages: chat messages, each a mapping with at least `role` and `content`.
        tokens: token ids, int32, shape [prompt tokens].
        media: images, video and audio in the order of their placeholders.
        label: the reference answer, passed to the reward untouched.
        metadata: anything else of the row, passed through.
    """

    id: str
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    tokens: TokenArray | None = None
    media: tuple[Media, ...] = ()
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError("a prompt needs an id")
        if self.text is None and self.messages is None and self.tokens is None:
            raise ValueError(f"prompt {self.id}: needs text, messages or token ids")
        if self.text is not None and self.messages is not None:
            raise ValueError(f"prompt {self.id}: has both text and messages")
        if self.text == "" or self.messages == () or (self.tokens is not None and self.tokens.size == 0):
            raise ValueError(f"prompt {self.id}: is empty")

    def with_tokens(self, tokens: Sequence[int] | TokenArray) -> Prompt:
        """The same prompt with its token ids filled in."""
        return Prompt(
            id=self.id,
            text=self.text,
            messages=self.messages,
            tokens=token_array(tokens),
            media=self.media,
            label=self.label,
            metadata=self.metadata,
        )


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
            self.tokens = new if offset == 0 else _read_only(np.concatenate((self.tokens, new)))
            self.logprobs = (
                completion.logprobs
                if offset == 0
                else _read_only(np.concatenate((self.logprobs, completion.logprobs)))
            )
            self.loss_mask = mask if offset == 0 else _read_only(np.concatenate((self.loss_mask, mask)))
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
    return _ONES[:count] if count <= _ONES.size else _read_only(np.ones(count, dtype=np.uint8))


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
