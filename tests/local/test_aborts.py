"""Ending work early: closed connections, `/abort_request`, and what is kept."""

from __future__ import annotations

import asyncio
from random import Random

import aiohttp
import orjson
import pytest

from .conftest import Client, serving

LONG = {"max_new_tokens": 3500, "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 4])
async def test_a_closed_connection_takes_its_work_off_the_engine(client: Client, n: int, stream: bool):
    body = {"input_ids": [65] * 40, "sampling_params": {**LONG, "n": n}, "stream": stream}
    async with aiohttp.ClientSession() as mine:
        response = asyncio.create_task(_send(mine, client.url, body))
        await client.until(running=n)
        response.cancel()
        with pytest.raises(asyncio.CancelledError):
            await response
    await client.until(running=0, within=2)
    assert len((await client.ask("ok", max_new_tokens=3, ignore_eos=True))["output_ids"]) == 3


async def _send(session: aiohttp.ClientSession, url: str, body: dict) -> bytes:
    async with session.post(url + "/generate", json=body) as response:
        return await response.read()


async def test_a_closed_connection_leaves_other_requests_alone(client: Client):
    keep = asyncio.create_task(client.ask([65] * 40, n=2, max_new_tokens=600, ignore_eos=True))
    async with aiohttp.ClientSession() as mine:
        drop = asyncio.create_task(
            _send(mine, client.url, {"input_ids": [65] * 40, "sampling_params": {**LONG, "n": 3}})
        )
        await client.until(running=5)
        drop.cancel()
    items = await keep
    assert [i["meta_info"]["completion_tokens"] for i in items] == [600, 600]


@pytest.mark.parametrize("n", [1, 4])
async def test_abort_all_returns_at_once_with_what_there_is(client: Client, n: int):
    """Field note 27, from the other side: aborted items have the keys that finished ones have."""
    task = asyncio.create_task(client.ask([65] * 40, n=n, return_logprob=True, **LONG))
    await client.until(running=n)
    await asyncio.sleep(0.1)
    await client.post("/abort_request", {"abort_all": True})
    answer = await asyncio.wait_for(task, 2)
    for item in answer if n > 1 else [answer]:
        meta = item["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert meta["finish_reason"]["message"] == "Aborted"
        assert 0 < len(item["output_ids"]) == meta["completion_tokens"] == len(meta["output_token_logprobs"])
        assert meta["weight_versions"][-1]["end"] == meta["completion_tokens"]
        assert meta["prompt_tokens"] == 40
        assert item["text"] == client.engine.decode(item["output_ids"], skip_special_tokens=True)
    await client.until(running=0)


async def test_abort_by_rid_matches_prefixes_of_known_ids(client: Client):
    """Field note 26: aborting g1 also ends g10."""
    tasks = {r: asyncio.create_task(client.ask([65, 66], rid=r, **LONG)) for r in ("g1", "g10", "h1")}
    await client.until(running=3)
    await client.post("/abort_request", {"rid": "g"})  # not an id anybody has: does nothing
    await client.post("/abort_request", {"rid": ""})
    await asyncio.sleep(0.1)
    assert client.engine.load() == (3, 0)
    await client.post("/abort_request", {"rid": "g1"})
    for rid in ("g1", "g10"):
        item = await asyncio.wait_for(tasks[rid], 2)
        assert item["meta_info"]["finish_reason"]["type"] == "abort"
    assert client.engine.load() == (1, 0)
    tasks["h1"].cancel()


async def test_the_parents_rid_of_a_group_ends_nothing_but_a_childs_id_ends_that_child(client: Client):
    chunks: list[dict] = []
    task = asyncio.create_task(_collect(client, chunks))
    await client.until(running=3)
    await client.post("/abort_request", {"rid": "parent"})
    await asyncio.sleep(0.1)
    assert client.engine.load() == (3, 0)
    await client.post("/abort_request", {"rid": chunks[0]["meta_info"]["id"]})
    await client.until(running=2)
    task.cancel()


async def _collect(client: Client, chunks: list[dict]) -> None:

    body = {"input_ids": [65] * 9, "rid": "parent", "stream": True, "sampling_params": {**LONG, "n": 3}}
    async with client.session.post(client.url + "/generate", json=body) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                chunks.append(orjson.loads(line[6:]))  # noqa: PERF401 (read while it fills)


async def test_a_queued_sample_aborts_with_the_queues_message_and_fewer_keys(session: aiohttp.ClientSession):
    with serving(max_running_requests=1) as served:
        client = Client(session, served)
        first = asyncio.create_task(client.ask([65] * 9, return_logprob=True, **LONG))
        await client.until(running=1)
        second = asyncio.create_task(client.ask([66] * 9, n=2, return_logprob=True, rid="q", **LONG))
        await client.until(running=1, waiting=2)
        await client.post("/abort_request", {"abort_all": True})
        assert (await first)["meta_info"]["finish_reason"]["message"] == "Aborted"
        for item in await second:
            assert item["meta_info"]["finish_reason"]["message"] == "Abort in waiting queue"
            assert not {"prompt_tokens", "cached_tokens"} & item["meta_info"].keys()
            assert item["output_ids"] == []
            assert item["meta_info"]["output_token_logprobs"] == []
            assert item["meta_info"]["completion_tokens"] == 0


async def test_aborting_some_of_a_group_before_it_forks_leaves_the_others(session: aiohttp.ClientSession):
    """The parent may be the one that is aborted: a child then takes its place, with the prefill."""
    with serving(max_batch_tokens=16) as served:
        client = Client(session, served)
        prompt = [40 + i % 50 for i in range(3000)]
        alone = await client.ask(prompt, max_new_tokens=10, temperature=0, ignore_eos=True)
        await client.post("/flush_cache")
        task = asyncio.create_task(client.ask(prompt, n=4, max_new_tokens=10, temperature=0, ignore_eos=True))
        while len(served.engine.live) < 4:
            await asyncio.sleep(0.001)
        doomed = list(served.engine.live.values())
        served.engine.abort([doomed[0], doomed[2]])
        items = await task
        kinds = [i["meta_info"]["finish_reason"]["type"] for i in items]
        assert kinds == ["abort", "length", "abort", "length"]
        assert items[1]["output_ids"] == items[3]["output_ids"] == alone["output_ids"]


async def test_aborts_at_any_moment_never_hang_or_leak(client: Client):
    for delay in [0.0, 0.001, 0.003, 0.005, 0.01, 0.02, 0.05]:
        tasks = [asyncio.create_task(client.ask([65 + i] * (30 + i), n=3, **LONG)) for i in range(4)]
        await asyncio.sleep(delay)
        await client.until_any()
        await client.post("/abort_request", {"abort_all": True})
        done = await asyncio.wait_for(asyncio.gather(*(_retry_abort(client, t) for t in tasks)), 10)
        assert all(len(items) == 3 for items in done)
        await client.until(running=0)
    await client.post("/flush_cache")
    assert (await client.get("/v1/loads"))["loads"][0]["num_used_tokens"] == 0


async def _retry_abort(client: Client, task: asyncio.Task) -> list[dict]:
    while not task.done():
        await asyncio.wait([task], timeout=0.2)
        if not task.done():
            await client.post("/abort_request", {"abort_all": True})
    return task.result()


async def test_counts_of_aborted_samples(client: Client):
    before = await client.metric("onefill_samples_aborted_total")
    task = asyncio.create_task(client.ask("x", n=3, **LONG))
    await client.until(running=3)
    await client.post("/abort_request", {"abort_all": True})
    await task
    assert await client.metric("onefill_samples_aborted_total") == before + 3


async def test_chaos_leaves_an_idle_healthy_engine(session: aiohttp.ClientSession):
    """Requests of all sizes on a cache too small for them, clients that leave, aborts, pauses and updates between."""
    random = Random(4)
    with serving(max_total_tokens=900, max_running_requests=8, max_batch_tokens=64) as served:
        client = Client(session, served)

        async def one() -> bool:
            prompt = [33 + random.randrange(3)] * random.randrange(1, 100)
            n, length = random.choice([1, 2, 5]), random.choice([0, 1, 40, 300])
            try:
                async with asyncio.timeout(random.random() * 2):
                    await client.ask(prompt, n=n, max_new_tokens=length, ignore_eos=True)
                    return True
            except TimeoutError:
                return False

        async def meddle() -> None:
            for body, path in (
                ({"mode": "retract"}, "/pause_generation"),
                ({"abort_all": True}, "/abort_request"),
                ({"model_path": "tiny", "weight_version": "again"}, "/update_weights_from_disk"),
                ({"mode": "in_place"}, "/pause_generation"),
            ):
                await asyncio.sleep(0.2)
                await client.post(path, body)
                await client.post("/continue_generation", {})

        done, _ = await asyncio.gather(asyncio.gather(*(one() for _ in range(50))), meddle())
        assert any(done)
        await client.until(running=0)
        await client.post("/flush_cache")
        assert (await client.get("/v1/loads"))["loads"][0]["num_used_tokens"] == 0
        assert len((await client.ask("x", max_new_tokens=3, ignore_eos=True))["output_ids"]) == 3
