"""Ids and logprobs, item by item or all at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefill.engine.values import FieldError, values
from onefill.types import Completion, FinishReason, Sample

_IDS = st.lists(st.integers(0, 59), max_size=40)


def triples(ids: list[Any], logprob: float = -0.5) -> list[Any]:
    return [[logprob, token, None] for token in ids]


@given(ids=_IDS, logprobs=st.data())
def test_values_come_out_as_they_went_in(ids: list[int], logprobs: st.DataObject) -> None:
    given = logprobs.draw(st.lists(st.floats(-1e30, 0) | st.integers(-9, 0), min_size=len(ids), max_size=len(ids)))
    tokens, got = values(ids, [[v, i, "x"] for v, i in zip(given, ids, strict=True)], 60)
    assert (tokens.dtype, got.dtype, tokens.tolist()) == (np.int32, np.float32, ids)
    assert got.tolist() == np.array(given, dtype=np.float32).tolist()
    assert not tokens.flags.writeable
    assert not got.flags.writeable


@given(before=_IDS, after=_IDS, wrong=st.sampled_from([True, False, 1.0, 0.0, None, "1", [1], -1, 60, 2**31, 2**70]))
def test_a_wrong_id_is_found_wherever_it_is(before: list[int], after: list[int], wrong: Any) -> None:
    ids = [*before, wrong, *after]
    with pytest.raises(FieldError) as caught:
        values(ids, triples(ids), 60)
    assert caught.value.field == "output_ids"


_WRONG = [
    *([v, 7, None] for v in (True, False, None, "-1", [], {}, 0.1, 10**400, -(10**400), -1e300, 1e300, float("inf"))),
    *([], [-0.5], [-0.5, 7], [-0.5, 7, None, 1], [-0.5, 8, None], [-0.5, None, None]),
    *(None, 7, -0.5, True, "-17", {}, {"a": 1, "b": 7, "c": None}),
]


@given(before=_IDS, after=_IDS, wrong=st.sampled_from(_WRONG))
def test_a_wrong_logprob_is_found_wherever_it_is(before: list[int], after: list[int], wrong: Any) -> None:
    with pytest.raises(FieldError) as caught:
        values([*before, 7, *after], [*triples(before), wrong, *triples(after)], 60)
    assert caught.value.field == "meta_info.output_token_logprobs"


def test_a_logprob_may_be_nothing_and_a_hair_above() -> None:
    assert values([2, 3, 4], [[0.0, 2, None], [0, 3, None], [1e-6, 4, None]], None)[1].max() < 1e-5


@pytest.mark.parametrize("size", [1, 1 << 16, (1 << 16) + 1])
def test_a_response_of_any_length_gets_its_mask(size: int) -> None:
    sample, ids = Sample(index=0), list(range(size))
    tokens, logprobs = values(ids, triples(ids), None)
    sample.append(
        Completion(tokens=tokens, logprobs=logprobs, text="x", finish_reason=FinishReason.STOP, prompt_tokens=1)
    )
    assert (sample.loss_mask.size, int(sample.loss_mask.min()), sample.loss_mask.dtype) == (size, 1, np.uint8)
    assert not sample.loss_mask.flags.writeable
