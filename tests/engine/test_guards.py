"""Nothing is sent that can hurt a server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onefill.engine import Limits, Placeholders, check
from onefill.errors import DataError, ProtocolError
from onefill.types import token_array
from tests.engine.scripted import ScriptedEngine, edited, reply
from tests.engine.support import client_of, make_request


@pytest.mark.parametrize(
    ("fields", "limits", "field"),
    [
        ({"tokens": token_array([1, 9, 3])}, Limits(vocab_size=9), r"input_ids\[1\] is 9"),
        ({"tokens": np.array([1, -1], dtype=np.int32)}, Limits(), r"input_ids\[1\] is -1"),
        ({"tokens": np.array([1, 2**40])}, Limits(), r"input_ids\[1\] is 1099511627776"),
        ({"tokens": token_array([])}, Limits(), "input_ids is empty"),
        ({"tokens": np.array([1.0])}, Limits(), "input_ids holds float64"),
        ({"length": 20}, Limits(context_length=20), "input_ids has 20 tokens"),
        ({"length": 15}, Limits(context_length=20), "max_new_tokens is 8.*room for 5"),
    ],
)
async def test_a_harmful_request_is_never_sent(fields: dict[str, Any], limits: Limits, field: str) -> None:
    async with ScriptedEngine([reply()]) as engine, client_of(engine.url, limits=limits) as (client, _):
        with pytest.raises(DataError, match=f"group g, request r-1: {field}"):
            await client.generate(make_request(**fields))
        assert engine.requests == []
        assert client.stats.requests_sent == 0


def test_what_just_fits_is_sent() -> None:
    check(make_request(length=12), Limits(vocab_size=12, context_length=20))
    check(make_request(length=12), Limits())


async def test_a_vocabulary_that_may_be_too_small_bounds_what_is_sent_only() -> None:
    guess = Limits(vocab_size=9, exact=False)
    with pytest.raises(DataError, match="vocabulary of 9 ids"):
        check(make_request(length=10), guess)
    async with ScriptedEngine([reply()]) as engine, client_of(engine.url, limits=guess) as (client, _):
        done = await client.generate(make_request(2))
    assert done[1].tokens.tolist() == [10, 11, 12, 13]


@pytest.mark.parametrize("wrong", [-1, 2**31])
async def test_an_id_that_no_vocabulary_holds_is_always_refused(wrong: int) -> None:
    def change(answer: Any) -> None:
        answer["output_ids"][0] = answer["meta_info"]["output_token_logprobs"][0][1] = wrong

    guess = Limits(vocab_size=9, exact=False)
    async with ScriptedEngine([edited(change)]) as engine, client_of(engine.url, limits=guess) as (client, _):
        with pytest.raises(ProtocolError, match="output_ids"):
            await client.generate(make_request())


@pytest.mark.parametrize(("ids", "pad"), [({1, 2}, 2), ({1}, -1), ({-1}, 0)])
def test_placeholders_that_make_no_sense_are_refused(ids: set[int], pad: int) -> None:
    with pytest.raises(ValueError, match="pad"):
        Placeholders(ids=frozenset(ids), pad_id=pad)


def test_tokens_without_placeholders_stay_the_same_array() -> None:
    tokens = token_array([1, 2, 3])
    assert Placeholders(ids=frozenset({9}), pad_id=0).replace(tokens) == (tokens, 0)
    assert Placeholders(ids=frozenset(), pad_id=0).replace(tokens)[0] is tokens
