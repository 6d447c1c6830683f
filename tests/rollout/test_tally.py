"""The figures of the summary."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefill.plan import Request
from onefill.rollout.tally import Moments, Notes, Tally, saved_tokens
from onefill.types import Completion, FinishReason, Group, SamplingParams, token_array
from tests.rollout.fakes import a_prompt


def completions(cached: list[int], prompt: int = 600) -> list[Completion]:
    empty = np.empty(0, dtype=np.float32)
    return [
        Completion(
            tokens=token_array([]),
            logprobs=empty,
            text="",
            finish_reason=FinishReason.STOP,
            prompt_tokens=prompt,
            cached_tokens=c,
        )
        for c in cached
    ]


def a_request(n: int) -> Request:
    return Request(id="r", group_id="g", samples=tuple(range(n)), tokens=token_array([1]), sampling=SamplingParams())


def test_savings_of_a_native_request_are_what_is_left_after_the_one_prefill() -> None:
    assert saved_tokens(a_request(8), completions([599] * 8)) == 8 * 599 - 600


def test_savings_of_a_single_are_what_was_cached() -> None:
    assert saved_tokens(a_request(1), completions([576])) == 576


@given(cached=st.lists(st.integers(0, 600), min_size=1, max_size=16))
def test_note_12_savings_are_never_negative_nor_above_the_prompts_but_one(cached: list[int]) -> None:
    n = len(cached)
    saved = saved_tokens(a_request(n), completions(cached))
    assert 0 <= saved <= max(1, n - 1) * 600


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_mean_and_deviation_of_a_stream(values: list[float]) -> None:
    moments = Moments()
    for value in values:
        moments.add(value)
    assert moments.mean == pytest.approx(statistics.fmean(values), rel=1e-9, abs=1e-6)
    assert moments.std == pytest.approx(statistics.pstdev(values), rel=1e-6, abs=1e-3)


def filled(responses: list[list[int]], temperature: float = 1.0) -> Group:
    group = Group.of(a_prompt(), len(responses), SamplingParams(temperature=temperature))
    for sample, ids in zip(group.samples, responses, strict=True):
        sample.append(
            Completion(
                tokens=token_array(ids),
                logprobs=np.full(len(ids), -1, dtype=np.float32),
                text="x",
                finish_reason=FinishReason.STOP,
                prompt_tokens=100,
            )
        )
    return group


LONG = list(range(9))


def test_a_duplicate_is_token_identical_to_an_earlier_one_longer_than_8_tokens() -> None:
    tally = Tally()
    tally.delivered(filled([LONG, LONG, LONG, [*LONG, 1], LONG[:8], LONG[:8]]))
    assert tally.duplicate_samples == 2


def test_greedy_copies_are_no_duplicates() -> None:
    tally = Tally()
    tally.delivered(filled([LONG] * 8, temperature=0.0))
    assert tally.duplicate_samples == 0


def test_note_06_and_07_a_run_full_of_copies_warns() -> None:
    tally = Tally()
    for _ in range(2):
        tally.delivered(filled([LONG] * 8))
    warnings = tally.summary(wall_s=1, requests_sent=2, requests_retried=0)["warnings"]
    assert any("14 of 14 samples are copies" in w for w in warnings)


def test_a_few_copies_do_not_warn() -> None:
    tally = Tally()
    for start in range(8):
        tally.delivered(filled([LONG, LONG, *([i + 100 * start, *LONG] for i in range(6))]))
    assert tally.duplicate_samples == 8
    assert tally.summary(wall_s=1, requests_sent=8, requests_retried=0)["warnings"] == []


def test_note_30_a_failed_reward_is_counted_and_no_zero() -> None:
    tally, group = Tally(), filled([LONG, [*LONG, 1]])
    group.samples[0].reward = 1.0
    group.samples[1].reward_error = "timed out"
    tally.delivered(group)
    summary = tally.summary(wall_s=1, requests_sent=1, requests_retried=0)
    assert (summary["reward_mean"], summary["rewards_failed"]) == (1.0, 1)
    assert any("no reward: timed out" in w for w in summary["warnings"])


def test_an_empty_run_has_a_summary() -> None:
    summary = Tally().summary(wall_s=0, requests_sent=0, requests_retried=0)
    assert summary["reward_mean"] is None
    assert summary["tokens_per_s"] == 0
    assert summary["finish_reasons"] == {"stop": 0, "length": 0, "abort": 0}
    assert summary["groups_by_strategy"] == {"native": 0, "split": 0, "fanout": 0}


def test_messages_are_kept_once_counted_and_capped() -> None:
    notes = Notes(most=2)
    for message in ("a", "a", "b", "c", "c"):
        notes.add(message)
    assert notes.lines() == ["a (2 times)", "b", "... and 2 more"]


def test_messages_that_differ_in_detail_are_one_by_their_key() -> None:
    notes = Notes()
    for request in ("r1", "r2", "r3"):
        notes.add(f"broken reply, first: {request}", key="broken")
    assert notes.lines() == ["broken reply, first: r1 (3 times)"]


@pytest.mark.parametrize(("size", "groups"), [(8, 1), (2, 4)])
def test_note_06_small_runs_of_copies_warn_too(size: int, groups: int) -> None:
    tally = Tally()
    for _ in range(groups):
        tally.delivered(filled([LONG] * size))
    assert any("copies" in w for w in tally.summary(wall_s=1, requests_sent=1, requests_retried=0)["warnings"])
