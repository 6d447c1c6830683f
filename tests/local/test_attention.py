"""Each sequence attends to its own past only, whatever else is in the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softmax

from onefill.local.attention import paged_attention


def plainly(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """Causal attention written out; q [heads, new, size], k and v [kv heads, total, size]."""
    share = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(share, 0), v.repeat_interleave(share, 0)
    scores = q @ k.transpose(1, 2) * scaling
    new, total = q.shape[1], k.shape[1]
    later = torch.ones(new, total, dtype=torch.bool).triu(total - new + 1)
    return softmax(scores.masked_fill(later, -torch.inf), -1) @ v


@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 9)],
        [(7, 7)],
        [(3, 10)],
        [(1, 8), (1, 8), (1, 8)],
        [(1, 8), (1, 9), (5, 5), (5, 5), (4, 20), (1, 1), (1, 8)],
        [(2, 6), (2, 6)],
    ],
)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_equals_attention_of_each_alone(lengths: list[tuple[int, int]], kv_heads: int):
    torch.manual_seed(0)
    news, totals = (torch.tensor([0, *(pair[i] for pair in lengths)]).cumsum(0) for i in (0, 1))
    q = torch.randn(1, int(news[-1]), 4, 16).transpose(1, 2)
    k, v = (torch.randn(int(totals[-1]), kv_heads, 16).transpose(0, 1)[None] for _ in range(2))
    out, weights = paged_attention(
        nn.Module(), q, k, v, None, scaling=0.3, cu_seq_lens_q=news.int(), cu_seq_lens_k=totals.int()
    )
    assert weights is None
    assert out.shape == (1, int(news[-1]), 4, 16)
    for i in range(len(lengths)):
        a, b, c, d = news[i], news[i + 1], totals[i], totals[i + 1]
        want = plainly(q[0, :, a:b], k[0, :, c:d], v[0, :, c:d], 0.3)
        assert torch.allclose(out[0, a:b].transpose(0, 1), want, atol=1e-5)


def test_without_lengths_it_is_one_causal_sequence():
    q, k, v = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 6, 16), torch.randn(1, 2, 6, 16)
    out, _ = paged_attention(nn.Module(), q, k, v, None, scaling=0.25)
    assert torch.allclose(out[0].transpose(0, 1), plainly(q[0], k[0], v[0], 0.25), atol=1e-5)
