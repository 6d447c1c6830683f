"""Draws the next token of many samples at once, each by its own parameters. Pure: no model, no clock.

Invariants:
- The reported logprob is log softmax(logits / temperature) at the token, not renormalised for top-k, top-p or
  min-p; at temperature 0 it is the raw log softmax. This is SGLang's definition (seen on 0.5.23).
- Penalties and biases change the logits before everything else, and only by generated tokens (as SGLang does).
- A token outside the row's top-k, top-p or min-p set, or with probability 0, is never drawn.
- Given the same logits, parameters and uniform numbers, the result is the same, whatever the other rows are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onefill.local.params import SamplingParams

__all__ = ["Row", "sample", "seeded_uniform"]

_HEAD = 512  # candidates looked at before a whole row is sorted
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Row:
    """One sample that waits for its next token.

    Args:
        params: its parameters.
        generated: the ids it has generated so far.
        stop_ids: ids that would end it; held back until `min_new_tokens` are there.
    """

    params: SamplingParams
    generated: Sequence[int] = ()
    stop_ids: Sequence[int] = ()


def sample(logits: Tensor, rows: Sequence[Row], uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draws one token a row.

    Args:
        logits: float32, shape [rows, vocabulary]; may be overwritten.
        rows: parameters and history, one a row.
        uniform: float64 in [0, 1), shape [rows]; the only source of chance.

    Returns:
        Token ids (int64) and their logprobs (float32), each of shape [rows].
    """
    for index, row in enumerate(rows):
        if row.params.adjusted:
            _adjust(logits[index], row)
    temperatures = [1.0 if row.params.greedy else row.params.temperature for row in rows]
    if any(t != 1.0 for t in temperatures):
        logits.div_(torch.tensor(temperatures, dtype=logits.dtype).unsqueeze(1))
    tokens = logits.argmax(dim=-1)
    normaliser = torch.logsumexp(logits, dim=-1)
    drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
    if drawn:
        plain = [i for i in drawn if not rows[i].params.filtered]
        cut = [i for i in drawn if rows[i].params.filtered]
        if plain:
            at = torch.tensor(plain)
            tokens[at] = _draw(_probabilities(logits, normaliser, at), uniform[at])
        if cut:
            at = torch.tensor(cut)
            params = [rows[i].params for i in cut]
            tokens[at] = _draw_filtered(_probabilities(logits, normaliser, at), params, uniform[at])
    logprobs = logits.gather(1, tokens.unsqueeze(1)).squeeze(1) - normaliser
    return tokens, logprobs


def seeded_uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on the seed and the token's position alone (splitmix64)."""
    state = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & _MASK64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = ((state ^ (state >> shift)) * factor) & _MASK64
    state ^= state >> 31
    return float((state >> 11) * 2.0**-53)


def _adjust(logits: Tensor, row: Row) -> None:
    """Applies penalties, bias and the minimum length to one row of logits, in place."""
    params = row.params
    if row.generated:
        ids, counts = torch.unique(torch.tensor(row.generated), return_counts=True)
        seen = logits[ids]
        if params.repetition_penalty != 1.0:
            factor = params.repetition_penalty
            seen = torch.where(seen > 0, seen / factor, seen * factor)
        seen = seen - params.frequency_penalty * counts - params.presence_penalty
        logits[ids] = seen
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    if len(row.generated) < params.min_new_tokens and row.stop_ids:
        logits[torch.tensor(list(row.stop_ids))] = -torch.inf


def _probabilities(logits: Tensor, normaliser: Tensor, at: Tensor) -> Tensor:
    if len(at) == len(logits):
        return torch.exp(logits - normaliser.unsqueeze(1))
    return torch.exp(logits[at] - normaliser[at].unsqueeze(1))


def _draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Inverts the cumulative distribution of each row of `weights` (not negative, need not sum to 1).

    One uniform number a row instead of one a vocabulary entry (as `torch.multinomial` takes): 20 times cheaper
    at 64 rows of 49k.
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1]
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    picked = torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1)
    return picked.clamp_(max=weights.shape[-1] - 1)


def _draw_filtered(probabilities: Tensor, params: Sequence[SamplingParams], uniform: Tensor) -> Tensor:
    """Draws after top-k, top-p and min-p, each judged on the full distribution (SGLang's joint filter)."""
    vocabulary = probabilities.shape[-1]
    ordered, ids = probabilities.topk(min(_HEAD, vocabulary), dim=-1)
    tokens = _draw_ordered(ordered, ids, params, uniform)
    flat = [i for i in _beyond_head(ordered, params) if ordered.shape[-1] < vocabulary]
    if flat:  # only rows whose filters reach behind the head pay for a full sort
        at = torch.tensor(flat)
        ordered, ids = probabilities[at].sort(dim=-1, descending=True)
        tokens[at] = _draw_ordered(ordered, ids, [params[i] for i in flat], uniform[at])
    return tokens


def _draw_ordered(ordered: Tensor, ids: Tensor, params: Sequence[SamplingParams], uniform: Tensor) -> Tensor:
    picked = _draw(_keep(ordered, params), uniform)
    return ids.gather(1, picked.unsqueeze(1)).squeeze(1)


def _beyond_head(ordered: Tensor, params: Sequence[SamplingParams]) -> list[int]:
    """The rows where a token behind the head could survive the filters."""
    width = ordered.shape[-1]
    mass = ordered.sum(dim=-1, dtype=torch.float64).tolist()
    last, first = ordered[:, -1].tolist(), ordered[:, 0].tolist()
    return [
        i
        for i, p in enumerate(params)
        if not (0 < p.top_k <= width or mass[i] > p.top_p or (p.min_p > 0 and last[i] < p.min_p * first[i]))
    ]


def _keep(ordered: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Zeroes what the filters cut, in rows of probabilities sorted downwards. The first entry always stays."""
    width = ordered.shape[-1]
    top_k = torch.tensor([p.top_k if p.top_k > 0 else width for p in params]).unsqueeze(1)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64).unsqueeze(1)
    min_p = torch.tensor([p.min_p for p in params], dtype=ordered.dtype).unsqueeze(1)
    before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
    cut = (torch.arange(width) >= top_k) | (before > top_p) | (ordered < ordered[:, :1] * min_p)
    cut[:, 0] = False
    return ordered.masked_fill(cut, 0.0)
