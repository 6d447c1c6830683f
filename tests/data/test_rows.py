"""A row becomes a prompt, or one error that names file, line and field."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onefill.data import Fields, Item, OnError, RowError, open_files, prompts
from onefill.data.rows import prompt_from_row
from onefill.errors import DataError
from onefill.types import Modality, Prompt
from tests.data.rows_helpers import write_jsonl, write_parquet


def read_one(row: Any, **fields: str) -> Prompt:
    return prompt_from_row(row, fields=Fields(**fields), default_id="f-1", base=Path("/nowhere"))


def items(path: Path, **fields: str) -> list[Item]:
    return list(open_files([path], fields=Fields(**fields)).read())


@pytest.mark.parametrize("key", ["prompt", "question", "problem"])
def test_a_string_prompt_under_its_usual_names(key: str) -> None:
    assert read_one({key: "1+1?", "answer": "2"}).text == "1+1?"
    assert read_one({key: "1+1?", "answer": "2"}).label == "2"


def test_messages_ids_and_what_is_left_over() -> None:
    row = {"messages": [{"role": "user", "content": "hi"}], "id": 7, "source": "web", "metadata": {"k": 1}}
    prompt = read_one(row)
    assert prompt.messages == ({"role": "user", "content": "hi"},)
    assert prompt.id == "7"
    assert prompt.metadata == {"source": "web", "k": 1}


def test_token_ids_are_kept_as_they_are() -> None:
    prompt = read_one({"input_ids": [5, 0, 9]})
    assert prompt.tokens is not None
    assert prompt.tokens.tolist() == [5, 0, 9]
    assert read_one({"input_ids": np.array([1, 2])}).tokens is not None


def test_token_ids_beside_a_prompt_win_over_tokenising_it() -> None:
    prompt = read_one({"prompt": "hi", "input_ids": [1]})
    assert prompt.text == "hi"
    assert prompt.tokens is not None


def test_a_row_of_verl_is_read_without_naming_keys(tmp_path: Path) -> None:
    image = {"bytes": b"\x89PNG", "path": None}
    row = {
        "data_source": "geo3k",
        "prompt": [{"role": "user", "content": "<image>What is the angle?"}],
        "images": [image],
        "reward_model": {"style": "rule", "ground_truth": "30"},
        "extra_info": {"split": "train", "index": 3},
    }
    (item,) = items(write_parquet(tmp_path / "geo.parquet", [row]))
    assert item.prompt is not None
    assert item.prompt.id == "geo-1"
    assert item.prompt.label == "30"
    assert item.prompt.media[0].source == b"\x89PNG"
    assert item.prompt.messages is not None
    assert item.prompt.messages[0]["content"] == [
        {"type": "image"},
        {"type": "text", "text": "What is the angle?"},
    ]
    assert item.prompt.metadata["extra_info"] == {"split": "train", "index": 3}


def test_media_without_markers_lead_the_first_user_message(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"png")
    row = {"prompt": [{"role": "user", "content": "What?"}], "image": "a.png"}
    (item,) = items(write_jsonl(tmp_path / "d.jsonl", [row]))
    assert item.prompt is not None
    assert item.prompt.messages is not None
    assert [part["type"] for part in item.prompt.messages[0]["content"]] == ["image", "text"]
    assert item.prompt.media[0].source == str(tmp_path / "a.png")


def test_media_inside_parts_move_to_the_prompt_in_order() -> None:
    url = "data:image/png;base64," + base64.b64encode(b"x").decode()
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "and"},
        {"type": "video", "video": "http://host/clip.mp4"},
    ]
    prompt = read_one({"prompt": [{"role": "user", "content": content}]})
    assert [m.modality for m in prompt.media] == [Modality.IMAGE, Modality.VIDEO]
    assert prompt.messages is not None
    assert prompt.messages[0]["content"][0] == {"type": "image"}


def test_metadata_never_holds_bytes() -> None:
    assert read_one({"prompt": "x", "thumb": b"123", "deep": {"raw": b"1", "k": 2}}).metadata == {"deep": {"k": 2}}


def test_a_named_key_that_is_missing_is_an_error_naming_what_there_is(tmp_path: Path) -> None:
    (item,) = items(write_jsonl(tmp_path / "d.jsonl", [{"prompt": "x", "gold": "1"}]), label="target")
    assert str(item.error) == (
        f"{tmp_path / 'd.jsonl'}, line 1, field target: the row does not have it; "
        "name the key that holds the label (the row has gold, prompt)"
    )


def test_a_dotted_key_walks_into_objects() -> None:
    row = {"q": {"text": "hi"}, "reward_model": {"ground_truth": 4}}
    assert read_one(row, prompt="q.text").text == "hi"
    assert read_one(row, prompt="q.text", label="reward_model.ground_truth").label == 4


USER = {"role": "user", "content": "hi"}
BAD_ROWS: list[tuple[Any, str, str]] = [
    ([1, 2], "", "not an object"),
    ("text", "", "not an object"),
    ({"label": "x"}, "prompt", "no prompt"),
    ({"prompt": ""}, "prompt", "is empty"),
    ({"prompt": "  "}, "prompt", "is empty"),
    ({"prompt": []}, "prompt", "empty list"),
    ({"prompt": None}, "prompt", "NoneType"),
    ({"prompt": 7}, "prompt", "is int"),
    ({"prompt": {"role": "user"}}, "prompt", "is dict"),
    ({"input_ids": [1, -2]}, "input_ids[1]", "is -2"),
    ({"input_ids": [1, 2.0]}, "input_ids[1]", "is 2.0"),
    ({"input_ids": [True]}, "input_ids[0]", "is True"),
    ({"input_ids": [2**31]}, "input_ids[0]", "is 2147483648"),
    ({"input_ids": "12"}, "input_ids", "is str"),
    ({"prompt": [{"role": "robot", "content": "x"}]}, "prompt[0].role", "is 'robot'"),
    ({"prompt": [{"content": "x"}]}, "prompt[0].role", "is None"),
    ({"prompt": [{"role": "user"}]}, "prompt[0].content", "is NoneType"),
    ({"prompt": [USER, "x"]}, "prompt[1]", "is str"),
    ({"prompt": [USER, {"role": "assistant", "content": "x"}]}, "prompt[1].role", "assistant's"),
    ({"prompt": [{"role": "user", "content": [{"type": "smell"}]}]}, "prompt[0].content[0].type", "'smell'"),
    ({"prompt": [{"role": "user", "content": ""}]}, "prompt", "every message is empty"),
    ({"prompt": "x", "image": 5}, "image", "is int"),
    ({"prompt": "x", "images": ["/no/such.png"]}, "images[0]", "no file at /no/such.png"),
    ({"prompt": "x", "images": [""]}, "images[0]", "empty"),
    ({"prompt": "x", "image": {"size": 3}}, "image", "holds no image"),
    ({"prompt": "x", "image": "A" * 5000}, "image", "no path"),
    ({"prompt": [{"role": "user", "content": "<image><image>"}], "image": "http://h/a"}, "prompt", "2 places for 1"),
    ({"prompt": "x", "id": ""}, "id", "is ''"),
    ({"prompt": "x", "id": [1]}, "id", "is [1]"),
    ({"prompt": "x", "metadata": 3}, "metadata", "is int"),
]


@pytest.mark.parametrize(("row", "field", "reason"), BAD_ROWS)
def test_a_bad_row_is_one_error_with_its_place(tmp_path: Path, row: Any, field: str, reason: str) -> None:
    path = write_jsonl(tmp_path / "bad.jsonl", [{"prompt": "good"}, row, {"prompt": "good too"}])
    first, second, third = items(path)
    assert first.prompt is not None
    assert third.prompt is not None
    assert isinstance(second.error, RowError)
    assert (second.error.file, second.error.number) == (str(path), 2)
    assert second.error.field == field
    assert reason in second.error.reason
    assert str(second.error).startswith(f"{path}, line 2")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{not json}", "invalid JSON"),
        (b'{"prompt": "a"', "invalid JSON"),
        (b'{"prompt": "\xff\xfe"}', "not UTF-8"),
        (b'{"prompt": "a"} {"prompt": "b"}', "invalid JSON"),
    ],
)
def test_a_line_that_is_no_json_is_one_error(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "first"}\r\n\n' + line + b'\n{"prompt": "last"}')
    first, bad, last = items(path)
    assert first.prompt is not None
    assert isinstance(bad.error, RowError)
    assert bad.error.number == 3
    assert reason in bad.error.reason
    assert last.prompt is not None
    assert last.prompt.id == "bad-4"


def test_a_json_document_over_many_lines_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "doc.json"
    path.write_text(json.dumps([{"prompt": "x"}], indent=1))
    assert "one JSON document over many lines" in str(items(path)[0].error)


def test_nan_in_metadata_is_read_as_python_writes_it(tmp_path: Path) -> None:
    assert items(write_jsonl(tmp_path / "n.jsonl", [{"prompt": "x", "score": float("nan")}]))[0].prompt


def nested(depth: int) -> Any:
    value: Any = "x"
    for i in range(depth):
        value = [value] if i % 2 == 0 else {"k": value}
    return value


@pytest.mark.parametrize(
    ("row", "field", "reason"),
    [
        ({"prompt": "half \ud83d"}, "prompt", "half a surrogate pair, \\ud83d, at character 6"),
        ({"prompt": "x", "label": "\udc00"}, "label", "half a surrogate pair"),
        ({"prompt": "x", "id": "\udc00"}, "id", "half a surrogate pair"),
        ({"prompt": [{"role": "user", "content": "\udc00"}]}, "prompt[0].content", "half a surrogate pair"),
        ({"prompt": "x", "metadata": {"a": [1, "\udc00"]}}, "metadata.a[1]", "half a surrogate pair"),
        ({"prompt": "x", "\udc00": 1}, "\\udc00", "half a surrogate pair"),
        ({"prompt": "x", "images": ["\udc00.png"]}, "images[0]", "half a surrogate pair"),
        ({"prompt": "x", "label": 2**64}, "label", "an integer beyond 64 bits (18446744073709551616)"),
        ({"prompt": "x", "label": 2**64, "n": float("nan")}, "label", "an integer beyond 64 bits"),
        ({"prompt": "x", "meta": {"seeds": [1, -(2**63) - 1]}}, "meta.seeds[1]", "an integer beyond 64 bits"),
        ({"prompt": "x", "label": 10**4000}, "label", "an integer beyond 64 bits"),
        ({"prompt": "x", "label": nested(300)}, "label", "nested more than 200 deep"),
        ({"prompt": "x", "metadata": nested(300)}, "metadata", "nested more than 200 deep"),
        ({"prompt": "x", "else": nested(900)}, "else", "nested more than 200 deep"),
        ({"prompt": [{"role": "user", "content": "x", "k": nested(300)}]}, "prompt", "nested more than 200 deep"),
    ],
)
def test_what_could_not_be_written_later_is_refused_where_it_is_read(
    tmp_path: Path, row: Any, field: str, reason: str
) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "first"}, row])
    _, second = items(path)
    assert isinstance(second.error, RowError)
    assert (second.error.number, second.error.field) == (2, field)
    assert reason in second.error.reason
    str(second.error).encode()


def test_an_integer_of_more_digits_than_python_reads_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(f'{{"prompt": "x", "label": 1{"0" * 5000}, "n": NaN}}\n')
    assert "field label: is an integer beyond 64 bits" in str(items(path)[0].error)


def test_large_numbers_that_can_be_written_are_read_as_they_are(tmp_path: Path) -> None:
    for label in (2**64 - 1, -(2**63), 1e30, 2.0**63):
        (item,) = items(write_jsonl(tmp_path / "d.jsonl", [{"prompt": "x", "label": label}]))
        assert item.prompt is not None
        assert item.prompt.label == label
        assert type(item.prompt.label) is type(label)


def test_two_rows_may_share_an_id(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "a", "id": "q"}, {"prompt": "b", "id": "q"}])
    assert [item.prompt.id for item in items(path) if item.prompt] == ["q", "q"]


def test_a_bad_row_of_parquet_is_named_by_row(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": ""}]
    error = items(write_parquet(tmp_path / "p.parquet", rows))[1].error
    assert str(error).startswith(f"{tmp_path / 'p.parquet'}, row 2, field prompt: is empty")


def test_the_caller_chooses_to_stop_or_to_skip(tmp_path: Path) -> None:
    source = open_files([write_jsonl(tmp_path / "d.jsonl", [{"prompt": "a"}, {}, {"prompt": "b"}])])
    with pytest.raises(DataError, match="line 2"):
        list(prompts(source))
    skipped: list[DataError] = []
    kept = list(prompts(source, on_error=OnError.SKIP, on_skip=skipped.append))
    assert [prompt.text for prompt, _ in kept] == ["a", "b"]
    assert len(skipped) == 1
