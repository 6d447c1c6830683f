"""Stop strings, stop ids and end of sequence: what ends a response, and what is left of it."""

from __future__ import annotations

import re
import time

import pytest

from .conftest import Client

EOS = 258
PATTERN = r"[A-Z][a-z]|\d\D"


def ids(item: dict) -> list[int]:
    return item["output_ids"]


async def plain(client: Client, count: int = 60) -> str:
    item = await client.ask("abc", temperature=0, max_new_tokens=count, ignore_eos=True, skip_special_tokens=False)
    assert "\ufffd" not in item["text"]
    return item["text"]


@pytest.mark.parametrize("n", [1, 3])
async def test_a_stop_string_ends_with_the_token_that_completes_it(client: Client, n: int):
    text = await plain(client)
    stop = text[20:23]
    end = text.index(stop) + len(stop)
    answer = await client.ask("abc", temperature=0, max_new_tokens=60, stop=[stop], n=n, return_logprob=True)
    for item in answer if n > 1 else [answer]:
        assert item["text"] == text[: end - len(stop)]
        assert len(ids(item)) == end == item["meta_info"]["output_token_logprobs_length"]
        assert item["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert item["meta_info"]["completion_tokens"] == end


async def test_no_stop_trim_keeps_the_stop_string(client: Client):
    text = await plain(client)
    stop = text[10:13]
    item = await client.ask("abc", temperature=0, max_new_tokens=60, stop=stop, no_stop_trim=True)
    assert item["text"] == text[: text.index(stop) + len(stop)]


async def test_a_stop_pattern(client: Client):
    text = await plain(client)
    item = await client.ask("abc", temperature=0, max_new_tokens=60, stop_regex=PATTERN)
    assert item["meta_info"]["finish_reason"]["type"] == "stop"
    assert item["meta_info"]["finish_reason"]["matched"] == PATTERN
    assert item["text"] == text[: len(ids(item))]
    assert re.search(PATTERN, item["text"])
    assert not re.search(PATTERN, item["text"][:-1])


async def test_a_special_token_may_be_a_stop_string(client: Client):
    item = await client.ask("abc", max_new_tokens=9, ignore_eos=True, logit_bias={"257": 1000}, stop="<|im_start|>")
    assert (ids(item), item["text"]) == ([257], "")
    assert item["meta_info"]["finish_reason"] == {"type": "stop", "matched": "<|im_start|>"}


async def test_a_stream_never_shows_what_a_stop_string_takes_away(client: Client):
    text = await plain(client)
    stop = text[20:24]
    chunks = await client.stream(list(b"abc"), temperature=0, max_new_tokens=60, stop=[stop])
    assert chunks[-1]["text"] == text[: text.index(stop)]
    assert all(chunks[-1]["text"].startswith(c["text"]) for c in chunks)


async def test_a_stop_string_ends_generation_at_once(client: Client):
    start = time.monotonic()
    item = await client.ask("abc", max_new_tokens=3500, logit_bias={"65": 100}, stop=["AAAA"])
    assert ids(item) == [65] * 4
    assert time.monotonic() - start < 2
    await client.until(running=0, within=0.5)


async def test_end_of_sequence_stops_and_stays_in_the_ids_only(client: Client):
    item = await client.ask("abc", max_new_tokens=9, logit_bias={str(EOS): 1000}, return_logprob=True)
    assert ids(item) == [EOS]
    assert item["text"] == ""
    assert item["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    assert item["meta_info"]["output_token_logprobs_length"] == 1


async def test_ignore_eos_goes_on_and_ignores_stop_ids_too(client: Client):
    item = await client.ask(
        "abc", max_new_tokens=9, ignore_eos=True, logit_bias={str(EOS): 1000}, stop_token_ids=[EOS]
    )
    assert ids(item) == [EOS] * 9
    assert item["meta_info"]["finish_reason"] == {"type": "length", "length": 9}


async def test_min_new_tokens_holds_the_end_back(client: Client):
    item = await client.ask("abc", max_new_tokens=20, min_new_tokens=7, logit_bias={str(EOS): 1000})
    assert len(ids(item)) == 8
    assert ids(item)[-1] == EOS
    assert EOS not in ids(item)[:-1]


async def test_a_stop_id_ends_it(client: Client):
    item = await client.ask("abc", max_new_tokens=20, stop_token_ids=[66], logit_bias={"66": 1000})
    assert (ids(item), item["text"]) == ([66], "")
    assert item["meta_info"]["finish_reason"] == {"type": "stop", "matched": 66}
    kept = await client.ask("abc", max_new_tokens=20, stop_token_ids=[66], logit_bias={"66": 1000}, no_stop_trim=True)
    assert kept["text"] == "B"


async def test_special_tokens_are_shown_only_on_request(client: Client):
    want = {"max_new_tokens": 3, "ignore_eos": True, "logit_bias": {"257": 1000}}
    assert (await client.ask("abc", **want))["text"] == ""
    shown = await client.ask("abc", skip_special_tokens=False, **want)
    assert shown["text"] == "<|im_start|>" * 3


async def test_characters_of_several_bytes_are_whole(client: Client):
    """Bytes of one character come as three tokens; no chunk shows half of it, and it may be a stop string."""
    euro = "€".encode()
    bias = {str(b): 1000.0 for b in euro}
    want = {"max_new_tokens": 40, "temperature": 1.0, "logit_bias": bias, "ignore_eos": True}
    for chunk in await client.stream([65], **want):
        if chunk["meta_info"]["finish_reason"] is None:
            assert not chunk["text"].endswith("\ufffd")
    stopped = await client.ask("abc", stop=["€"], **{**want, "max_new_tokens": 3000})
    assert stopped["meta_info"]["finish_reason"]["matched"] == "€"
    assert ids(stopped)[-3:] == list(euro)
    assert "€" not in stopped["text"]
