"""Turns sequences into reply items, as SGLang 0.5.23 writes them.

Invariants:
- `output_ids`, `output_token_logprobs` and `completion_tokens` of an item agree, finished, streamed or aborted.
- The ids and logprobs keep what stopped the response; the text does not, unless `no_stop_trim`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

from onefill.local.sequence import ABORTED_IN_QUEUE, Sequence

__all__ = ["Wanted", "item"]

_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the client wants to see of one prompt's samples.

    Args:
        decode: token ids and whether to skip special tokens, to text.
        version: tells the name of the weights that are loaded now.
        logprobs: whether logprobs are returned.
        prompt_logprobs: what `input_token_logprobs` holds.
        texts: whether logprob triples carry the token's text.
    """

    decode: Callable[[SequenceOf[int], bool], str]
    version: Callable[[], str]
    logprobs: bool
    prompt_logprobs: SequenceOf[tuple[float | None, int]] = ()
    texts: bool = False


def item(sequence: Sequence, wanted: Wanted) -> dict[str, Any]:
    """The reply item of a sequence, as far as it has got."""
    finish = sequence.finish  # read first: what is published before the end is less, never more
    count = sequence.published
    ids = sequence.tokens[:count]
    meta: dict[str, Any] = {"id": sequence.rid, "finish_reason": finish, "weight_version": wanted.version()}
    queued = finish is not None and finish.get("message") == ABORTED_IN_QUEUE
    if not queued:
        meta["prompt_tokens"] = sequence.prompt_tokens
        meta["cached_tokens"] = sequence.cached_tokens or 0
        meta["queue_time"] = max(0.0, sequence.time_started - sequence.time_created)
        meta["num_retractions"] = sequence.retractions
        meta["dp_rank"] = None
    meta["completion_tokens"] = count
    meta["weight_versions"] = [
        {"version": version, "start": start, "end": min(end, count)}
        for version, start, end in list(sequence.spans)
        if start < count
    ]
    if wanted.logprobs:
        meta["input_token_logprobs"] = [_triple(wanted, lp, t) for lp, t in wanted.prompt_logprobs]
        meta["output_token_logprobs"] = [
            _triple(wanted, lp, t) for lp, t in zip(sequence.logprobs[:count], ids, strict=True)
        ]
        meta["output_token_logprobs_length"] = count
    if finish is not None:
        meta["e2e_latency"] = sequence.time_finished - sequence.time_created
    return {"text": _text(sequence, ids, finish, wanted), "output_ids": ids, "meta_info": meta}


def _triple(wanted: Wanted, logprob: float | None, token: int) -> list[Any]:
    return [logprob, token, wanted.decode([token], False) if wanted.texts else None]


def _text(sequence: Sequence, ids: list[int], finish: dict[str, Any] | None, wanted: Wanted) -> str:
    params = sequence.params
    matched = finish.get("matched") if finish else None
    if isinstance(matched, int) and not params.no_stop_trim:
        return wanted.decode(ids[:-1], params.skip_special_tokens)
    text = wanted.decode(ids, params.skip_special_tokens)
    if isinstance(matched, str):
        at = text.find(matched)
        if at >= 0:
            return text[: at + len(matched)] if params.no_stop_trim else text[:at]
    if finish is None:  # the last character may still lack bytes
        return text.rstrip(_REPLACEMENT)
    return text
