"""The generation thread over transformers' continuous batching. With `scheduling`, all that touches its private
parts. Pinned to the version below.

Invariant: only the generation thread changes requests, scheduler and cache, except inside `Core.parked()`, where
that thread stands still between two steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.cache import group_layers_by_attn_type
from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import RequestStatus

from onefill.errors import ConfigError, InfraError
from onefill.local import attention
from onefill.local.sampler import Row, sample, seeded_uniform
from onefill.local.scheduling import Scheduler, State
from onefill.local.sequence import Sequence

__all__ = ["TRANSFORMERS", "Core"]

TRANSFORMERS = "5.24.0"
_DEFAULT_SEED = 42  # SGLang's in deterministic mode


class _Runner(ModelRunner):
    """Runs the model and draws each row's token by its own parameters."""

    generator: torch.Generator
    deterministic: bool

    def _sample(self, scores: Tensor, output_ids: Tensor) -> None:
        batch: list[Any] = self.inputs_and_outputs.requests_in_batch  # type: ignore[union-attr]
        sequences = [future.state.sequence for future in batch if future.has_new_token]
        if not sequences:
            return
        count = len(sequences)
        rows = [Row(s.params, s.tokens, tuple(s.stop_ids)) for s in sequences]
        tokens, logprobs = sample(scores[0, :count], rows, self._uniform(sequences))
        output_ids[0, :count].copy_(tokens)
        # transformers carries the logprobs in the integer tensor of the ids, bit for bit
        output_ids[1, :count].copy_(logprobs.view(dtype=torch.int32))

    def _uniform(self, sequences: list[Sequence]) -> Tensor:
        if not self.deterministic:
            return torch.rand(len(sequences), generator=self.generator, dtype=torch.float64)
        seeds = (_DEFAULT_SEED if s.params.sampling_seed is None else s.params.sampling_seed for s in sequences)
        drawn = [seeded_uniform(seed, len(s.tokens)) for seed, s in zip(seeds, sequences, strict=True)]
        return torch.tensor(drawn, dtype=torch.float64)


class _Router(OutputRouter):
    """Delivers nothing: sequences tell their news themselves. Only failures come this way."""

    def deliver(self, output: Any) -> None:
        pass

    def deliver_batch(self, outputs: list[Any]) -> None:
        pass

    def fail_and_deliver(self, state: Any, error: Exception) -> None:
        state.status = RequestStatus.FAILED
        for sequence in (state.sequence, *state.children[: state.num_children]):
            sequence.fail(f"the engine broke: {error}")


class Core:
    """The generation thread with its model and cache.

    Args:
        model: a causal language model in fp32 on the CPU, loaded with `sdpa` attention.
        version: names the weights that are in the model now.
        max_requests: most rows of a step.
        max_total_tokens: size of the cache in tokens, rounded up to whole pages.
        max_batch_tokens: most tokens of a step.
        page_size: tokens of a cache block.
        share_prefixes: whether requests share cached prefixes.
        deterministic: whether tokens are drawn by the request's seed.
        seed: seed of the generator otherwise.
    """

    def __init__(
        self,
        model: Any,
        *,
        version: Callable[[], str],
        max_requests: int,
        max_total_tokens: int,
        max_batch_tokens: int,
        page_size: int,
        share_prefixes: bool,
        deterministic: bool,
        seed: int | None,
    ) -> None:
        if transformers.__version__ != TRANSFORMERS:
            raise ConfigError(
                f"the embedded engine needs transformers {TRANSFORMERS}, found {transformers.__version__}: "
                f"pip install transformers=={TRANSFORMERS}"
            )
        if find_spec("psutil") is None:  # transformers would take the memory for 0 bytes
            raise ConfigError("the embedded engine needs psutil: pip install psutil")
        self._version = version
        self._ids = iter(range(1 << 62))
        self._lock = threading.Lock()
        self._manager = ContinuousBatchingManager(
            model=model,
            # No processors: they would be the same for all rows, and logprobs would come after them.
            generation_config=GenerationConfig(  # type: ignore[no-untyped-call]
                do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=page_size,
                num_blocks=-(-max_total_tokens // page_size),
                max_batch_tokens=max_batch_tokens,
                max_requests_per_batch=max_requests,
                allow_block_sharing=share_prefixes,
                max_blocks_per_request=0,
                use_cuda_graph=False,
                use_async_batching=False,
                return_logprobs=True,
                auto_switch_to_flash=False,
                max_memory_percent=0.95,
            ),
        )
        self._manager.output_router = _Router()
        _use_own_attention(model)
        self._install(max_requests, deterministic, seed)
        self._manager.start()

    def _install(self, max_requests: int, deterministic: bool, seed: int | None) -> None:
        """Builds transformers' batch processor and puts our scheduler and runner into it."""
        try:
            processor = self._manager._create_batch_processor()
        except MemoryError as error:
            raise ConfigError(f"the KV cache does not fit into memory, lower --max-total-tokens: {error}") from error
        self._cache = processor.cache
        self._scheduler = Scheduler(self._cache, min(max_requests, self._cache.max_batch_tokens))
        processor.scheduler = self._scheduler
        processor.offloading_manager.scheduler = self._scheduler
        runner = _Runner(
            logit_processor=processor.logit_processor,
            cb_config=processor.cb_config,
            inputs_and_outputs=processor.inputs_and_outputs,
            cache=self._cache,
            do_sample=True,
            return_logprobs=True,
        )
        runner.generator = torch.Generator()
        runner.deterministic = deterministic
        if seed is None:
            runner.generator.seed()
        else:
            runner.generator.manual_seed(seed)
        processor.model_runner = runner
        self._manager.batch_processor = processor

    def submit(self, prompt: list[int], sequences: SequenceOf[Sequence]) -> None:
        """Queues one prompt and its samples; the first is prefilled, the others fork off it.

        Raises:
            InfraError: the generation thread is gone.
        """
        if not self.alive:
            raise InfraError("the engine has stopped")
        with self._lock:
            request_id = f"r{next(self._ids)}"
        self._manager.input_queue.put(State.build(request_id, prompt, sequences[0], sequences[1:], self._version))
        self._manager._wake_up_loop.set()

    def abort(self, sequences: SequenceOf[Sequence]) -> None:
        """Asks for sequences to end; each tells its end as ever."""
        for sequence in sequences:
            sequence.abort_requested = True
        self._scheduler.aborts = True
        self._manager._wake_up_loop.set()

    @property
    def alive(self) -> bool:
        """Whether the generation thread runs and takes requests."""
        manager = self._manager
        return bool(manager.is_running()) and manager.background_thread_status.can_accept_new_requests() is None

    @property
    def paused(self) -> bool:
        """Whether no steps are run, though requests may be queued and aborted."""
        return self._scheduler.paused

    @paused.setter
    def paused(self, value: bool) -> None:
        self._scheduler.paused = value
        self._manager._wake_up_loop.set()

    @contextmanager
    def parked(self) -> Iterator[None]:
        """The generation thread stands still between two steps. Blocks until it does: never on an event loop.

        Raises:
            InfraError: the generation thread is gone.
        """
        try:
            pause = self._manager.pause()
            pause.__enter__()
        except RuntimeError as error:
            raise InfraError(f"the engine has stopped: {error}") from error
        try:
            yield
        finally:
            pause.__exit__(None, None, None)

    def retract(self) -> int:
        """Sends running requests back to the queue; returns how many. Only inside `parked`."""
        return self._scheduler.retract()

    def drop_cached_prefixes(self) -> None:
        """Forgets all cached blocks that no request uses. Only inside `parked`."""
        self._cache.evict_cached_blocks()
        self._cache.pool.try_to_free_sectors()

    @property
    def running(self) -> int:
        """Requests that hold cache now."""
        return len(self._scheduler.active_requests)

    @property
    def capacity(self) -> int:
        """Tokens that the cache holds."""
        return int(self._cache.num_blocks) * int(next(iter(self._cache.cache_allocators.values())).tokens_per_page)

    @property
    def used(self) -> int:
        """Tokens' worth of cache in use, cached prefixes included; whole pages."""
        return round((1.0 - float(self._cache.compute_free_capacity())) * self.capacity)

    @property
    def prefilled(self) -> int:
        """Prompt tokens run through the model so far (each fork runs the last one again)."""
        return self._scheduler.prefilled

    def close(self) -> None:
        """Stops the generation thread; what it still had fails."""
        self._manager.stop(block=True, timeout=10, hard_stop=True)


def _use_own_attention(model: nn.Module) -> None:
    """Switches to per-sequence attention where the model has plain full attention only."""
    config: Any = model.config
    text = config.get_text_config()
    special = ("attn_logit_softcapping", "final_attn_softcap", "attention_sinks")
    if any(getattr(text, name, None) for name in special):
        return
    if getattr(text, "_attn_implementation", None) == "sdpa" and set(group_layers_by_attn_type(text)) == {
        "full_attention"
    }:
        AttentionInterface.register(attention.NAME, attention.paged_attention)
        model.set_attn_implementation(attention.NAME)  # type: ignore[operator]
