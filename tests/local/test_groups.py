"""Groups: one prefill, n forks, and the same tokens in whatever form they are asked for."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from .conftest import Client, serving

PAGE = 32
PROMPT = [33 + i * 7 % 90 for i in range(100)]


def ids(item: dict) -> list[int]:
    return item["output_ids"]


@pytest.mark.parametrize("length", [1, 2, PAGE - 1, PAGE, PAGE + 1, PAGE + 2, 3 * PAGE + 1, 511, 512, 513, 514, 1025])
async def test_any_prompt_length_forks_cold_and_warm(client: Client, length: int):
    """Lengths where a step of zero tokens would be scheduled: one token, and all cached but one."""
    prompt = [40 + (i * i + length) % 80 for i in range(length)]
    await client.post("/flush_cache")
    want = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    alone = ids(await client.ask(prompt, **want))
    await client.post("/flush_cache")
    for _ in range(3):  # cold, then with the prompt's pages cached, twice
        items = await client.ask(prompt, n=5, **want)
        assert [ids(i) for i in items] == [alone] * 5
        assert [i["meta_info"]["cached_tokens"] for i in items] == [length - 1] * 5


async def test_greedy_is_the_same_natively_split_and_in_singles(client: Client):
    want = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}
    await client.post("/flush_cache")
    native = [ids(i) for i in await client.ask(PROMPT, n=8, **want)]
    warm = [ids(i) for i in await asyncio.gather(*(client.ask(PROMPT, **want) for _ in range(8)))]
    await client.post("/flush_cache")
    cold = [ids(i) for i in await asyncio.gather(*(client.ask(PROMPT, **want) for _ in range(8)))]
    halves = await asyncio.gather(*(client.ask(PROMPT, n=4, **want) for _ in range(2)))
    assert native == warm == cold == [ids(i) for half in halves for i in half]


async def test_a_group_is_prefilled_once(client: Client):
    await client.post("/flush_cache")
    before = await client.metric("onefill_prefill_tokens_total")
    asked = await client.metric("onefill_prompt_tokens_total")
    await client.ask(PROMPT, n=8, max_new_tokens=2, ignore_eos=True)
    # each sample runs the last prompt token itself, to draw its first token
    assert await client.metric("onefill_prefill_tokens_total") - before == len(PROMPT) - 1 + 8
    assert await client.metric("onefill_prompt_tokens_total") - asked == 8 * len(PROMPT)


async def test_cached_tokens_of_a_single_are_whole_pages_of_what_was_there(client: Client):
    await client.post("/flush_cache")
    cold = await client.ask(PROMPT, max_new_tokens=2)
    warm = await client.ask(PROMPT, max_new_tokens=2)
    branch = await client.ask([*PROMPT[:70], 1, 2, 3], max_new_tokens=2)
    assert cold["meta_info"]["cached_tokens"] == 0
    assert warm["meta_info"]["cached_tokens"] == 3 * PAGE
    assert branch["meta_info"]["cached_tokens"] == 2 * PAGE


async def test_without_radix_cache_nothing_is_shared_between_requests(session: aiohttp.ClientSession):
    with serving(disable_radix_cache=True) as served:
        client = Client(session, served)
        first = await client.ask(PROMPT, max_new_tokens=8, temperature=0)
        again = await client.ask(PROMPT, max_new_tokens=8, temperature=0)
        assert again["meta_info"]["cached_tokens"] == 0
        assert ids(first) == ids(again)
        items = await client.ask(PROMPT, n=3, max_new_tokens=8, temperature=0)
        assert [ids(i) for i in items] == [ids(first)] * 3


async def test_samples_of_a_group_end_each_in_its_own_time(client: Client):
    items = await client.ask(PROMPT, n=12, max_new_tokens=400, logit_bias={"258": 4.0})
    lengths = {i["meta_info"]["completion_tokens"] for i in items}
    assert len(lengths) > 1
    for item in items:
        if item["meta_info"]["finish_reason"]["type"] == "stop":
            assert item["meta_info"]["finish_reason"]["matched"] == 258
            assert ids(item)[-1] == 258
            assert 258 not in ids(item)[:-1]


async def test_many_groups_at_once(client: Client):
    prompts = [[35 + (i * j) % 80 for j in range(1, 50 + i)] for i in range(12)]
    want = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    alone = [ids(await client.ask(p, **want)) for p in prompts]
    groups = await asyncio.gather(*(client.ask(p, n=8, **want) for p in prompts))
    for expected, items in zip(alone, groups, strict=True):
        assert [ids(i) for i in items] == [expected] * 8


@pytest.mark.parametrize("total", [224, 320])
async def test_a_cache_too_small_for_all_gives_the_same_answers(session: aiohttp.ClientSession, total: int):
    """Forks that do not fit are queued, running samples are sent back and start again: nothing is lost."""
    want = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True, "return_logprob": True}
    with serving() as served:
        alone = ids(await Client(session, served).ask(PROMPT, **want))
    with serving(max_total_tokens=total) as served:
        client = Client(session, served)
        groups = await asyncio.gather(*(client.ask(PROMPT, n=6, **want) for _ in range(3)))
        retractions = 0
        for item in (i for items in groups for i in items):
            assert ids(item) == alone
            assert item["meta_info"]["output_token_logprobs_length"] == 60
            assert item["meta_info"]["cached_tokens"] == len(PROMPT) - 1
            retractions += item["meta_info"]["num_retractions"]
        assert retractions > 0
        await client.until(running=0)
        await client.post("/flush_cache")
        assert (await client.get("/v1/loads"))["loads"][0]["num_used_tokens"] == 0


async def test_the_queue_moves_on_when_what_filled_the_cache_is_aborted(session: aiohttp.ClientSession):
    with serving(max_total_tokens=320) as served:
        client = Client(session, served)
        greedy = [asyncio.create_task(client.ask(PROMPT, n=6, max_new_tokens=180, ignore_eos=True)) for _ in range(2)]
        await asyncio.sleep(0.15)
        await client.post("/abort_request", {"abort_all": True})
        later = await client.ask(PROMPT, max_new_tokens=100, ignore_eos=True)
        assert len(ids(later)) == 100
        for items in await asyncio.gather(*greedy):
            assert len(items) == 6


async def test_more_samples_than_may_run_wait_for_their_turn(session: aiohttp.ClientSession):
    with serving(max_running_requests=4) as served:
        client = Client(session, served)
        items = await client.ask(PROMPT, n=10, max_new_tokens=30, ignore_eos=True, temperature=0)
        assert len({tuple(ids(i)) for i in items}) == 1


async def test_a_prompt_larger_than_the_cache_is_refused(session: aiohttp.ClientSession):
    with serving(max_total_tokens=64) as served:
        client = Client(session, served)
        answer = await client.ask([65] * 64, want=400, max_new_tokens=1)
        assert "KV memory" in answer["error"]["message"]
        clipped = await client.ask([65] * 40, max_new_tokens=1000, ignore_eos=True)
        assert clipped["meta_info"]["finish_reason"] == {"type": "length", "length": 22}
