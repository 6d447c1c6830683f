"""Whatever a server puts into one field: the same samples as without it, or an error. Never wrong ones."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from onefill.engine.codec import decode
from onefill.engine.retry import AttemptError
from onefill.errors import ProtocolError
from onefill.types import Completion, FinishReason, Timing
from tests.engine.scripted import correct
from tests.engine.support import make_request

BODY = {"input_ids": [0] * 5, "rid": "r-1", "sampling_params": {"n": 3, "max_new_tokens": 8}}
GARBAGE = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 80) | st.floats(-3, 3) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value, the value itself included."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, child in inside for path in paths(child, (*at, key)))]


REPLY = correct(BODY)
PLACES = paths(REPLY)
FREE = ("text", "weight_version", "weight_versions", "cached_tokens")  # any fitting value is as good as another


def decoded(reply: Any) -> list[Completion]:
    body = json.dumps(reply).encode()
    return decode(body, make_request(3), engine="e", timing=Timing(0, 1), vocab_size=60)


def facts(completions: list[Completion]) -> list[Any]:
    return [(c.tokens.tolist(), c.logprobs.tolist(), str(c.finish_reason), c.prompt_tokens) for c in completions]


EXPECTED = facts(decoded(REPLY))


def put(reply: Any, path: tuple[Any, ...], value: Any, *, drop: bool) -> Any:
    if not path:
        return value
    target = reply
    for key in path[:-1]:
        target = target[key]
    if drop:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return reply


def check_one(path: tuple[Any, ...], value: Any, *, drop: bool) -> None:
    broken = put(copy.deepcopy(REPLY), path, value, drop=drop)
    try:
        done = decoded(broken)
    except (ProtocolError, AttemptError):
        return
    assert len(done) == 3
    changed_logprob = len(path) == 5 and path[2] == "output_token_logprobs" and path[4] == 0
    for index, (was, now) in enumerate(zip(EXPECTED, facts(done), strict=True)):
        if changed_logprob and path[0] == index:  # a number below 0 in place of another cannot be told apart
            assert isinstance(value, int | float)
            assert all(logprob <= 1e-5 for logprob in now[1])
            assert was[0] == now[0]
        elif was != now:  # the only other legal change: another finish reason
            assert path[:3] == (index, "meta_info", "finish_reason")
            assert now[2] in set(FinishReason)
            assert was[:2] == now[:2]


def test_dropping_any_one_field_never_changes_a_sample() -> None:
    for path in PLACES:
        if path:
            check_one(path, None, drop=True)


@settings(max_examples=1500, deadline=None)
@given(path=st.sampled_from(PLACES), value=GARBAGE)
def test_garbage_in_any_one_field_never_makes_a_wrong_sample(path: tuple[Any, ...], value: Any) -> None:
    check_one(path, value, drop=False)


@settings(max_examples=300, deadline=None)
@given(cut=st.integers(0, len(json.dumps(REPLY)) - 1))
def test_a_reply_cut_anywhere_is_refused(cut: int) -> None:
    try:
        decode(json.dumps(REPLY)[:cut].encode(), make_request(3), engine="e", timing=Timing(0, 1))
    except ProtocolError:
        return
    raise AssertionError(f"a reply cut at byte {cut} was accepted")
