"""The rewards that compare text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefill.reward import RewardInput
from onefill.reward.answers import choice, exact, final_answer


def call(text: str, label: Any) -> RewardInput:
    return RewardInput(text=text, tokens=np.zeros(1, dtype=np.int32), label=label, metadata={})


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 42 \n", "42"),
        ("it is <answer>1</answer> no <answer> 2 </answer> end", "2"),
        (r"so \boxed{1} and \boxed{\frac{1}{2}} is it", r"\frac{1}{2}"),
        (r"broken \boxed{1", r"broken \boxed{1"),
        ("work\n#### 7\n", "7"),
        ("</answer> stray", "</answer> stray"),
    ],
)
def test_the_final_answer_is_the_last_marked_one(text: str, answer: str) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "label", "value"),
    [
        ("  Paris. ", "paris", 1.0),
        ("1,234", "1234", 1.0),
        ("<answer>5</answer>", 5, 1.0),
        ("#### 5", "long way\n#### 5", 1.0),
        ("b", ["a", "b"], 1.0),
        ("15", "5", 0.0),
        ("", "5", 0.0),
    ],
)
def test_exact(text: str, label: Any, value: float) -> None:
    assert exact(call(text, label)).value == value


@pytest.mark.parametrize(
    ("text", "label", "value"),
    [
        ("B", "B", 1.0),
        ("(b)", "B", 1.0),
        ("B) because it is", "(B)", 1.0),
        ("First A looks right, but the answer is (C).", "C", 1.0),
        (r"Thus \boxed{D}", "D", 1.0),
        ("<answer>A. the cat</answer>", "A", 1.0),
        ("A cat. So the correct option is **B**", "B", 1.0),
        ("I would take B", "B", 1.0),
        ("Answer: C", "A", 0.0),
        ("no idea", "A", 0.0),
    ],
)
def test_choice(text: str, label: str, value: float) -> None:
    assert choice(call(text, label)).value == value


def test_without_a_label_there_is_no_reward_and_not_a_zero() -> None:
    for reward in (exact, choice):
        outcome = reward(call("x", None))
        assert outcome.value is None
        assert "--label-key" in outcome.reason
    assert "is not a letter" in choice(call("x", "Paris")).reason


@given(st.text(alphabet=r"\boxed{}<answer>/# AB().1,", max_size=400))
def test_any_text_gets_a_reward(text: str) -> None:
    assert exact(call(text, "A")).value in {0.0, 1.0}
    assert choice(call(text, "A")).value in {0.0, 1.0}
