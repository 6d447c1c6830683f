"""What clients may send, as SGLang 0.5.23 takes it, and how a refusal reads.

Invariants:
- A request that parses here is complete: one prompt an entry, parameters in range, ids assigned.
- A field that the embedded engine cannot honour is refused by name where it is set, never dropped in silence.
- Refusals have SGLang's three shapes: `Malformed` (the body's types), `Contract` (unknown or mistyped sampling
  fields), `Refused` (values).
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, StrictBool, StrictFloat, StrictInt, StrictStr, ValidationError

from onefill.local.params import SamplingParams

__all__ = ["Contract", "GenerateRequest", "Job", "Malformed", "Refusal", "Refused", "parse_body", "parse_generate"]

_MOST_STOPS = 32
_LONGEST_REGEX = 256


class Refusal(Exception):  # noqa: N818 (it is an answer, not a fault)
    """An answer other than 200.

    Args:
        message: what was wrong and what to do.
        status: the HTTP status.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status

    def body(self) -> dict[str, Any]:
        """The answer as SGLang words it."""
        return {"error": {"message": str(self)}}


class Refused(Refusal):
    """A value that cannot be served."""


class Contract(Refusal):
    """A body that breaks the schema of sampling parameters."""

    def body(self) -> dict[str, Any]:
        return {"error": str(self)}


class Malformed(Refusal):
    """A body of the wrong type."""

    def body(self) -> dict[str, Any]:
        return {"object": "error", "message": str(self), "type": "Bad Request", "param": None, "code": self.status}


class _Sampling(BaseModel):
    """`sampling_params` on the wire. `null` means the default."""

    model_config = ConfigDict(extra="forbid")

    n: StrictInt | None = None
    max_new_tokens: StrictInt | None = 128
    temperature: StrictFloat | None = None
    top_p: StrictFloat | None = None
    top_k: StrictInt | None = None
    min_p: StrictFloat | None = None
    frequency_penalty: StrictFloat | None = None
    presence_penalty: StrictFloat | None = None
    repetition_penalty: StrictFloat | None = None
    min_new_tokens: StrictInt | None = None
    ignore_eos: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    spaces_between_special_tokens: StrictBool | None = None
    no_stop_trim: StrictBool | None = None
    stop: StrictStr | list[StrictStr] | None = None
    stop_token_ids: list[StrictInt | None] | None = None
    stop_regex: StrictStr | list[StrictStr] | None = None
    stream_interval: StrictInt | None = None
    sampling_seed: StrictInt | None = None
    logit_bias: dict[str, StrictFloat] | None = None
    # Known to SGLang, not served here.
    beam_width: StrictInt | None = None
    json_schema: StrictStr | None = None
    regex: StrictStr | None = None
    ebnf: StrictStr | None = None
    structural_tag: StrictStr | None = None
    custom_params: dict[str, Any] | None = None
    watermark: dict[str, Any] | None = None


_UNSERVED_SAMPLING = ("json_schema", "regex", "ebnf", "structural_tag", "custom_params", "watermark")


class GenerateRequest(BaseModel):
    """The body of `/generate`. Fields that only steer SGLang's own scheduling are taken and ignored."""

    model_config = ConfigDict(extra="ignore")

    text: StrictStr | list[StrictStr] | None = None
    input_ids: list[StrictInt] | list[list[StrictInt]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: StrictStr | list[StrictStr] | None = None
    return_logprob: StrictBool | list[StrictBool] | None = None
    logprob_start_len: StrictInt | list[StrictInt] | None = None
    top_logprobs_num: StrictInt | list[StrictInt] | None = None
    token_ids_logprob: list[Any] | None = None
    return_text_in_logprobs: StrictBool | None = False
    stream: StrictBool | None = False
    # Refused where they are set: see _UNSERVED.
    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    lora_path: Any = None
    lora_id: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
    return_hidden_states: Any = None
    return_routed_experts: Any = None
    return_sampling_mask: Any = None
    return_prompt_token_ids: Any = None
    bootstrap_host: Any = None
    bootstrap_room: Any = None
    extra_key: Any = None
    cache_salt: Any = None


_UNSERVED = (
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "lora_path",
    "lora_id",
    "session_params",
    "custom_logit_processor",
    "return_hidden_states",
    "return_routed_experts",
    "return_sampling_mask",
    "return_prompt_token_ids",
    "bootstrap_host",
    "bootstrap_room",
    "extra_key",
    "cache_salt",
    "token_ids_logprob",
)


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt of a request.

    Args:
        text: the prompt as a string, or None.
        input_ids: the prompt as token ids, or None. Exactly one of the two is there.
        params: how its samples are drawn.
        rids: public ids of its samples, one each; as many as samples.
        return_logprob: whether logprobs are wanted.
        logprob_start_len: first prompt position whose logprob is wanted; -1 for none.
    """

    text: str | None
    input_ids: list[int] | None
    params: SamplingParams
    rids: tuple[str, ...]
    return_logprob: bool
    logprob_start_len: int


@dataclass(frozen=True, slots=True)
class Jobs:
    """A whole `/generate` request: its prompts in order, and the form of the answer."""

    jobs: tuple[Job, ...]
    as_list: bool
    stream: bool
    text_in_logprobs: bool


def parse_body(raw: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        Malformed: it is not JSON, or not an object.
    """
    try:
        body = orjson.loads(raw) if raw else {}
    except orjson.JSONDecodeError as error:
        raise Malformed(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise Malformed(f"the body must be a JSON object, got {type(body).__name__}")
    return body


def parse_generate(body: Mapping[str, Any]) -> Jobs:
    """Reads a `/generate` body.

    Raises:
        Refusal: see the module.
    """
    try:
        request = GenerateRequest.model_validate(body)
    except ValidationError as error:
        raise Malformed(_first_fault(error)) from error
    for name in _UNSERVED:
        if getattr(request, name) not in (None, False, [], ""):
            raise Refused(f"{name} is not supported by the embedded engine")
    prompts, batched = _prompts(request)
    size = len(prompts)
    sampling = _spread_sampling(request.sampling_params, size)
    params, counts = zip(*(_params(s) for s in sampling), strict=True)
    if len(set(counts)) > 1:
        raise Refused("all prompts of a batch must have the same n")
    count = max(1, counts[0])
    rids = _rids(request.rid, size, count, batched=batched)
    wants = _spread(request.return_logprob, size, default=False, name="return_logprob")
    starts = _spread(request.logprob_start_len, size, default=-1, name="logprob_start_len")
    if any(_spread(request.top_logprobs_num, size, default=0, name="top_logprobs_num")):
        raise Refused("top_logprobs_num > 0 is not supported by the embedded engine")
    jobs = tuple(
        Job(text, ids, params[i], rids[i], wants[i], starts[i] if wants[i] else -1)
        for i, (text, ids) in enumerate(prompts)
    )
    return Jobs(jobs, batched or count > 1, bool(request.stream), bool(request.return_text_in_logprobs))


def _first_fault(error: ValidationError) -> str:
    fault = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"unknown field `{where}`"
    return f"{error.error_count()} validation error(s): {where}: {fault['msg']}"


def _prompts(request: GenerateRequest) -> tuple[list[tuple[str | None, list[int] | None]], bool]:
    text, ids = request.text, request.input_ids
    if (text is None) == (ids is None):
        raise Refused("Either text, input_ids or input_embeds should be provided, and only one of them.")
    if text is not None:
        if isinstance(text, str):
            return [(text, None)], False
        if not text:
            raise Refused("text: the batch is empty")
        return [(one, None) for one in text], True
    assert ids is not None
    if ids and isinstance(ids[0], list):
        return [(None, one) for one in ids if isinstance(one, list)], True
    if not ids:
        raise Refused("input_ids is empty")
    return [(None, [i for i in ids if isinstance(i, int)])], False


def _spread_sampling(given: dict[str, Any] | list[dict[str, Any]] | None, size: int) -> list[_Sampling]:
    spread = given if isinstance(given, list) else [given or {}] * size
    if len(spread) != size:
        raise Refused(f"sampling_params has {len(spread)} entries for {size} prompts")
    try:
        first = _Sampling.model_validate(spread[0])
        return [first if one is spread[0] else _Sampling.model_validate(one) for one in spread]
    except ValidationError as error:
        raise Contract(f"sampling_params: {_first_fault(error)}") from error


def _spread(given: Any, size: int, *, default: Any, name: str) -> list[Any]:
    if given is None:
        return [default] * size
    if not isinstance(given, list):
        return [given] * size
    if len(given) != size:
        raise Refused(f"{name} has {len(given)} entries for {size} prompts")
    return given


def _rids(given: str | list[str] | None, size: int, count: int, *, batched: bool) -> list[tuple[str, ...]]:
    """Public ids. Samples of n > 1 get new ones, as on SGLang, where the request's own id then names nothing."""
    if isinstance(given, list):
        if not batched or len(given) != size:
            raise Refused(f"The rids length mismatch with the batch size: {len(given)} rids for {size} prompts")
        if len(set(given)) != size:
            raise Refused("rid: the ids of a batch must differ")
    if count > 1 or given is None:
        return [tuple(uuid.uuid4().hex for _ in range(count)) for _ in range(size)]
    if isinstance(given, list):
        return [(rid,) for rid in given]
    return [(f"{given}_{i}",) for i in range(size)] if batched else [(given,)]


def _params(wire: _Sampling) -> tuple[SamplingParams, int]:
    for name in _UNSERVED_SAMPLING:
        if getattr(wire, name):
            raise Refused(f"sampling_params.{name} is not supported by the embedded engine")
    if (wire.beam_width or 1) > 1:
        raise Refused("sampling_params.beam_width is not supported by the embedded engine")
    params = SamplingParams(
        max_new_tokens=wire.max_new_tokens,
        temperature=_or(wire.temperature, 1.0),
        top_p=_or(wire.top_p, 1.0),
        top_k=_or(wire.top_k, -1),
        min_p=_or(wire.min_p, 0.0),
        frequency_penalty=_or(wire.frequency_penalty, 0.0),
        presence_penalty=_or(wire.presence_penalty, 0.0),
        repetition_penalty=_or(wire.repetition_penalty, 1.0),
        min_new_tokens=_or(wire.min_new_tokens, 0),
        ignore_eos=_or(wire.ignore_eos, False),
        skip_special_tokens=_or(wire.skip_special_tokens, True),
        no_stop_trim=_or(wire.no_stop_trim, False),
        stop=_strings(wire.stop),
        stop_token_ids=tuple(i for i in wire.stop_token_ids or () if i is not None),
        stop_regex=_strings(wire.stop_regex),
        stream_interval=max(1, _or(wire.stream_interval, 1)),
        sampling_seed=wire.sampling_seed,
        logit_bias=_bias(wire.logit_bias),
    )
    _check_ranges(params)
    _check_stops(params)
    return params, _or(wire.n, 1)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _strings(value: str | list[str] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def _bias(value: dict[str, float] | None) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in (value or {}).items()}
    except ValueError as error:
        raise Refused(f"logit_bias must have token ids as keys: {error}") from error


def _check_ranges(p: SamplingParams) -> None:
    most = p.max_new_tokens
    for name, good, want in (
        ("temperature", math.isfinite(p.temperature) and p.temperature >= 0, "a non-negative finite number"),
        ("top_p", 0 < p.top_p <= 1, "in (0, 1]"),
        ("top_k", p.top_k == -1 or p.top_k >= 1, "-1 (disable) or at least 1"),
        ("min_p", 0 <= p.min_p <= 1, "in [0, 1]"),
        ("frequency_penalty", -2 <= p.frequency_penalty <= 2, "in [-2, 2]"),
        ("presence_penalty", -2 <= p.presence_penalty <= 2, "in [-2, 2]"),
        ("repetition_penalty", 0 < p.repetition_penalty <= 2, "in (0, 2]"),
        ("max_new_tokens", most is None or most >= 0, "at least 0"),
        (
            "min_new_tokens",
            p.min_new_tokens >= 0 and (most is None or p.min_new_tokens <= most),
            "in [0, max_new_tokens]",
        ),
        ("sampling_seed", p.sampling_seed is None or -(2**63) <= p.sampling_seed < 2**63, "in [-2**63, 2**63 - 1]"),
        ("logit_bias", all(math.isfinite(b) for b in p.logit_bias.values()), "finite numbers"),
    ):
        if not good:
            raise Refused(f"{name} must be {want}, got {getattr(p, name)!r}.")


def _check_stops(p: SamplingParams) -> None:
    for name, values in (("stop", p.stop), ("stop_regex", p.stop_regex)):
        if len(values) > _MOST_STOPS:
            raise Refused(f"at most {_MOST_STOPS} {name} entries are allowed, got {len(values)}")
        if not all(values):
            raise Refused(f"{name} must not hold empty strings")
    _check_patterns(p.stop_regex)


def _check_patterns(patterns: SequenceOf[str]) -> None:
    for pattern in patterns:
        if len(pattern.encode()) > _LONGEST_REGEX:
            raise Refused(f"stop_regex is over the {_LONGEST_REGEX}-byte limit")
        try:
            re.compile(pattern)
        except re.error as error:
            raise Refused(f"stop_regex {pattern!r} is not a regular expression: {error}") from error
