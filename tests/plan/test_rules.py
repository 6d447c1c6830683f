"""Every rule alone, every pair, and that nothing else bars a group."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from onefill.plan import RULES, Capabilities, Context, Support, barring
from onefill.types import Completion, FinishReason, Group, Media, Modality, Needs, Prompt, SamplingParams, token_array

Case = tuple[Group, Context]
Breaker = Callable[[Group, Context], Case]


def a_group(n: int = 4) -> Group:
    return Group.of(Prompt(id="p", tokens=token_array(range(1, 9))), n, SamplingParams(max_new_tokens=16))


def a_completion(finish: FinishReason = FinishReason.STOP, tokens: int = 3) -> Completion:
    return Completion(
        tokens=token_array(range(tokens)),
        logprobs=np.full(tokens, -1.0, dtype=np.float32),
        text="x" * tokens,
        finish_reason=finish,
        prompt_tokens=8,
    )


def needing(**needs: object) -> Breaker:
    def broken(group: Group, context: Context) -> Case:
        group.needs = replace(group.needs, **needs)  # type: ignore[arg-type]
        return group, context

    return broken


def on_an_engine(**capabilities: object) -> Breaker:
    def broken(group: Group, context: Context) -> Case:
        return group, replace(context, capabilities=replace(context.capabilities, **capabilities))  # type: ignore[arg-type]

    return broken


def only_one_sample(group: Group, context: Context) -> Case:
    return replace(group, samples=group.samples[:1]), context


def group_reward_required(group: Group, context: Context) -> Case:
    return group, replace(context, group_reward_required=True)


def one_was_aborted(group: Group, context: Context) -> Case:
    group.samples[0].append(a_completion(FinishReason.ABORT))
    return group, context


def one_holds_text(group: Group, context: Context) -> Case:
    group.samples[0].text = "so far"
    return group, context


def one_holds_a_loss_mask(group: Group, context: Context) -> Case:
    group.samples[0].loss_mask = np.ones(2, dtype=np.uint8)
    return group, context


def one_holds_tokens(group: Group, context: Context) -> Case:
    group.samples[0].tokens = token_array([1, 2])
    return group, context


def one_has_failed(group: Group, context: Context) -> Case:
    group.samples[-1].fail("lost")
    return group, context


def one_has_its_own_prompt(group: Group, context: Context) -> Case:
    group.samples[1].prompt = Prompt(id="q", tokens=token_array([7, 7]))
    return group, context


def one_has_its_own_image(group: Group, context: Context) -> Case:
    prompt = group.prompt
    group.samples[1].prompt = replace(prompt, media=(*prompt.media, Media(Modality.IMAGE, "other.png")))
    return group, context


def one_has_a_seed(group: Group, context: Context) -> Case:
    group.samples[2].seed = 7
    return group, context


def with_media(*media: Media) -> Breaker:
    def broken(group: Group, context: Context) -> Case:
        group.prompt = replace(group.prompt, media=media)
        return group, context

    return broken


ALONE: list[tuple[str, Breaker]] = [
    ("evaluation", needing(evaluation=True)),
    ("single-sample", only_one_sample),
    ("no-group-reward", group_reward_required),
    ("sample-holds-output", one_holds_text),
    ("sample-holds-output", one_holds_a_loss_mask),
    ("sample-holds-output", one_holds_tokens),
    ("mixed-status", one_has_failed),
    ("mixed-prompts", one_has_its_own_prompt),
    ("mixed-prompts", one_has_its_own_image),
    ("sample-seed", one_has_a_seed),
    ("deterministic-mode", on_an_engine(deterministic=True)),
    ("distillation", needing(distillation=True)),
    ("routed-experts", needing(routed_experts=True)),
    ("lora", needing(lora="adapter")),
    ("speculative-decoding", on_an_engine(speculative_decoding=True)),
    ("custom-generate", needing(custom_generate=True)),
    ("media-unproven", with_media(Media(Modality.IMAGE, "a.png"))),
    ("parallel-sampling-broken", on_an_engine(parallel_sampling=Support.NO)),
]


def names(case: Case) -> set[str]:
    return {rule.name for rule in barring(*case)}


def test_plain_text_is_eligible_where_nothing_is_known_of_the_engine() -> None:
    assert names((a_group(), Context())) == set()


@pytest.mark.parametrize(("rule", "breaker"), ALONE)
def test_each_rule_alone(rule: str, breaker: Breaker) -> None:
    assert names(breaker(a_group(), Context())) == {rule}


def test_an_aborted_sample_is_partial_holds_output_and_does_not_match_its_siblings() -> None:
    assert names(one_was_aborted(a_group(), Context())) == {"partial-sample", "sample-holds-output", "mixed-status"}


def test_a_whole_group_aborted_before_any_output_is_still_barred_until_it_is_pristine_again() -> None:
    group = a_group()
    for sample in group.samples:
        sample.append(a_completion(FinishReason.ABORT, tokens=0))
    assert names((group, Context())) == {"partial-sample"}


@pytest.mark.parametrize(("one", "two"), list(itertools.combinations(ALONE, 2)))
def test_pairs_of_rules_are_both_named(one: tuple[str, Breaker], two: tuple[str, Breaker]) -> None:
    if "single-sample" in (one[0], two[0]):  # cut the group last, or the other has no sample to break
        one, two = sorted((one, two), key=lambda pair: pair[0] == "single-sample")
    named = names(two[1](*one[1](a_group(), Context())))
    expected = {one[0], two[0]}
    if "single-sample" in expected:  # breaking samples 1.. no longer shows when only sample 0 is left
        assert "single-sample" in named
        assert named <= expected
    else:
        assert expected <= named
        assert named <= expected | {"mixed-status"}


def test_every_rule_has_a_test() -> None:
    tested = {rule for rule, _ in ALONE} | {"partial-sample"}
    assert tested == {rule.name for rule in RULES}


def test_rule_names_are_unique_and_reasons_are_sentences() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert len(rule.reason.split()) >= 6, rule.name


SEEN_TO_WORK: list[tuple[Breaker, dict[str, object]]] = [
    (needing(routed_experts=True), {"routed_experts": Support.YES}),
    (needing(lora="adapter"), {"lora": Support.YES}),
    (on_an_engine(speculative_decoding=True), {"speculative": Support.YES}),
    (with_media(Media(Modality.IMAGE, "a.png")), {"image": Support.YES}),
    (with_media(Media(Modality.IMAGE, "a.png"), Media(Modality.IMAGE, "b.png")), {"images": Support.YES}),
    (with_media(Media(Modality.VIDEO, "a.mp4")), {"video": Support.YES}),
    (with_media(Media(Modality.AUDIO, "a.wav")), {"audio": Support.YES}),
]


@pytest.mark.parametrize(("breaker", "seen"), SEEN_TO_WORK)
def test_what_was_seen_to_work_is_no_bar_and_unknown_or_no_is(breaker: Breaker, seen: dict[str, object]) -> None:
    group, context = breaker(a_group(), Context())
    assert names((group, context)) != set()
    proven = replace(context, capabilities=replace(context.capabilities, **seen))  # type: ignore[arg-type]
    assert names((group, proven)) == set()
    refused = replace(context, capabilities=replace(context.capabilities, **dict.fromkeys(seen, Support.NO)))  # type: ignore[arg-type]
    assert names((group, refused)) != set()


def test_one_image_proven_says_nothing_of_two() -> None:
    group, _ = with_media(Media(Modality.IMAGE, "a.png"), Media(Modality.IMAGE, "b.png"))(a_group(), Context())
    assert names((group, Context(Capabilities(image=Support.YES)))) == {"media-unproven"}


def test_a_group_reward_lifts_the_trainers_wish() -> None:
    assert names((a_group(), Context(group_reward=True, group_reward_required=True))) == set()


def test_an_equal_prompt_in_another_object_is_no_bar() -> None:
    group = a_group()
    group.samples[1].prompt = Prompt(id="same words", tokens=token_array(range(1, 9)))
    assert names((group, Context())) == set()


def test_needs_are_empty_by_default() -> None:
    assert Needs() == Needs(evaluation=False, lora=None)
