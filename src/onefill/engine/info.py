"""What an engine says of itself: `/server_info`, `/model_info`, `/v1/models`, `/workers`, `/v1/loads`.

Invariants:
- Every field may be missing or of a wrong type, and is then its harmless default: other versions and routers
  answer differently, and no rollout should stop for that.
- What is not said is unknown. SGLang 0.5.23 tells neither its vocabulary nor, unless the user set it, its
  context length in `/server_info`; the latter stands in `/v1/models` as `max_model_len`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from onefill.plan.capabilities import Capabilities, Support

__all__ = ["EngineInfo", "EngineKind", "EngineLoad", "capabilities", "engine_info", "engine_load"]

_FLAGS = (
    "allow_auto_truncate",
    "disable_radix_cache",
    "disaggregation_mode",
    "dp_size",
    "enable_deterministic_inference",
    "enable_lora",
    "incremental_streaming_output",
    "max_req_input_len",
    "max_running_requests",
    "max_total_num_tokens",
    "preferred_sampling_params",
    "rl_on_policy_target",
    "skip_tokenizer_init",
    "speculative_algorithm",
    "tp_size",
)

_TOLD_BY = {
    "speculative_decoding": "speculative_algorithm",
    "deterministic": "enable_deterministic_inference",
    "prefix_cache": "disable_radix_cache",
}


class EngineKind(StrEnum):
    SGLANG = "sglang"
    LOCAL = "onefill-local"
    ROUTER = "router"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """One server, as it describes itself.

    Args:
        url: base URL.
        kind: what answered. A router tells of the model only, from whichever worker it asked, and nothing of the
            flags or the context of its engines (sglang-router 0.3.2).
        version: the server's version, "" where untold.
        model_path: directory or hub name of its weights.
        tokenizer_path: where its tokenizer comes from.
        vocab_size: rows of the embedding, None where untold (SGLang 0.5.23 does not tell).
        context_length: prompt and response together, None where untold.
        usable_context: as much of it as the server serves without cutting the response (see `_usable`).
        weight_version: name of the weights it serves now.
        speculative_decoding: a speculative algorithm is on.
        deterministic: deterministic mode is on, directly or through `rl_on_policy_target`.
        prefix_cache: the radix cache is on.
        lora_enabled: it takes LoRA adapters.
        disaggregation: prefill-decode role, "" where it has none.
        has_image_understanding: the model sees.
        workers: for a router, the base URLs of its engines: `/abort_request` must go to these.
        flags: the part of its raw flags that can matter for a rollout.
    """

    url: str
    kind: EngineKind = EngineKind.UNKNOWN
    version: str = ""
    model_path: str = ""
    tokenizer_path: str = ""
    vocab_size: int | None = None
    context_length: int | None = None
    usable_context: int | None = None
    weight_version: str = ""
    speculative_decoding: bool = False
    deterministic: bool = False
    prefix_cache: bool = True
    lora_enabled: bool = False
    disaggregation: str = ""
    has_image_understanding: bool = False
    workers: tuple[str, ...] = ()
    flags: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How busy an engine is, summed over its data-parallel ranks.

    Args:
        running: samples that are decoding.
        waiting: samples that are queued.
        used_tokens: tokens in its KV cache that are in use.
    """

    running: int
    waiting: int
    used_tokens: int

    @property
    def idle(self) -> bool:
        return self.running == 0 and self.waiting == 0


def engine_info(url: str, *, server: Any, model: Any, models: Any = None, workers: Any = None) -> EngineInfo:
    """Puts together what the four endpoints answered; each may be None or anything else.

    Args:
        url: base URL of the server.
        server: body of `/server_info`.
        model: body of `/model_info`.
        models: body of `/v1/models`.
        workers: body of `/workers`, which only routers have (404 on SGLang 0.5.23).
    """
    flags = _mapping(server)
    said = _mapping(model)
    both = {**flags, **{key: value for key, value in said.items() if value is not None}}
    addresses = _addresses(workers)
    disaggregation = _text(both, "disaggregation_mode")
    context = _count(both, "context_length") or _model_length(models)
    return EngineInfo(
        url=url,
        kind=_kind(flags, workers),
        version=_text(flags, "version"),
        model_path=_text(both, "model_path"),
        tokenizer_path=_text(both, "tokenizer_path"),
        vocab_size=_count(both, "vocab_size"),
        context_length=context,
        usable_context=_usable(context, flags),
        weight_version=_text(both, "weight_version"),
        speculative_decoding=bool(flags.get("speculative_algorithm")),
        deterministic=bool(flags.get("enable_deterministic_inference") or flags.get("rl_on_policy_target")),
        prefix_cache=not flags.get("disable_radix_cache", False),
        lora_enabled=bool(flags.get("enable_lora") or flags.get("lora_paths")),
        disaggregation="" if disaggregation == "null" else disaggregation,
        has_image_understanding=bool(said.get("has_image_understanding", False)),
        workers=addresses,
        flags={key: flags[key] for key in _FLAGS if key in flags},
    )


def capabilities(info: EngineInfo) -> Capabilities:
    """What follows from the engine's own words; everything else stays UNKNOWN until it is probed."""
    local = info.kind is EngineKind.LOCAL
    evidence = {
        "speculative_decoding": f"speculative_algorithm is {'set' if info.speculative_decoding else 'not set'}",
        "deterministic": f"deterministic mode is {'on' if info.deterministic else 'off'}",
        "prefix_cache": f"the radix cache is {'on' if info.prefix_cache else 'off'}",
    }
    for feature, flag in _TOLD_BY.items():
        if flag not in info.flags:  # as behind a router
            evidence[feature] = f"untold ({flag}), so the usual is taken: {evidence[feature]}"
    if local:
        evidence["parallel_sampling"] = "the embedded engine forks n samples off one prefill"
    return Capabilities(
        parallel_sampling=Support.YES if local else Support.UNKNOWN,
        speculative_decoding=info.speculative_decoding,
        deterministic=info.deterministic,
        prefix_cache=info.prefix_cache,
        vocab_size=info.vocab_size,
        context_length=info.context_length,
        evidence=evidence,
    )


def engine_load(body: Any) -> EngineLoad | None:
    """The load out of `/v1/loads` ({"loads": [...]}, 0.5.23), `/get_load` or `/get_loads` (lists, older); None where
    it has no such numbers, like sglang-router 0.3.2 (`/get_loads` tells -1 for an engine of 0.5.23).
    """
    ranks = body.get("loads") if isinstance(body, dict) else body
    if not isinstance(ranks, list) or not ranks or not all(isinstance(rank, dict) for rank in ranks):
        return None
    running = waiting = used = 0
    for rank in ranks:
        waits = _count(rank, "num_waiting_reqs") or 0
        runs = _count(rank, "num_running_reqs")
        if runs is None:  # /get_load of older versions counts both together
            both = _count(rank, "num_reqs")
            if both is None:
                return None
            runs = max(both - waits, 0)
        running += runs
        waiting += waits
        used += _count(rank, "num_used_tokens") or _count(rank, "num_tokens") or 0
    return EngineLoad(running=running, waiting=waiting, used_tokens=used)


def _kind(flags: Mapping[str, Any], workers: Any) -> EngineKind:
    if flags.get("engine") == EngineKind.LOCAL or flags.get("kind") == EngineKind.LOCAL:
        return EngineKind.LOCAL
    if workers is not None:
        return EngineKind.ROUTER
    if "model_path" in flags and "disable_radix_cache" in flags:
        return EngineKind.SGLANG
    return EngineKind.UNKNOWN


def _addresses(workers: Any) -> tuple[str, ...]:
    listed = workers.get("workers") if isinstance(workers, dict) else workers
    if not isinstance(listed, list):
        return ()
    urls = [entry.get("url") if isinstance(entry, dict) else entry for entry in listed]
    return tuple(url for url in urls if isinstance(url, str))


def _model_length(models: Any) -> int | None:
    data = _mapping(models).get("data")
    first = data[0] if isinstance(data, list) and data else None
    return _count(_mapping(first), "max_model_len")


def _usable(context: int | None, flags: Mapping[str, Any]) -> int | None:
    """The longest prompt plus response that SGLang 0.5.23, and the embedded engine like it, does not cut in silence.

    It refuses what exceeds the context, but ends responses at min(context, KV pool) - 2 without a word (seen: prompt
    4,000 and 96 new tokens in a context of 4,096 gave 94). SGLang's `max_req_input_len` lies 4 below that bound; the
    embedded engine has none.
    """
    input_length, pool = _count(flags, "max_req_input_len"), _count(flags, "max_total_num_tokens")
    if input_length is not None:
        return min(context or input_length + 4, input_length + 4)
    if context is None or pool is None:
        return context
    return min(context, pool) - 2


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(source: Mapping[str, Any], key: str) -> str:
    value = source.get(key)
    return value if isinstance(value, str) else ""


def _count(source: Mapping[str, Any], key: str) -> int | None:
    value = source.get(key)
    return value if type(value) is int and value >= 0 else None
