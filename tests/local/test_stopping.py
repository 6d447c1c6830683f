"""Text grows by whole characters, and stop strings are found wherever token borders lie."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefill.local.stopping import Detokenizer, StopWatch


def decode(ids: Sequence[int]) -> str:
    """Token ids are bytes."""
    return bytes(ids).decode(errors="replace")


@given(st.text(max_size=40))
def test_text_comes_out_as_it_went_in(text: str):
    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.push(byte) for byte in text.encode()]
    assert detokenizer.text == "".join(pieces)
    if "\ufffd" not in text:
        assert detokenizer.text == text


def test_unfinished_characters_wait_for_their_last_byte():
    detokenizer = Detokenizer(decode)
    assert [detokenizer.push(byte) for byte in "é€".encode()] == ["", "é", "", "", "€"]


def test_garbage_is_shown_after_a_while_and_does_not_hold_text_back():
    detokenizer = Detokenizer(decode)
    for byte in b"\xff" * 10 + b"ab":
        detokenizer.push(byte)
    assert detokenizer.text.endswith("ab")


@pytest.mark.parametrize("stop", ["b", "bc", "\n\n", "é", "tail"])
def test_the_completing_token_is_the_one_that_reports(stop: str):
    text = f"a long head {stop} and more"
    end = len(text[: text.index(stop) + len(stop)].encode())
    watch = StopWatch(decode, [stop], [])
    verdicts = [watch.push(byte) for byte in text.encode()]
    assert verdicts.index(stop) == end - 1


def test_the_first_stop_of_several_wins():
    watch = StopWatch(decode, ["zz", "ab"], [])
    assert [watch.push(b) for b in b"xab"] == [None, None, "ab"]


def test_a_pattern_reports_itself():
    watch = StopWatch(decode, [], [r"\d{3}"])
    assert [watch.push(b) for b in b"a12345"][:4] == [None, None, None, r"\d{3}"]


def test_the_beginning_of_a_stop_string_is_undecided():
    watch = StopWatch(decode, ["stop!"], [])
    seen = []
    for byte in b"a st stop.":
        watch.push(byte)
        seen.append(watch.undecided())
    assert seen == [False, False, True, True, False, True, True, True, True, False]


def test_a_stop_inside_one_token_of_several_characters():
    words = ["Hello", " wor", "ld. Ne", "xt"]
    watch = StopWatch(lambda ids: "".join(words[i] for i in ids), ["d."], [])
    assert [watch.push(i) for i in range(4)][2] == "d."
