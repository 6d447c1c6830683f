"""Checks of a request before it is sent.

Invariant: nothing leaves that is known to hurt a server. Real SGLang (0.5.23) dies, whole process, on a token
id past its vocabulary, and answers n = 0 and n = -1 with one object; an empty prompt and one past the context
are 400. A response's budget is never cut in silence: SGLang refuses prompt + max_new_tokens > context (400), clips
it under `--allow-auto-truncate` and always 2 tokens below the context or the KV pool (`EngineInfo.usable_context`),
and a clipped budget would change what the group is a sample of.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onefill.errors import DataError
from onefill.plan.request import Request

__all__ = ["Limits", "check"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an engine's model can take; None where unknown, and then it is not checked.

    Args:
        vocab_size: rows of the model's embedding, or the tokenizer's length, which may be smaller.
        context_length: tokens of prompt and response together (`EngineInfo.usable_context`).
        exact: whether `vocab_size` is the embedding's. If not, it bounds what is sent, but a model may well sample
            an id between the two, and a right reply must not fail for it.
    """

    vocab_size: int | None = None
    context_length: int | None = None
    exact: bool = True

    @property
    def reply_vocab_size(self) -> int | None:
        """What ids of a reply must lie below; None where only int32 bounds them."""
        return self.vocab_size if self.exact else None


def check(request: Request, limits: Limits) -> None:
    """Raises DataError, naming group, request and field, where `request` must not be sent.

    With media the ids hold one placeholder an item, so the length is a lower bound; the server checks the rest.
    """
    tokens = request.tokens
    if request.n < 1:
        raise _refused(request, "n", f"is {request.n}, but a request needs at least one sample")
    if tokens.ndim != 1 or not tokens.size:
        raise _refused(request, "input_ids", "is empty: give the prompt at least one token")
    if tokens.dtype.kind not in "iu":
        raise _refused(request, "input_ids", f"holds {tokens.dtype}, not integers")
    vocabulary = limits.vocab_size if limits.vocab_size is not None else 2**31
    low, high = tokens.item(tokens.argmin()), tokens.item(tokens.argmax())
    if low < 0 or high >= vocabulary:
        at = int(np.argmax((tokens < 0) | (tokens >= vocabulary)))
        raise _refused(
            request,
            f"input_ids[{at}]",
            f"is {int(tokens[at])}, outside the model's vocabulary of {vocabulary} ids; "
            "was the prompt tokenised for another model?",
        )
    _check_length(request, limits.context_length)


def _check_length(request: Request, context: int | None) -> None:
    if context is None:
        return
    given, wanted = request.tokens.size, request.sampling.max_new_tokens
    if given >= context:
        raise _refused(request, "input_ids", f"has {given} tokens, the engine's context holds {context}")
    if given + wanted > context:
        raise _refused(
            request,
            "max_new_tokens",
            f"is {wanted}, but after {given} prompt tokens the engine's context of {context} has room for "
            f"{context - given}; lower max_new_tokens or start the engine with a longer context or KV pool",
        )


def _refused(request: Request, field: str, what: str) -> DataError:
    return DataError(f"group {request.group_id}, request {request.id}: {field} {what}")
