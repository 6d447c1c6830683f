"""Flags and the TOML file: one meaning, one message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onefill.cli.settings import load_settings
from onefill.errors import ConfigError


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_nothing_given_is_a_small_run_on_the_embedded_engine() -> None:
    settings = load_settings({}, None)
    assert settings.engine == ["local"]
    assert settings.task_name == "arithmetic"
    assert settings.groups_wanted == 16
    assert settings.reward_name == "reasoning-gym"


def test_files_are_read_to_their_end_and_have_no_reward_of_their_own() -> None:
    settings = load_settings({"data": ["a.jsonl"]}, None)
    assert settings.task_name is None
    assert settings.groups_wanted is None
    assert settings.reward_name is None


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = toml(tmp_path, 'strategy = "native"\ngroup-size = 4\nmax_new_tokens = 7\ndata = "x.jsonl"\n')
    settings = load_settings({"group_size": 16, "temperature": None, "stop": []}, file)
    assert (settings.strategy, settings.group_size, settings.max_new_tokens) == ("native", 16, 7)
    assert settings.data == ["x.jsonl"]


def test_a_task_on_the_command_line_replaces_the_files_data(tmp_path: Path) -> None:
    settings = load_settings({"task": "chain_sum"}, toml(tmp_path, 'data = "x.jsonl"\n'))
    assert settings.task_name == "chain_sum"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"engine": ["router:30000"]}, "--engine: 'router:30000' is neither"),
        ({"engine": ["http://a", "http://a/"]}, "--engine: an engine is named twice"),
        ({"out": Path(__file__)}, "--out"),
        ({"strategy": "best"}, "--strategy: unknown strategy 'best'"),
        ({"strategy": "split:0"}, "--strategy"),
        ({"group_size": 0}, "--group-size"),
        ({"groups": 0}, "--groups"),
        ({"temperature": -1.0}, "--temperature"),
        ({"temperature": float("nan")}, "--temperature"),
        ({"top_p": 0.0}, "--top-p"),
        ({"top_k": 0}, "top_k must be"),
        ({"stop": [""]}, "stop must be"),
        ({"max_new_tokens": 0}, "--max-new-tokens"),
        ({"concurrency": 0}, "--concurrency"),
        ({"seed": -1}, "--seed"),
        ({"reward_timeout": 0.0}, "--reward-timeout"),
        ({"data": ["a"], "task": "b"}, "exclude each other"),
        ({"reward": "exact", "group_reward": "m:f"}, "exclude each other"),
    ],
)
def test_a_bad_value_names_its_flag(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_settings(flags, None)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("group-sise = 8\n", "did you mean group-size"),
        ("group-size = 0\n", "run.toml: --group-size"),
        ("group-size = 'x'\n", "run.toml: --group-size"),
        ("group-size = \n", "is not TOML"),
    ],
)
def test_a_bad_file_names_itself_and_the_key(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_settings({}, toml(tmp_path, text))
    assert says in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load_settings({}, tmp_path / "absent.toml")
