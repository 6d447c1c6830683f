"""Requests and their order: what of transformers' continuous batching is ours to change.

Invariants:
- A `Sequence` belongs to exactly one request state at a time. Forks get theirs from their parent's `children`.
- A forking request always has at least one prompt token left to run (transformers 5.24.0 would otherwise schedule a
  step of length zero: a prompt of one token, or one that the prefix cache holds but for its last token).
- Aborting never strands the queue: admission is opened again (transformers closes it when it offloads, and opens it
  only when a request finishes by itself).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import FIFOScheduler

from onefill.local.sequence import Sequence

__all__ = ["Scheduler", "State"]

_CHILD = "__child#"


class State(RequestState):
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
    ) -> State:
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

    def fork(self, new_request_id: str) -> State:
        """The child of that id, at the same place. The original copies everything deeply, once a child."""
        child = State.build(new_request_id, self.initial_tokens, self._child(new_request_id), (), self.version)
        child.remaining_prefill_tokens = self.remaining_prefill_tokens[:]
        child.tokens_to_process = self.tokens_to_process[:]
        child.position_offset = self.position_offset
        child.allocated_blocks = self.allocated_blocks
        child._status = self._status
        child.sequence.start(self.position_offset)
        return child

    def create_equivalent_initial_request(self) -> State:
        """The same request from the start, with what it generated as part of its prompt."""
        again = State.build(
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


class Scheduler(FIFOScheduler):
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

    def _queue_children(self, state: State) -> None:
        """Makes requests of their own of children that cannot be forked."""
        for i, child in enumerate(state.children[: state.num_children]):
            self.add_waiting_request(
                State.build(f"{state.request_id}{_CHILD}{i}", state.initial_tokens, child, (), state.version)
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

    def _settle(self, state: State) -> None:
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
