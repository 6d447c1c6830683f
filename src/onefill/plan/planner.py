"""Turns a group into the requests that cover it.

Invariants:
- The requests of a plan cover every unfinished sample of the group exactly once, and no other.
- All that native, split and fanout differ in is what comes out here; nothing after this asks which one it was.
- A request for more than one sample is made only where no rule bars it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from onefill.plan.request import Request
from onefill.plan.rules import Context, Rule, barring
from onefill.plan.strategy import Form, Strategy
from onefill.types import Group, Sample, TokenArray

__all__ = ["SHARE_FROM_TOKENS", "Plan", "plan"]

SHARE_FROM_TOKENS = 64
"""Prompts shorter than this are not worth waiting for: prefilling them costs less than a round trip."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests of a group.

    Args:
        form: what they amount to: NATIVE, SPLIT or FANOUT.
        waves: requests to send together; a later wave leaves when the earlier one has its first token, since
            singles of one prompt that arrive together may each prefill it. At most two.
        barred_by: rules that kept the group from native sampling; () where native was allowed.
    """

    form: Form
    waves: tuple[tuple[Request, ...], ...]
    barred_by: tuple[Rule, ...] = ()

    @property
    def requests(self) -> tuple[Request, ...]:
        return tuple(request for wave in self.waves for request in wave)


def plan(group: Group, *, strategy: Strategy, context: Context, new_id: Callable[[], str]) -> Plan:
    """Plans the unfinished samples of `group`.

    Args:
        group: its prompt must have token ids.
        strategy: what the user wants; native and split yield to the rules.
        context: the engine's capabilities and the trainer's wishes.
        new_id: gives request ids that are prefix-free (equal length is enough).

    Raises:
        ValueError: nothing is unfinished, a prompt has no token ids, or a sample has no budget left.
    """
    samples = group.unfinished
    if not samples:
        raise ValueError(f"group {group.id} has no unfinished sample to plan")
    barred = barring(group, context)
    if barred or strategy.form is Form.FANOUT:
        chunks = [[s] for s in samples]
    else:
        k = strategy.k if strategy.form is Form.SPLIT else len(samples)
        chunks = [samples[i : i + k] for i in range(0, len(samples), k)]
    requests = [_request(group, chunk, new_id(), context) for chunk in chunks]
    return Plan(form=_form(chunks), waves=_waves(requests, context), barred_by=barred)


def _form(chunks: list[list[Sample]]) -> Form:
    if all(len(chunk) == 1 for chunk in chunks):
        return Form.FANOUT
    return Form.NATIVE if len(chunks) == 1 else Form.SPLIT


def _request(group: Group, chunk: list[Sample], request_id: str, context: Context) -> Request:
    first = chunk[0]
    prompt = first.prompt or group.prompt
    if prompt.tokens is None:
        raise ValueError(f"group {group.id}: prompt {prompt.id} has no token ids yet")
    sampling = group.sampling
    spent = int(first.tokens.size)
    if spent:
        left = sampling.max_new_tokens - spent
        if left < 1:
            raise ValueError(f"group {group.id} sample {first.index}: {spent} tokens spent, none left to ask for")
        sampling = replace(sampling, max_new_tokens=left, min_new_tokens=max(0, sampling.min_new_tokens - spent))
    return Request(
        id=request_id,
        group_id=group.id,
        samples=tuple(s.index for s in chunk),
        tokens=_input(prompt.tokens, first),
        sampling=sampling,
        media=prompt.media,
        seed=_seed(group, first, context),
        routed_experts=group.needs.routed_experts,
        lora=group.needs.lora,
    )


def _seed(group: Group, sample: Sample, context: Context) -> int | None:
    """A sample's own seed, or in deterministic mode one made of run, group and index.

    Without one, every request of a deterministic engine gets the same default (42 in SGLang 0.5.23), and the group
    collapses to copies whether it is sent natively or not.
    """
    if sample.seed is not None or not context.capabilities.deterministic or group.sampling.greedy:
        return sample.seed
    name = f"{context.seed}/{group.id}/{sample.index}".encode(errors="replace")
    return int.from_bytes(hashlib.blake2b(name, digest_size=4).digest()) >> 1


def _input(prompt: TokenArray, sample: Sample) -> TokenArray:
    if not sample.tokens.size:
        return prompt
    tokens: TokenArray = np.concatenate((prompt, sample.tokens))
    tokens.setflags(write=False)
    return tokens


def _waves(requests: list[Request], context: Context) -> tuple[tuple[Request, ...], ...]:
    lead, rest = requests[0], requests[1:]
    shares = (
        rest
        and context.capabilities.prefix_cache
        and lead.tokens.size >= SHARE_FROM_TOKENS
        and all(r.tokens is lead.tokens for r in rest)
    )
    if not shares:
        return (tuple(requests),)
    return ((replace(lead, stream=True),), tuple(rest))
