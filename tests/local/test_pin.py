"""The private parts of transformers that the engine stands on. When the pin moves, this says what to look at."""

from __future__ import annotations

import inspect
from importlib.metadata import version

import pytest
from transformers.generation.continuous_batching import (
    continuous_api,
    model_runner,
    offloading_manager,
    requests,
    scheduler,
)
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from onefill.errors import ConfigError
from onefill.local import continuous, scheduling


def test_transformers_is_the_version_that_was_read():
    assert version("transformers") == continuous.TRANSFORMERS, (
        "the pin moved: read transformers' continuous batching again (scheduler._schedule_request, update_batch's "
        "forks, RequestState, ModelRunner._sample), then change continuous.TRANSFORMERS"
    )


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [
        (requests.RequestState, "update_and_check_completion", ["self", "token_id", "logprob"]),
        (requests.RequestState, "fork", ["self", "new_request_id"]),
        (requests.RequestState, "create_equivalent_initial_request", ["self"]),
        (scheduler.Scheduler, "add_waiting_request", ["self", "state"]),
        (
            scheduler.Scheduler,
            "_schedule_request",
            ["self", "state", "request_tokens", "token_budget", "request_ids_to_remove_from_waiting"],
        ),
        (scheduler.FIFOScheduler, "schedule_batch", ["self", "token_budget", "cache_budget"]),
        (scheduler.Scheduler, "clear_cancelled_requests", ["self"]),
        (model_runner.ModelRunner, "_sample", ["self", "scores", "output_ids"]),
        (continuous_api.OutputRouter, "fail_and_deliver", ["self", "state", "error"]),
        (continuous_api.ContinuousBatchingManager, "_create_batch_processor", ["self"]),
        (continuous_api.ContinuousBatchingManager, "pause", ["self"]),
        (PagedAttentionCache, "evict_cached_blocks", ["self"]),
        (PagedAttentionCache, "free_blocks", ["self", "request_id", "no_cache"]),
        (offloading_manager.OffloadingManager, "offload_requests", ["self"]),
    ],
)
def test_what_is_overridden_or_called_is_still_there(owner: type, name: str, parameters: list[str]):
    assert list(inspect.signature(getattr(owner, name)).parameters) == parameters


def test_children_are_still_named_the_same_way():
    assert scheduling._CHILD in inspect.getsource(continuous_api.ContinuousBatchProcessor.update_batch)


def test_another_version_is_refused_with_the_command_that_helps(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(continuous.transformers, "__version__", "9.9.9")
    with pytest.raises(ConfigError, match=r"pip install transformers==5\.24\.0"):
        continuous.Core(
            None,
            version=lambda: "",
            max_requests=1,
            max_total_tokens=64,
            max_batch_tokens=64,
            page_size=32,
            share_prefixes=True,
            deterministic=False,
            seed=None,
        )
