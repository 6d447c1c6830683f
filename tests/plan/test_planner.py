"""A plan covers every unfinished sample exactly once, whatever the group looks like."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefill.errors import ConfigError
from onefill.plan import Capabilities, Context, Form, Plan, Request, Strategy, Support, plan
from onefill.plan.planner import SHARE_FROM_TOKENS
from onefill.types import Completion, FinishReason, Group, Needs, Prompt, SamplingParams, token_array


def ids() -> Callable[[], str]:
    counter = itertools.count()
    return lambda: f"{next(counter):08x}"


def planned(group: Group, strategy: str, context: Context = Context()) -> Plan:
    return plan(group, strategy=Strategy.parse(strategy), context=context, new_id=ids())


def a_group(n: int = 8, prompt_tokens: int = 100, max_new_tokens: int = 16, **kwargs: object) -> Group:
    prompt = Prompt(id="p", tokens=token_array(np.arange(prompt_tokens) + 1))
    return Group.of(prompt, n, SamplingParams(max_new_tokens=max_new_tokens, **kwargs))  # type: ignore[arg-type]


def completion(finish: FinishReason, tokens: int) -> Completion:
    return Completion(
        tokens=token_array(np.arange(tokens) + 500),
        logprobs=np.full(tokens, -0.5, dtype=np.float32),
        text="t" * tokens,
        finish_reason=finish,
        prompt_tokens=100,
    )


def sizes(p: Plan) -> list[list[int]]:
    return [[r.n for r in wave] for wave in p.waves]


def test_native_is_one_request_for_all() -> None:
    p = planned(a_group(), "native")
    assert p.form is Form.NATIVE
    assert sizes(p) == [[8]]
    assert not p.requests[0].stream


def test_auto_prefers_native_where_eligible() -> None:
    assert planned(a_group(), "auto").form is Form.NATIVE


def test_split_makes_requests_of_k_and_the_last_takes_what_is_left() -> None:
    p = planned(a_group(n=10), "split:4")
    assert p.form is Form.SPLIT
    assert sizes(p) == [[4], [4, 2]]
    assert [r.samples for r in p.requests] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]


def test_split_of_at_least_n_is_native_and_of_one_is_fanout() -> None:
    assert planned(a_group(), "split:8").form is Form.NATIVE
    assert planned(a_group(), "split:1").form is Form.FANOUT


def test_note_20_fanout_sends_one_and_holds_the_rest_until_the_prefix_is_cached() -> None:
    p = planned(a_group(), "fanout")
    assert sizes(p) == [[1], [1] * 7]
    assert [r.stream for r in p.requests] == [True] + [False] * 7


def test_no_holding_back_where_there_is_nothing_to_share() -> None:
    without_cache = Context(Capabilities(prefix_cache=False))
    assert sizes(planned(a_group(), "fanout", without_cache)) == [[1] * 8]
    assert sizes(planned(a_group(prompt_tokens=SHARE_FROM_TOKENS - 1), "fanout")) == [[1] * 8]
    group = a_group(n=2)
    group.samples[1].prompt = Prompt(id="other", tokens=token_array(np.arange(100) + 2))
    assert sizes(planned(group, "native")) == [[1, 1]]


def test_a_barred_group_falls_back_to_fanout_and_says_why() -> None:
    p = planned(a_group(), "native", Context(Capabilities(parallel_sampling=Support.NO)))
    assert p.form is Form.FANOUT
    assert [rule.name for rule in p.barred_by] == ["parallel-sampling-broken"]


def test_a_resumed_sample_goes_on_from_its_tokens_with_what_is_left_of_its_budget() -> None:
    group = a_group(n=2, max_new_tokens=16, min_new_tokens=8)
    group.samples[0].append(completion(FinishReason.STOP, 5))
    group.samples[1].append(completion(FinishReason.ABORT, 6))
    (request,) = planned(group, "native").requests
    assert request.samples == (1,)
    assert request.tokens.tolist() == [*range(1, 101), *range(500, 506)]
    assert request.sampling.max_new_tokens == 10
    assert request.sampling.min_new_tokens == 2


def test_a_sample_without_budget_is_refused() -> None:
    group = a_group(n=2, max_new_tokens=6)
    group.samples[1].append(completion(FinishReason.ABORT, 6))
    with pytest.raises(ValueError, match="none left"):
        planned(group, "fanout")


def test_a_finished_group_has_nothing_to_plan() -> None:
    group = a_group(n=1)
    group.samples[0].append(completion(FinishReason.STOP, 3))
    with pytest.raises(ValueError, match="no unfinished"):
        planned(group, "auto")


def test_a_prompt_without_token_ids_is_refused() -> None:
    with pytest.raises(ValueError, match="no token ids"):
        planned(Group.of(Prompt(id="p", text="hello"), 2, SamplingParams()), "native")


def test_needs_and_seeds_reach_the_request() -> None:
    group = a_group(n=2)
    group.needs = Needs(routed_experts=True, lora="adapter")
    group.samples[1].seed = 11
    first, second = planned(group, "native").requests
    assert (first.seed, second.seed) == (None, 11)
    assert first.routed_experts
    assert first.lora == "adapter"


def test_note_06_in_deterministic_mode_every_sample_has_a_seed_of_its_own() -> None:
    def seeds(run: int, group_id: str = "g", **kwargs: object) -> list[int | None]:
        group = a_group(**kwargs)
        group.id = group_id
        context = Context(Capabilities(deterministic=True), seed=run)
        return [r.seed for r in planned(group, "native", context).requests]

    assert len(set(seeds(0))) == 8
    assert seeds(0) == seeds(0)
    assert not set(seeds(0)) & set(seeds(1))
    assert not set(seeds(0)) & set(seeds(0, "h"))
    assert all(s is not None and 0 <= s < 2**31 for s in seeds(0))
    assert seeds(0, temperature=0.0) == [None] * 8


def test_note_06_a_seed_never_covers_more_than_one_sample() -> None:
    tokens = token_array([1])
    with pytest.raises(ValueError, match="copies"):
        Request(id="r", group_id="g", samples=(0, 1), tokens=tokens, sampling=SamplingParams(), seed=1)


@pytest.mark.parametrize("samples", [(), (1, 0), (2, 2)])
def test_a_request_needs_samples_in_order(samples: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        Request(id="r", group_id="g", samples=samples, tokens=token_array([1]), sampling=SamplingParams())


@pytest.mark.parametrize("word", ["", "Native", "split", "split:0", "split:-1", "split:x", "best"])
def test_unknown_strategies_are_refused_with_the_choices(word: str) -> None:
    with pytest.raises(ConfigError, match="split:K"):
        Strategy.parse(word)


@pytest.mark.parametrize("word", ["auto", "native", "fanout", "split:4"])
def test_strategies_read_back(word: str) -> None:
    assert str(Strategy.parse(word)) == word


fates = st.sampled_from(["pending", "stop", "length", "abort", "failed", "holds text", "seed", "own prompt"])


@given(
    fates=st.lists(fates, min_size=1, max_size=12),
    word=st.sampled_from(["auto", "native", "fanout", "split:1", "split:2", "split:5"]),
    prompt_tokens=st.integers(1, 200),
    support=st.sampled_from(list(Support)),
    deterministic=st.booleans(),
    needs=st.builds(Needs, evaluation=st.booleans(), lora=st.sampled_from([None, "a"])),
)
def test_any_plan_covers_every_unfinished_sample_exactly_once(
    fates: list[str], word: str, prompt_tokens: int, support: Support, deterministic: bool, needs: Needs
) -> None:
    group = a_group(n=len(fates), prompt_tokens=prompt_tokens)
    group.needs = needs
    for sample, fate in zip(group.samples, fates, strict=True):
        if fate in ("stop", "length", "abort"):
            sample.append(completion(FinishReason(fate), 4))
        elif fate == "failed":
            sample.fail("lost")
        elif fate == "holds text":
            sample.text = "so far"
        elif fate == "seed":
            sample.seed = 3
        elif fate == "own prompt":
            sample.prompt = Prompt(id="own", tokens=token_array([5, 6]))
    expected = [s.index for s in group.unfinished]
    if not expected:
        return
    context = Context(Capabilities(parallel_sampling=support, deterministic=deterministic))
    p = planned(group, word, context)
    assert sorted(i for r in p.requests for i in r.samples) == expected
    assert len({r.id for r in p.requests}) == len(p.requests)
    assert len(p.waves) <= 2
    assert (p.form is Form.FANOUT) == all(r.n == 1 for r in p.requests)
    if p.barred_by:
        assert p.form is Form.FANOUT
    for request in p.requests:
        if request.n > 1:  # one prefix for all of them
            assert all(group.samples[i].untouched and group.samples[i].seed is None for i in request.samples)
            assert request.tokens is group.prompt.tokens
