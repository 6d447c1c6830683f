"""Rows are drawn each by its own parameters, and logprobs are SGLang's."""

from __future__ import annotations

import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import log_softmax, softmax

from onefill.local.params import SamplingParams
from onefill.local.sampler import Row, sample, seeded_uniform


def logits(rows: int, vocabulary: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def draw(given_logits: Tensor, params: SamplingParams, times: int = 4000, **row: object) -> Tensor:
    """Tokens drawn from one row of logits with evenly spaced uniform numbers."""
    uniform = (torch.arange(times, dtype=torch.float64) + 0.5) / times
    tokens, _ = sample(given_logits.repeat(times, 1), [Row(params, **row)] * times, uniform)  # type: ignore[arg-type]
    return tokens


def shares(tokens: Tensor, vocabulary: int) -> Tensor:
    return torch.bincount(tokens, minlength=vocabulary).double() / len(tokens)


def test_greedy_is_the_argmax_with_the_raw_logprob():
    x = logits(5, 300)
    tokens, logprobs = sample(x.clone(), [Row(SamplingParams(temperature=0))] * 5, torch.zeros(5).double())
    assert tokens.tolist() == x.argmax(-1).tolist()
    assert torch.allclose(logprobs, log_softmax(x, -1).gather(1, tokens[:, None])[:, 0], atol=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("cut", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2}])
def test_logprob_is_log_softmax_after_temperature_not_renormalised(temperature: float, cut: dict[str, float]):
    x = logits(6, 200)
    rows = [Row(SamplingParams(temperature=temperature, **cut))] * 6  # type: ignore[arg-type]
    tokens, logprobs = sample(x.clone(), rows, torch.rand(6, dtype=torch.float64))
    want = log_softmax(x / temperature, -1).gather(1, tokens[:, None])[:, 0]
    assert torch.allclose(logprobs, want, atol=1e-5)


def test_frequencies_follow_the_softmax():
    x = logits(1, 20)
    got = shares(draw(x, SamplingParams(temperature=1.5)), 20)
    assert torch.allclose(got, softmax(x[0].double() / 1.5, -1), atol=1e-3)


def test_top_k_keeps_the_k_most_likely():
    x = logits(1, 50)
    got = shares(draw(x, SamplingParams(top_k=3)), 50)
    kept = x[0].topk(3).indices
    want = softmax(x[0, kept].double(), -1)
    assert torch.allclose(got[kept], want, atol=1e-3)
    assert got.sum() == pytest.approx(got[kept].sum())


def test_top_p_keeps_the_smallest_set_that_holds_the_mass():
    x = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    assert set(draw(x, SamplingParams(top_p=0.6)).tolist()) == {0, 1}
    assert set(draw(x, SamplingParams(top_p=0.85)).tolist()) == {0, 1, 2}
    assert set(draw(x, SamplingParams(top_p=1e-6)).tolist()) == {0}


def test_min_p_keeps_what_is_not_too_far_below_the_best():
    x = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    assert set(draw(x, SamplingParams(min_p=0.25)).tolist()) == {0, 1, 2}


def test_filters_reach_beyond_the_head_of_a_large_vocabulary():
    flat = torch.zeros(1, 5000)  # half the mass lies in 2,500 tokens, more than the head that is looked at first
    tokens = draw(flat, SamplingParams(top_p=0.5), times=2000)
    assert 1900 < len(set(tokens.tolist())) <= 2502
    assert len(set(draw(flat, SamplingParams(top_k=600), times=3000).tolist())) == 600


def test_each_row_has_its_own_parameters():
    x = logits(1, 100).repeat(4, 1)
    rows = [
        Row(SamplingParams(temperature=0)),
        Row(SamplingParams(temperature=3.0)),
        Row(SamplingParams(top_k=1)),
        Row(SamplingParams(logit_bias={7: 100.0})),
    ]
    tokens, logprobs = sample(x.clone(), rows, torch.full((4,), 0.999, dtype=torch.float64))
    best = int(x[0].argmax())
    assert tokens[[0, 2]].tolist() == [best, best]
    assert tokens[1] != best
    assert tokens[3] == 7
    assert logprobs[3] == pytest.approx(0.0, abs=1e-4)
    assert logprobs[0] == pytest.approx(float(log_softmax(x[0], -1)[best]), abs=1e-5)


def test_a_row_does_not_depend_on_its_neighbours():
    x = logits(8, 700, seed=3)
    kinds = [{}, {"top_p": 0.7}, {"top_k": 4}, {"temperature": 0.0}, {"min_p": 0.1, "temperature": 0.7}]
    rows = [Row(SamplingParams(**kinds[i % 5])) for i in range(8)]  # type: ignore[arg-type]
    uniform = torch.rand(8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    together, _ = sample(x.clone(), rows, uniform)
    alone = [int(sample(x[i : i + 1].clone(), [rows[i]], uniform[i : i + 1])[0]) for i in range(8)]
    assert together.tolist() == alone


def test_penalties_count_generated_tokens_only():
    x = torch.tensor([[2.0, -2.0, 1.0, 0.5]])
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    _, plain = sample(x.clone(), [Row(params)], torch.zeros(1).double())
    assert plain[0] == pytest.approx(float(log_softmax(x[0], -1)[0]), abs=1e-5)
    tokens, logprob = sample(x.clone(), [Row(params, generated=[0, 1, 0])], torch.zeros(1).double())
    changed = torch.tensor([1.0, -4.0, 1.0, 0.5])
    assert tokens[0] == int(changed.argmax())
    assert logprob[0] == pytest.approx(float(log_softmax(changed, -1)[int(tokens[0])]), abs=1e-5)


def test_frequency_penalty_grows_and_presence_penalty_does_not():
    x = torch.zeros(1, 4)
    freq, pres = (
        sample(x.clone(), [Row(p, generated=[1, 1, 2])], torch.full((1,), 0.4).double())[0]
        for p in (
            SamplingParams(frequency_penalty=2.0, logit_bias={0: -100, 3: -100}),
            SamplingParams(presence_penalty=2.0, logit_bias={0: -100, 3: -100}),
        )
    )
    assert int(freq) == 2  # 1 was seen twice, so it weighs e^-2 of 2
    assert int(pres) == 1  # seen is seen: 1 and 2 weigh the same, and 0.4 falls on the first


def test_stops_are_held_back_until_the_minimum_length():
    x = torch.tensor([[0.0, 9.0]])
    params = SamplingParams(temperature=0, min_new_tokens=2)
    early = sample(x.clone(), [Row(params, generated=[0], stop_ids=(1,))], torch.zeros(1).double())[0]
    late = sample(x.clone(), [Row(params, generated=[0, 0], stop_ids=(1,))], torch.zeros(1).double())[0]
    assert (int(early), int(late)) == (0, 1)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.05, 4),
    top_p=st.floats(0.01, 1),
    top_k=st.one_of(st.just(-1), st.integers(1, 40)),
    min_p=st.floats(0, 1),
    uniform=st.one_of(st.floats(0, 1, exclude_max=True), st.just(math.nextafter(1, 0))),
)
def test_never_draws_what_is_cut(
    seed: int, temperature: float, top_p: float, top_k: int, min_p: float, uniform: float
):
    x = logits(1, 40, seed)
    x[0, ::3] = -torch.inf
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    tokens, logprobs = sample(x.clone(), [Row(params)], torch.tensor([uniform], dtype=torch.float64))
    probabilities = softmax(x[0].double() / temperature, -1)
    token = int(tokens[0])
    above = probabilities[probabilities > probabilities[token] * (1 + 1e-6)]
    assert probabilities[token] > 0
    assert above.sum() <= top_p + 1e-5
    assert top_k == -1 or len(above) < top_k
    assert probabilities[token] >= min_p * probabilities.max() * (1 - 1e-5)
    assert math.isfinite(float(logprobs[0]))


def test_seeded_numbers_depend_on_seed_and_position_alone_and_are_uniform():
    drawn = [seeded_uniform(42, i) for i in range(4000)]
    assert drawn == [seeded_uniform(42, i) for i in range(4000)]
    assert drawn[:5] != [seeded_uniform(43, i) for i in range(5)]
    assert all(0 <= u < 1 for u in drawn)
    assert sum(drawn) / len(drawn) == pytest.approx(0.5, abs=0.02)
    assert 0 <= seeded_uniform(-(2**63), 0) < 1


def test_64_rows_of_a_real_vocabulary_are_cheap():
    x = logits(64, 49152)
    rows, uniform = [Row(SamplingParams())] * 64, torch.rand(64, dtype=torch.float64)
    sample(x, rows, uniform)
    best = min(_timed(x, rows, uniform) for _ in range(3))
    assert best < 0.5  # 30 ms on an idle machine; a sort of every row takes a second


def _timed(x: Tensor, rows: list[Row], uniform: Tensor) -> float:
    start = time.perf_counter()
    sample(x, rows, uniform)
    return time.perf_counter() - start
