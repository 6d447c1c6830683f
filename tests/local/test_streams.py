"""`stream: true`: cumulative chunks over SSE."""

from __future__ import annotations

import orjson
import pytest

from .conftest import Client


def counts(chunks: list[dict]) -> list[int]:
    return [c["meta_info"]["completion_tokens"] for c in chunks]


async def test_chunks_are_cumulative_and_end_with_the_finish_reason(client: Client):
    chunks = await client.stream(list(b"abc"), max_new_tokens=20, ignore_eos=True, return_logprob=True)
    assert counts(chunks) == sorted(set(counts(chunks)))
    assert counts(chunks)[-1] == 20
    last = chunks[-1]
    for chunk in chunks:
        k = chunk["meta_info"]["completion_tokens"]
        assert chunk["output_ids"] == last["output_ids"][:k]
        assert chunk["meta_info"]["output_token_logprobs"] == last["meta_info"]["output_token_logprobs"][:k]
        assert chunk["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": k}]
        assert last["text"].startswith(chunk["text"].rstrip("\ufffd"))
    assert [c["meta_info"]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert last["meta_info"]["finish_reason"]["type"] == "length"
    assert "index" not in last


async def test_a_huge_interval_means_the_first_token_and_the_end(client: Client):
    chunks = await client.stream([65, 66], max_new_tokens=50, ignore_eos=True, stream_interval=10**6)
    assert counts(chunks) == [1, 50]


async def test_chunks_come_every_interval(client: Client):
    chunks = await client.stream([65, 66], max_new_tokens=200, ignore_eos=True, stream_interval=60)
    assert counts(chunks) == [1, 61, 121, 181, 200]


async def test_children_are_told_apart_by_index_and_id(client: Client):
    chunks = await client.stream([65, 66], n=3, max_new_tokens=10, ignore_eos=True)
    last = {c["index"]: c for c in chunks}
    assert sorted(last) == [0, 1, 2]
    assert len({c["meta_info"]["id"] for c in last.values()}) == 3
    assert all(c["meta_info"]["id"] == last[c["index"]]["meta_info"]["id"] for c in chunks)
    assert all(c["meta_info"]["finish_reason"] for c in last.values())


async def test_values_are_refused_inside_the_stream_and_schemas_before_it(client: Client):
    async with client.session.post(
        client.url + "/generate", json={"input_ids": [1, 999], "stream": True, "sampling_params": {}}
    ) as response:
        events = (await response.read()).decode().split("\n\n")
        assert response.status == 200
        assert orjson.loads(events[0].removeprefix("data: "))["error"]["code"] == 400
        assert events[1] == "data: [DONE]"
    body = {"input_ids": [1], "stream": True, "sampling_params": {"nope": 1}}
    assert isinstance((await client.post("/generate", body, want=400))["error"], str)


@pytest.mark.parametrize("n", [1, 2])
async def test_the_end_of_a_stream_equals_the_whole_answer(client: Client, n: int):
    want = {"temperature": 0, "max_new_tokens": 25, "n": n, "ignore_eos": True}
    whole = await client.ask([65, 66, 67], **want)
    chunks = await client.stream([65, 66, 67], **want)
    last = {c.get("index", 0): c for c in chunks}
    for i, item in enumerate(whole if n > 1 else [whole]):
        assert (last[i]["text"], last[i]["output_ids"]) == (item["text"], item["output_ids"])
