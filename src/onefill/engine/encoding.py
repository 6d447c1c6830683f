"""A request as SGLang's native `/generate` body and headers.

Invariants:
- Every sampling parameter that has a default is sent in full: a server started with `preferred_sampling_params`
  would otherwise put its own in place of what was left out (SGLang 0.5.23).
- With n > 1 media stand in an outer list, one entry for the one prompt: SGLang takes a flat list of two images
  for two prompts (400), and mis-assigns flat video and audio without a word. With n = 1 the list is flat, since a
  single prompt is not normalised as a batch (0.5.23).
- No body is kept: encoding 1,000 ids takes 5 us, so there is nothing to cache, and media never linger.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import numpy as np
import orjson

from onefill.errors import DataError
from onefill.plan.request import Request
from onefill.types import Media, Modality

__all__ = ["as_given", "encode", "headers"]

_STREAM_INTERVAL = 1_000_000  # the first token and the final item, nothing between (SGLang 0.5.23)
_LONGEST_KEY = 256
_MEDIA_KEYS = {Modality.IMAGE: "image_data", Modality.VIDEO: "video_data", Modality.AUDIO: "audio_data"}


def as_given(media: Media) -> str:
    """A medium as the server reads it: URL, data URL or path unchanged, bytes as base64."""
    return base64.b64encode(media.source).decode() if isinstance(media.source, bytes) else media.source


def encode(request: Request, *, media: Callable[[Media], Any] = as_given) -> bytes:
    """The JSON body of `request`.

    Args:
        request: what to send; `guards.check` has passed.
        media: turns one medium into what goes on the wire.

    Raises:
        DataError: something in it has no JSON form.
    """
    body: dict[str, Any] = {
        "input_ids": np.ascontiguousarray(request.tokens),
        "sampling_params": _sampling(request),
        "return_logprob": True,
        "rid": request.id,
    }
    if request.media:
        for item in request.media:
            body.setdefault(_MEDIA_KEYS[item.modality], []).append(media(item))
        if request.n > 1:
            for key in _MEDIA_KEYS.values():
                if key in body:
                    body[key] = [body[key]]
    if request.stream:
        body["stream"] = True
    if request.lora is not None:
        body["lora_path"] = request.lora
    if request.routed_experts:
        body["return_routed_experts"] = True
    try:
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError as error:  # a lone surrogate in an id or a stop string, for one
        raise DataError(f"group {request.group_id!r}: cannot be written as JSON: {error}") from error


def _sampling(request: Request) -> dict[str, Any]:
    given = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": given.max_new_tokens,
        "temperature": given.temperature,
        "top_p": given.top_p,
        "top_k": given.top_k,
        "min_p": given.min_p,
        "min_new_tokens": given.min_new_tokens,
        "ignore_eos": given.ignore_eos,
        "skip_special_tokens": given.skip_special_tokens,
        "no_stop_trim": given.no_stop_trim,
        "frequency_penalty": given.frequency_penalty,
        "presence_penalty": given.presence_penalty,
        "repetition_penalty": given.repetition_penalty,
    }
    if request.n > 1:
        params["n"] = request.n
    if given.stop:
        params["stop"] = given.stop
    if given.stop_token_ids:
        params["stop_token_ids"] = given.stop_token_ids
    if request.seed is not None:
        params["sampling_seed"] = request.seed
    if request.stream:
        params["stream_interval"] = _STREAM_INTERVAL
    return params


def headers(request: Request) -> dict[str, str]:
    """HTTP headers of `request`: JSON, and the group's id as the routing key that sglang-router and smg read.

    The key is percent-encoded where HTTP would not carry it, and hashed where it is long; either way two groups
    keep two keys.
    """
    key = quote(request.group_id, safe="!#$&'*+-.^_`|~/:@=,;()[]{}", errors="surrogatepass")
    if len(key) > _LONGEST_KEY:
        key = hashlib.sha256(request.group_id.encode(errors="surrogatepass")).hexdigest()
    return {"Content-Type": "application/json", "X-SMG-Routing-Key": key}
