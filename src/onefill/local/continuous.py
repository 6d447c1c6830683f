"""All that touches the private parts of transformers' continuous batching. Pinned to the version below.

Invariants:
- Only the generation thread changes requests, scheduler and cache, except inside `Core.parked()`, where that thread
  stands still between two steps.
- A `Sequence` belongs to exactly one request state at a time. Forks get theirs from their parent's `children`.
- A forking request always has at least one prompt token left to run (transformers 5.24.0 would otherwise schedule a
  step of length zero: a prompt of one token, or one that the prefix cache holds but for its last token).
- Aborting never strands the queue: admission is opened again (transformers closes it when it offloads, and opens it
  only when a request finishes by itself).
"""

from __future__ import annotations

import math
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
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import FIFOScheduler

from onefill.errors import ConfigError, InfraError
from onefill.local import attention
from onefill.local.sampler import Row, sample, seeded_uniform
from onefill.local.sequence import Sequence

__all__ = ["TRANSFORMERS", "Core"]

TRANSFORMERS = "5.24.0"
_CHILD = "__child#"
_DEFAULT_SEED = 42  # SGLang's in deterministic mode


class _State(RequestState):
    """A request of continuous batching that writes into a `Sequence`."""

    sequence: Sequence
    children: list[Sequence]
    version: Callable[[], str]

    @classmethod
    def build(
        cls,
        request_id: str,
        tokens: list[int],
        sequence: Sequence,
        children: SequenceOf[Sequence],
        version: Callable[[], str],
    ) -> _State:
        state = cls(request_id=request_id, initial_tokens=tokens, num_children=len(children), max_new_tokens=None)
        state.sequence, state.children, state.version = sequence, list(children), version
        return state

    def update_and_check_completion(self, token_id: int, logprob: float | None) -> bool:
        """Takes the next token; True when the response is over. Replaces the original's limits by the sequence's."""
        sequence = self.sequence
        if sequence.max_new_tokens == 0:
            sequence.end_at_prefill()
        elif logprob is None or math.isnan(logprob):
            sequence.fail("the model returned logits that are not numbers")
        else:
            self.generated_tokens.append(token_id)
            self.tokens_to_process = [token_id]
            sequence.append(token_id, logprob, self.version())
        if sequence.finish is not None:
            self.status = RequestStatus.FINISHED
        return sequence.finish is not None

    def fork(self, new_request_id: str) -> _State:
        """The child of that id, at the same place. The original copies everything deeply, once a child."""
        child = _State.build(new_request_id, self.initial_tokens, self._child(new_request_id), (), self.version)
        child.remaining_prefill_tokens = self.remaining_prefill_tokens[:]
        child.tokens_to_process = self.tokens_to_process[:]
        child.position_offset = self.position_offset
        child.allocated_blocks = self.allocated_blocks
        child._status = self._status
        child.sequence.start(self.position_offset)
        return child

    def create_equivalent_initial_request(self) -> _State:
        """The same request from the start, with what it generated as part of its prompt."""
        again = _State.build(
            self.request_id, self.initial_tokens + self.generated_tokens, self.sequence, self.children, self.version
        )
        again.num_children = self.num_children
        return again

    def _child(self, request_id: str) -> Sequence:
        return self.children[int(request_id.rpartition(_CHILD)[2])]

    def become(self, request_id: str) -> None:
        """Takes the sequence of the child of that id: transformers queues children that did not fit this way."""
        self.sequence, self.children, self.num_children = self._child(request_id), [], 0

    def to_generation_output(self) -> None:
        """Nothing: the sequence has heard of it already, and copying the tokens would be waste."""


class _Scheduler(FIFOScheduler):
    """First come, first served; with aborts, pauses, and counts of what is prefilled."""

    def __init__(self, cache: Any, max_requests_per_batch: int) -> None:
        self.paused = False
        self.aborts = False
        self.prefilled = 0
        super().__init__(cache=cache, safety_margin=None, max_requests_per_batch=max_requests_per_batch)

    def add_waiting_request(self, state: Any) -> None:
        if state.children and _CHILD in state.request_id:
            state.become(state.request_id)
        if state.sequence.time_started:
            state.sequence.retractions += 1
        self.aborts = self.aborts or state.sequence.abort_requested
        super().add_waiting_request(state)

    def schedule_batch(self, token_budget: int, cache_budget: int) -> tuple[list[Any] | None, bool, int, int]:
        if self.paused:
            return [], False, 0, 0
        if not self.active_requests:
            self.block_new_requests = False
        plan = super().schedule_batch(token_budget, cache_budget)
        self.prefilled += sum(f.query_length for f in plan[0] or () if not f.state.generated_tokens)
        return plan

    def _schedule_request(self, state: Any, request_tokens: list[int], token_budget: int, removed: set[str]) -> None:
        if state.num_children and len(request_tokens) < 2:
            self._queue_children(state)
        state.sequence.start(state.position_offset)
        super()._schedule_request(state, request_tokens, token_budget, removed)

    def _queue_children(self, state: _State) -> None:
        """Makes requests of their own of children that cannot be forked."""
        for i, child in enumerate(state.children[: state.num_children]):
            self.add_waiting_request(
                _State.build(f"{state.request_id}{_CHILD}{i}", state.initial_tokens, child, (), state.version)
            )
        state.num_children = 0

    def clear_cancelled_requests(self) -> list[RequestState]:
        if self.aborts:
            self.aborts = False
            states: list[Any] = [*self.active_requests.values(), *self.waiting_requests.values()]
            for state in states:
                self._settle(state)
        cleared: list[RequestState] = super().clear_cancelled_requests()
        if cleared:
            self.block_new_requests = False
        return cleared

    def _settle(self, state: _State) -> None:
        """Ends what was aborted of a request and of the children it has not forked yet."""
        if state.num_children:
            for child in state.children:
                if child.abort_requested:
                    child.abort()
            state.children = [c for c in state.children if not c.abort_requested]
            state.num_children = len(state.children)
        if not state.sequence.abort_requested:
            return
        started = state.sequence.cached_tokens is not None
        state.sequence.abort()
        if state.num_children:  # the first child takes its place: the prefill is theirs too
            state.sequence = state.children.pop(0)
            state.num_children -= 1
            if started:
                state.sequence.start(state.position_offset)
        else:
            self.set_request_cancellation(state.request_id)

    def retract(self) -> int:
        """Sends all running requests back to the head of the queue and frees their cache."""
        running: list[Any] = list(self.active_requests.values())
        waiting = list(self.waiting_requests_order)
        for state in running:
            again = state.create_equivalent_initial_request()
            self.cache.free_blocks(state.request_id, no_cache=True)
            self.finish_request(state.request_id)
            self.add_waiting_request(again)
        self.waiting_requests_order.clear()
        self.waiting_requests_order.extend((*(s.request_id for s in running), *waiting))
        return len(running)


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
        self._scheduler = _Scheduler(self._cache, min(max_requests, self._cache.max_batch_tokens))
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
        self._manager.input_queue.put(_State.build(request_id, prompt, sequences[0], sequences[1:], self._version))
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
