"""One item of a reply: what an engine says about one sample, checked field by field.

Invariants:
- An item becomes a `Completion` only when every field agrees with every other and with what was asked.
- Nothing is repaired that training would see: no logprob is padded, no id dropped, no text tokenised again.
  The one number that is put right is `cached_tokens`, a statistic (see `_cached`).
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any, NamedTuple

from onefill.engine.placeholders import Placeholders
from onefill.engine.retry import AttemptError, Budget, Verdict, classify
from onefill.engine.values import FieldError
from onefill.errors import DataError, ProtocolError
from onefill.plan.request import Request
from onefill.types import Completion, FinishReason, LogprobArray, Timing, TokenArray, VersionSpan

__all__ = ["FieldError", "Frame", "Outline", "completion", "kind", "outline"]

_REASONS = {str(reason): reason for reason in FinishReason}
_ABORT, _LENGTH = FinishReason.ABORT, FinishReason.LENGTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What a reply is held against.

    Args:
        request: what was asked.
        engine: base URL of the engine that answered.
        timing: when it was sent and done.
        placeholders: media placeholders to replace in responses, if the model has any.
        vocab_size: response ids must lie below it; None where no exact one is known.
    """

    request: Request
    engine: str
    timing: Timing
    placeholders: Placeholders | None = None
    vocab_size: int | None = None

    def error(self, field: str, what: str) -> ProtocolError:
        return ProtocolError(what, engine=self.engine, request_id=self.request.id, field=field)


class Outline(NamedTuple):
    """One item whose every field is checked but the values of its ids and logprobs (`values`)."""

    reason: FinishReason
    message: str
    text: str
    prompt_tokens: int
    cached_tokens: int
    versions: tuple[VersionSpan, ...]
    ids: list[Any]
    triples: list[Any]


def outline(item: Any, frame: Frame) -> Outline:
    """Checks everything of an item that is not one value a token. Raises FieldError."""
    if type(item) is not dict:
        raise FieldError("", f"item must be an object, got {kind(item)}")
    meta = item.get("meta_info")
    if type(meta) is not dict:
        raise FieldError("meta_info", f"must be an object, got {kind(meta)}")
    reason, message = _finish(meta)
    aborted = reason is _ABORT
    text = item.get("text", "" if aborted else None)
    if type(text) is not str:
        raise FieldError("text", f"must be a string, got {kind(text)} (a server without tokenizer sends none)")
    prompt_tokens = _prompt_tokens(meta, frame.request, aborted)
    ids, triples = _generated(item, meta, frame, aborted)
    count = len(ids)
    if not count and text:
        raise FieldError("output_ids", "is empty, but there is text")
    if frame.request.routed_experts and count:
        _check_routed_experts(meta, prompt_tokens + count)
    cached, versions = _cached(meta, prompt_tokens), _versions(meta, count)
    return Outline(reason, message, text, prompt_tokens, cached, versions, ids, triples)


def completion(item: Outline, tokens: TokenArray, logprobs: LogprobArray, frame: Frame) -> Completion:
    """The item with its arrays, which `values` checked. Raises AttemptError where the server cut the budget."""
    if item.reason is _LENGTH and tokens.size < frame.request.sampling.max_new_tokens:
        raise _cut(int(tokens.size), item.prompt_tokens, frame.request)
    replaced = 0
    if frame.placeholders is not None:
        tokens, replaced = frame.placeholders.replace(tokens)
    return Completion(
        tokens=tokens,
        logprobs=logprobs,
        text=item.text,
        finish_reason=item.reason,
        prompt_tokens=item.prompt_tokens,
        cached_tokens=item.cached_tokens,
        versions=item.versions,
        engine=frame.engine,
        request_id=frame.request.id,
        replaced_placeholders=replaced,
        timing=frame.timing,
        message=item.message,
    )


def _finish(meta: dict[str, Any]) -> tuple[FinishReason, str]:
    finish = meta.get("finish_reason")
    if type(finish) is not dict:
        raise FieldError("meta_info.finish_reason", f"must be an object, got {kind(finish)}")
    name = finish.get("type")
    reason = _REASONS.get(name) if type(name) is str else None
    if reason is None:
        raise FieldError("meta_info.finish_reason.type", f"must be one of {', '.join(_REASONS)}, got {name!r}")
    if reason is not _ABORT:
        return reason, ""
    message = finish.get("message")
    message = "" if message is None else str(message)
    status = finish.get("status_code")
    if status is not None:
        if type(status) is not int:
            raise FieldError("meta_info.finish_reason.status_code", f"must be a number, got {kind(status)}")
        if 400 <= status < 600:  # SGLang 0.5.23 itself turns such an abort into an HTTP error, if not streaming
            raise AttemptError(f"engine aborted a sample with status {status}: {message}", verdict=classify(status))
    return reason, message


def _prompt_tokens(meta: dict[str, Any], request: Request, aborted: bool) -> int:
    """The engine's count, which must be ours (no less with media, whose placeholders it expands).

    A sample aborted in the queue has none (SGLang 0.5.23). Fewer means that the server cut the prompt
    (`--allow-auto-truncate`): the response answers another prompt.
    """
    counted = meta.get("prompt_tokens")
    if counted is None and aborted:
        return 0
    if type(counted) is not int:
        raise FieldError("meta_info.prompt_tokens", f"must be a number, got {kind(counted)}")
    sent = int(request.tokens.size)
    if counted < sent or (counted != sent and not request.media):
        raise FieldError("meta_info.prompt_tokens", f"sent {sent} prompt tokens, the engine counted {counted}")
    return counted


def _generated(
    item: dict[str, Any], meta: dict[str, Any], frame: Frame, aborted: bool
) -> tuple[list[Any], list[Any]]:
    """Ids and logprob triples of one item, two lists of equal length; both empty only for an aborted one."""
    ids = item.get("output_ids")
    triples = meta.get("output_token_logprobs")
    count = meta.get("completion_tokens")
    if aborted and ids is None:
        ids = []
    if type(ids) is not list:
        raise FieldError("output_ids", f"must be a list, got {kind(ids)}")
    if aborted and not ids:  # in the queue: logprobs and counts may be missing (SGLang 0.5.23)
        triples, count = (triples if triples is not None else []), (count if count is not None else 0)
    if type(count) is not int or count != len(ids):
        raise FieldError("meta_info.completion_tokens", f"is {count!r}, but there are {len(ids)} output ids")
    if type(triples) is not list:
        raise FieldError("meta_info.output_token_logprobs", f"must be a list, got {kind(triples)}")
    if len(triples) != len(ids):
        raise FieldError("meta_info.output_token_logprobs", f"has {len(triples)} entries for {len(ids)} output ids")
    if not ids:
        if not aborted:  # an engine samples at least one token, if only the end of the text
            raise FieldError("output_ids", "is empty, but the sample was not aborted")
        return ids, triples
    if len(ids) > frame.request.sampling.max_new_tokens:
        raise FieldError(
            "output_ids", f"has {len(ids)} ids, asked for {frame.request.sampling.max_new_tokens} at most"
        )
    return ids, triples


def _cut(got: int, prompt_tokens: int, request: Request) -> AttemptError:
    """A budget that the server lowered: a response that was to go on, and does not say so.

    SGLang 0.5.23 does it, with reason `length`, where prompt and response do not fit its KV pool, or its context
    with media (whose length no guard knows), under `--allow-auto-truncate` and `SGLANG_MAX_NEW_TOKENS_LIMIT`.
    """
    return AttemptError(
        f"the engine cut max_new_tokens from {request.sampling.max_new_tokens} to {got} after {prompt_tokens} prompt "
        "tokens; lower max_new_tokens, or give the engine a longer context, a larger KV pool or a higher limit",
        verdict=Verdict("budget_cut", Budget.NEVER, DataError),
    )


def _cached(meta: dict[str, Any], prompt_tokens: int) -> int:
    """Prompt tokens taken from the cache, brought into 0 .. prompt_tokens.

    Servers got this number wrong under n > 1 (SGLang #5525). It trains nothing, so a wrong one costs no group,
    but savings must come out neither negative nor above the prompt.
    """
    cached = meta.get("cached_tokens")
    if cached is None:
        return 0
    if type(cached) is not int:
        raise FieldError("meta_info.cached_tokens", f"must be a number, got {kind(cached)}")
    return min(max(cached, 0), prompt_tokens)


def _versions(meta: dict[str, Any], count: int) -> tuple[VersionSpan, ...]:
    """Weight-version spans that tile the response; one span where the engine tells only one version."""
    spans = meta.get("weight_versions")
    if spans is None:
        version = meta.get("weight_version")
        if version is None or (type(version) is str and not count):
            return ()
        if type(version) is not str:
            raise FieldError("meta_info.weight_version", f"must be a string, got {kind(version)}")
        return (VersionSpan(version, 0, count),)
    field = "meta_info.weight_versions"
    if type(spans) is not list:
        raise FieldError(field, f"must be a list, got {kind(spans)}")
    found: list[VersionSpan] = []
    at = 0
    for span in spans:
        if type(span) is not dict or type(span.get("version")) is not str:
            raise FieldError(field, "must hold objects with version, start and end")
        start, end = span.get("start"), span.get("end")
        if type(start) is not int or type(end) is not int or start != at or end < start:
            raise FieldError(field, f"does not tile the response: a span {start!r}..{end!r} at token {at}")
        if end > start:
            found.append(VersionSpan(span["version"], start, end))
        at = end
    if at != count:
        raise FieldError(field, f"covers {at} of {count} response tokens")
    return tuple(found)


def _check_routed_experts(meta: dict[str, Any], total: int) -> None:
    """Notices a router that dropped `return_routed_experts` (sglang-router 0.3.2), and an array cut short.

    SGLang 0.5.23 sends base64 of int32, shape [prompt and response tokens - 1, layers, top-k].
    """
    field = "meta_info.routed_experts"
    experts = meta.get("routed_experts")
    if type(experts) is not str or not experts:
        raise FieldError(field, "was asked for and is missing; a router in between may have dropped the field")
    try:
        size = len(base64.b64decode(experts, validate=True))
    except binascii.Error:
        raise FieldError(field, "is not base64") from None
    if size % 4 or (total > 1 and (size // 4) % (total - 1)):
        raise FieldError(field, f"holds {size} bytes, which do not divide into {total - 1} tokens")


def kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__
