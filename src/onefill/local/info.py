"""What the server says of itself, in SGLang's shapes. Reads the engine, changes nothing."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from onefill import __version__
from onefill.local.engine import Engine

__all__ = ["VERSION", "loads", "metrics", "model_info", "server_info"]

VERSION = f"onefill-local {__version__}"


def server_info(engine: Engine, started: float) -> dict[str, Any]:
    """`/server_info`: the flags, and what lives in the engine now.

    Args:
        engine: what is served.
        started: Unix time of the start.
    """
    config = engine.config
    running, waiting = engine.load()
    return {
        "engine": "onefill-local",
        "version": VERSION,
        "model_path": engine.model_path,
        "tokenizer_path": engine.tokenizer_path,
        "served_model_name": config.model,
        "context_length": engine.context_length,
        "vocab_size": engine.vocab_size,
        "max_running_requests": config.max_running_requests,
        "max_total_num_tokens": engine.capacity,
        "max_total_tokens": config.max_total_tokens,
        "chunked_prefill_size": config.max_batch_tokens,
        "page_size": config.page_size,
        "random_seed": config.seed,
        "device": "cpu",
        "dtype": "float32",
        "enable_deterministic_inference": config.deterministic,
        "disable_radix_cache": config.disable_radix_cache,
        "speculative_algorithm": None,
        "weight_version": engine.weight_version,
        "host": config.host,
        "port": config.port,
        "startup_time": started,
        "internal_states": [{"num_running_reqs": running, "num_waiting_reqs": waiting, "paused": engine.paused}],
    }


def model_info(engine: Engine) -> dict[str, Any]:
    """`/model_info`: the weights that are loaded now."""
    return {
        "model_path": engine.model_path,
        "served_model_name": engine.config.model,
        "tokenizer_path": engine.tokenizer_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": engine.weight_version,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": engine.model_type,
        "architectures": engine.architectures,
    }


def loads(engine: Engine) -> dict[str, Any]:
    """`/v1/loads`: one entry, since there is one rank."""
    running, waiting = engine.load()
    used, capacity = engine.used_tokens, engine.capacity
    load = {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_waiting_uncached_tokens": engine.waiting_tokens(),
        "num_used_tokens": used,
        "num_total_tokens": used,
        "num_active_tokens": used,
        "max_total_num_tokens": capacity,
        "max_running_requests": engine.config.max_running_requests,
        "token_usage": used / capacity,
        "total_prefill_uncached_tokens": engine.prefilled_tokens,
    }
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": VERSION,
        "accelerator": None,
        "num_accelerators": 0,
        "loads": [load],
    }


def metrics(engine: Engine) -> dict[str, tuple[str, str, float]]:
    """Type, help text and value of each metric, by name."""
    running, waiting = engine.load()
    totals = engine.counters
    return {
        "onefill_prompt_tokens_total": (
            "counter",
            "Prompt tokens asked for, counted for each sample.",
            totals.prompt_tokens,
        ),
        "onefill_prefill_tokens_total": (
            "counter",
            "Prompt tokens run through the model.",
            engine.prefilled_tokens,
        ),
        "onefill_generated_tokens_total": ("counter", "Tokens of ended samples.", totals.generated_tokens),
        "onefill_samples_finished_total": ("counter", "Samples that ended.", totals.finished),
        "onefill_samples_aborted_total": ("counter", "Samples that ended as aborted.", totals.aborted),
        "onefill_samples_running": ("gauge", "Samples running.", running),
        "onefill_samples_queued": ("gauge", "Samples waiting.", waiting),
        "onefill_cache_used_tokens": ("gauge", "Tokens of KV cache in use.", engine.used_tokens),
        "onefill_cache_capacity_tokens": ("gauge", "Tokens the KV cache holds.", engine.capacity),
    }
