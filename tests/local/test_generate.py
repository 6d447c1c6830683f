"""Answers of `/generate`, over real HTTP."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
import torch
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from .conftest import Client, serving

LONG = {"max_new_tokens": 3000, "ignore_eos": True}


def ids(item: dict) -> list[int]:
    return item["output_ids"]


async def greedy(client: Client, prompt: list[int], count: int = 24) -> list[int]:
    return ids(await client.ask(prompt, temperature=0, max_new_tokens=count, ignore_eos=True))


async def test_one_sample_is_an_object_with_all_that_a_trainer_needs(client: Client):
    item = await client.ask("hello", max_new_tokens=6, ignore_eos=True, return_logprob=True, rid="mine")
    meta = item["meta_info"]
    assert len(item["output_ids"]) == 6 == meta["completion_tokens"] == meta["output_token_logprobs_length"]
    assert [t for _, t, _ in meta["output_token_logprobs"]] == item["output_ids"]
    assert all(lp <= 0 and text is None for lp, _, text in meta["output_token_logprobs"])
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["cached_tokens"]) == (5, 0)
    assert meta["weight_version"] == "default"
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 6}]
    assert (meta["num_retractions"], meta["dp_rank"]) == (0, None)
    assert 0 <= meta["queue_time"] <= meta["e2e_latency"]
    assert item["text"] == client.engine.decode(item["output_ids"], skip_special_tokens=True)


async def test_no_logprobs_unless_asked(client: Client):
    item = await client.ask("hello", max_new_tokens=2)
    assert "output_token_logprobs" not in item["meta_info"]


async def test_n_samples_are_a_list_with_fresh_ids(client: Client):
    items = await client.ask("hello", n=4, max_new_tokens=12, ignore_eos=True, rid="parent")
    assert len(items) == 4
    rids = {i["meta_info"]["id"] for i in items}
    assert len(rids) == 4
    assert "parent" not in rids
    assert len({tuple(ids(i)) for i in items}) == 4
    assert len({ids(i)[0] for i in items}) > 1  # the first tokens are drawn independently


async def test_batches_times_n_come_in_order(client: Client):
    prompts = [[40 + i] * (5 + i) for i in range(3)]
    items = await client.ask(prompts, n=2, temperature=0, max_new_tokens=10, ignore_eos=True)
    assert [i["meta_info"]["prompt_tokens"] for i in items] == [5, 5, 6, 6, 7, 7]
    for k, prompt in enumerate(prompts):
        alone = await greedy(client, prompt, 10)
        assert ids(items[2 * k]) == ids(items[2 * k + 1]) == alone


async def test_rows_of_a_batch_keep_their_own_sampling_parameters(client: Client):
    """Field note 8: a batch took its parameters from its first row."""
    prompts = [[50, 51, 52]] * 3
    params = [{"temperature": 0, "max_new_tokens": 8}, {"temperature": 2.0, "max_new_tokens": 9}, {"top_k": 1}]
    body = {"input_ids": prompts, "sampling_params": [{"ignore_eos": True, "max_new_tokens": 8, **p} for p in params]}
    a, b, c = await client.post("/generate", body)
    assert ids(a) == ids(c)
    assert len(ids(b)) == 9
    assert ids(b)[:8] != ids(a)


async def test_text_and_ids_mean_the_same(client: Client):
    text = await client.ask("héllo", temperature=0, max_new_tokens=8)
    as_ids = await client.ask(list("héllo".encode()), temperature=0, max_new_tokens=8)
    assert ids(text) == ids(as_ids)


@pytest.mark.parametrize("n", [1, 3])
async def test_no_new_tokens_is_a_prefill_only(client: Client, n: int):
    answer = await client.ask("hello", max_new_tokens=0, n=n, return_logprob=True)
    for item in answer if n > 1 else [answer]:
        assert item["output_ids"] == []
        assert item["text"] == ""
        assert item["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
        assert item["meta_info"]["output_token_logprobs"] == []


async def test_lengths_against_the_context(client: Client):
    context = client.engine.context_length
    too_long = await client.ask([65] * context, want=400)
    assert "longer than the model's context length" in too_long["error"]["message"]
    too_much = await client.ask([65] * 100, want=400, max_new_tokens=context)
    assert "exceeds the model's maximum context length" in too_much["error"]["message"]


async def test_what_the_context_cannot_hold_is_clipped_where_no_length_was_asked(client: Client):
    context = client.engine.context_length
    item = await client.ask([65] * (context - 20), max_new_tokens=None, ignore_eos=True)
    assert item["meta_info"]["finish_reason"] == {"type": "length", "length": 18}


@pytest.mark.parametrize("bad", [[5, 260], [5, 2**31], [-1, 5], [2**62]])
async def test_ids_outside_the_vocabulary_are_refused_and_harm_nobody(client: Client, bad: list[int]):
    running = asyncio.create_task(client.ask("hello", max_new_tokens=200, ignore_eos=True))
    answer = await client.ask(bad, want=400)
    assert "outside the vocabulary" in answer["error"]["message"]
    assert len(ids(await running)) == 200


@pytest.mark.parametrize("field", [{"stop_token_ids": [999]}, {"logit_bias": {"999": 1.0}}])
async def test_parameter_ids_outside_the_vocabulary_are_refused(client: Client, field: dict):
    assert "outside the vocabulary" in (await client.ask("hi", want=400, **field))["error"]["message"]


async def test_a_bad_prompt_in_a_batch_leaves_nothing_behind(client: Client):
    await client.ask([[1, 2], [3, 999]], want=400, **LONG)
    await client.ask([[1, 2], []], want=400, **LONG)
    await client.until(running=0)


async def test_refusals_have_sglangs_shapes(client: Client):
    assert isinstance((await client.ask("a", want=400, max_tokens=5))["error"], str)
    assert (await client.post("/generate", [1], want=400))["object"] == "error"
    assert (await client.post("/generate", {"input_ids": "x"}, want=400))["code"] == 400
    async with client.session.post(client.url + "/generate", data=b"{nope") as response:
        assert response.status == 400
    async with client.session.get(client.url + "/generate") as response:
        assert response.status == 405


async def test_a_request_id_in_use_is_refused(client: Client):
    first = asyncio.create_task(client.ask("a", rid="same", **LONG))
    await client.until(running=1)
    assert "Duplicate" in (await client.ask("b", want=400, rid="same"))["error"]["message"]
    first.cancel()


def forward(prompt: list[int], answer: list[int], path: str, temperature: float) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0].double() / (temperature or 1.0)
    scores = log_softmax(logits, -1)
    return [float(scores[len(prompt) - 1 + i, token]) for i, token in enumerate(answer)]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.5, "top_p": 0.5},
        {"temperature": 2.0, "top_k": 5},
        {"temperature": 0.0},
        {"temperature": 0.8, "min_p": 0.2},
    ],
)
async def test_logprobs_agree_with_a_teacher_forced_forward(client: Client, params: dict):
    prompt = list(b"The quick brown fox jumps over the lazy dog; a prompt of more than one page of the cache.")
    items = await client.ask(prompt, n=3, max_new_tokens=40, ignore_eos=True, return_logprob=True, **params)
    for item in items:
        got = [lp for lp, _, _ in item["meta_info"]["output_token_logprobs"]]
        want = forward(prompt, ids(item), client.engine.model_path, params["temperature"])
        assert got == pytest.approx(want, abs=1e-3)


@pytest.mark.parametrize("start", [0, 3, 8])
async def test_prompt_logprobs(client: Client, start: int):
    prompt = list(b"score me please")
    item = await client.ask(prompt, max_new_tokens=1, return_logprob=True, logprob_start_len=start)
    triples = item["meta_info"]["input_token_logprobs"]
    assert [t for _, t, _ in triples] == prompt[start:]
    assert triples[0][0] is None
    want = forward(prompt[: start + 1], prompt[start + 1 :], client.engine.model_path, 1.0)
    assert [lp for lp, _, _ in triples[1:]] == pytest.approx(want, abs=1e-3)


async def test_logprobs_may_carry_their_text(client: Client):
    item = await client.ask(
        "hello", max_new_tokens=3, return_logprob=True, return_text_in_logprobs=True, temperature=0
    )
    assert all(text == chr(token) for _, token, text in item["meta_info"]["output_token_logprobs"] if token < 127)


async def test_penalties_and_bias_reach_the_sampler(client: Client):
    biased = await client.ask("hello", max_new_tokens=5, logit_bias={"65": 100})
    assert ids(biased) == [65] * 5
    pushed = await client.ask(
        "hello", max_new_tokens=5, temperature=0, logit_bias={"65": 1000.0, "66": 1000.0}, presence_penalty=2.0
    )
    assert set(ids(pushed)[:2]) <= {65, 66}
    plain = await client.ask("hello", max_new_tokens=1, temperature=0, logit_bias={"65": 1000.0, "66": 1000.0})
    assert ids(pushed)[0] == ids(plain)[0]


async def test_sampling_seed_is_ignored_outside_deterministic_mode(client: Client):
    items = await client.ask("hello", n=4, max_new_tokens=12, sampling_seed=1, ignore_eos=True)
    assert len({tuple(ids(i)) for i in items}) == 4


async def test_deterministic_mode_makes_copies_as_sglang_does(session: aiohttp.ClientSession):
    """Field note 6: all samples of a group equal, and training does nothing. The client must see it coming."""
    with serving(deterministic=True) as served:
        client = Client(session, served)
        assert (await client.get("/server_info"))["enable_deterministic_inference"] is True
        default = await client.ask("hello", n=4, max_new_tokens=12, ignore_eos=True)
        assert len({tuple(ids(i)) for i in default}) == 1
        assert ids(default[0]) == ids(await client.ask("hello", max_new_tokens=12, ignore_eos=True, sampling_seed=42))
        assert ids(default[0]) != ids(await client.ask("hello", max_new_tokens=12, ignore_eos=True, sampling_seed=43))


async def test_the_seed_flag_makes_a_server_repeatable(session: aiohttp.ClientSession):
    answers = []
    for _ in range(2):
        with serving(seed=5) as served:
            answers.append(ids(await Client(session, served).ask("hello", max_new_tokens=12, ignore_eos=True)))
    assert answers[0] == answers[1]
