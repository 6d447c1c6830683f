"""Tasks by name."""

from __future__ import annotations

import itertools

import pytest

from onefill.data import Cursor, open_task
from onefill.data import tasks as tasks_module
from onefill.errors import ConfigError


def test_arithmetic_asks_small_sums_by_example() -> None:
    item = next(iter(open_task("arithmetic", seed=3).read()))
    assert item.prompt is not None
    assert item.prompt.messages is not None
    assert item.prompt.messages[-1]["content"].startswith("What is ")
    assert int(item.prompt.label) == eval(item.prompt.metadata["reasoning_gym"]["metadata"]["expression"])


def test_a_task_restores_to_the_same_questions_across_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks_module, "CHUNK", 4)
    whole = list(itertools.islice(open_task("chain_sum", seed=1).read(), 12))
    texts = [item.prompt.messages for item in whole if item.prompt]
    assert len({str(text) for text in texts}) > 10
    for cut in range(11):
        saved = Cursor.from_dict(whole[cut].cursor.to_dict())
        rest = itertools.islice(open_task("chain_sum", seed=1).read(saved), 11 - cut)
        assert [item.prompt.messages for item in rest if item.prompt] == texts[cut + 1 :]


def test_a_question_that_could_not_be_written_is_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [{"question": "?", "answer": "1", "metadata": {"seed": seed}} for seed in (1, 2**64, 3)]
    monkeypatch.setattr(tasks_module.TaskSource, "_create", lambda self, chunk: entries)
    first, second, third = itertools.islice(open_task("chain_sum").read(), 3)
    assert first.prompt and third.prompt
    assert "question 2, field metadata.reasoning_gym.metadata.seed: is an integer beyond 64 bits" in str(second.error)


def test_seeds_give_streams_that_do_not_meet() -> None:
    first, second = (
        {str(i.prompt.messages) for i in itertools.islice(open_task("chain_sum", seed=s).read(), 50) if i.prompt}
        for s in (1, 2)
    )
    assert not first & second


def test_options_reach_the_dataset() -> None:
    item = next(iter(open_task("rg:chain_sum:min_terms=5,max_terms=5").read()))
    assert item.prompt is not None
    assert item.prompt.metadata["reasoning_gym"]["metadata"]["num_terms"] == 5


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("chain_sm", "did you mean chain_sum"),
        ("zzz", "known are"),
        ("chain_sum:terms=2", "has no option terms"),
        ("chain_sum:min_terms", "not an option"),
        ("chain_sum:min_terms=9,max_terms=2", "refuses its options"),
        ("chain_sum:seed=2", "has no option seed"),
    ],
)
def test_a_wrong_task_is_told_before_the_run(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_task(spec)


def test_a_cursor_of_another_task_is_refused() -> None:
    cursor = next(iter(open_task("chain_sum").read())).cursor
    with pytest.raises(ConfigError, match="same --task"):
        open_task("arithmetic").read(cursor)
