"""What `onefill rollout` can be told, from flags and from a TOML file.

Invariants:
- One model for both: a flag and its key in the file have one name, one check and one message.
- Flags win over the file, the file over the defaults. An unknown key is an error that names the nearest one.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from onefill.data.source import OnError
from onefill.errors import ConfigError
from onefill.plan import Strategy
from onefill.types import SamplingParams

__all__ = ["DEFAULT_TASK", "RolloutSettings", "load_settings"]

DEFAULT_TASK = "arithmetic"
_KEYS = ("prompt", "label", "image", "video", "audio")


def _dashed(name: str) -> str:
    return name.replace("_", "-")


class RolloutSettings(BaseModel):
    """The options of `onefill rollout` and `onefill explain`; see `onefill rollout --help` for each."""

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=_dashed, populate_by_name=True)

    engine: list[str] = Field(default=["local"], min_length=1)
    model: str = "smollm2-135m"
    tokenizer: str | None = None
    threads: int | None = Field(default=None, ge=1)
    data: list[str] = []
    task: str | None = None
    prompt_key: str | None = None
    label_key: str | None = None
    image_key: str | None = None
    video_key: str | None = None
    audio_key: str | None = None
    system: str | None = None
    apply_chat_template: bool | None = None
    shuffle: bool = False
    epochs: int = Field(default=1, ge=1)
    groups: int | None = Field(default=None, ge=1)
    group_size: int = Field(default=8, ge=1)
    strategy: str = "auto"
    max_new_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = -1
    min_p: float = Field(default=0.0, ge=0, le=1)
    stop: list[str] = []
    seed: int = Field(default=0, ge=0)
    reward: str | None = None
    group_reward: str | None = None
    group_reward_required: bool = False
    reward_timeout: float = Field(default=30.0, gt=0)
    request_timeout: float = Field(default=3600.0, gt=0)
    concurrency: int = Field(default=256, ge=1)
    on_error: OnError = OnError.FAIL
    out: Path | None = None

    @field_validator("engine", "data", "stop", mode="before")
    @classmethod
    def _one_is_a_list_of_one(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("engine")
    @classmethod
    def _engine_is_a_url(cls, value: list[str]) -> list[str]:
        for engine in value:
            if engine != "local" and not engine.startswith(("http://", "https://")):
                raise ValueError(f"{engine!r} is neither `local` nor a URL such as http://host:30000")
        engines = [engine.rstrip("/") for engine in value]
        if len(set(engines)) != len(engines):
            raise ValueError("an engine is named twice")
        return engines

    @field_validator("out")
    @classmethod
    def _out_can_be_a_directory(cls, value: Path | None) -> Path | None:
        if value is not None and value.exists() and not value.is_dir():
            raise ValueError(f"{value} is a file, not a directory")
        return value

    @field_validator("strategy")
    @classmethod
    def _strategy_is_known(cls, value: str) -> str:
        try:
            Strategy.parse(value)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return value

    @model_validator(mode="after")
    def _together(self) -> RolloutSettings:
        if self.data and self.task:
            raise ValueError("--data and --task exclude each other: prompts come from files or from a task")
        if self.reward and self.group_reward:
            raise ValueError("--reward and --group-reward exclude each other: a sample has one reward")
        self.sampling()  # ranges that no single field can check
        return self

    def sampling(self) -> SamplingParams:
        """How samples are drawn."""
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop=tuple(self.stop),
        )

    def idle_options(self) -> list[str]:
        """Options that were given and do nothing in this run, each as a line for the user."""
        idle: dict[str, tuple[str, ...]] = {}
        if self.task_name:
            idle["prompts come from a task"] = ("shuffle", "epochs", *(f"{k}_key" for k in _KEYS))
        if "local" not in self.engine:
            idle["no engine is the embedded one"] = ("threads", "model")
        return [
            f"--{_dashed(name)} does nothing here: {why}"
            for why, names in idle.items()
            for name in names
            if name in self.model_fields_set
        ]

    @property
    def task_name(self) -> str | None:
        """The task that prompts come from, or None where they come from files."""
        return None if self.data else (self.task or DEFAULT_TASK)

    @property
    def groups_wanted(self) -> int | None:
        """How many groups to roll out: a task has no end, so it gets 16; files are read to their end."""
        return self.groups if self.groups is not None or self.data else 16

    @property
    def reward_name(self) -> str | None:
        """The per-sample reward: a task brings its own scorer."""
        if self.reward or self.group_reward or self.data:
            return self.reward
        return "reasoning-gym"


def load_settings(flags: Mapping[str, Any], file: Path | None) -> RolloutSettings:
    """Merges flags over a TOML file and checks the result.

    Args:
        flags: what was given on the command line; None and () mean not given.
        file: `--config`, or None.

    Raises:
        ConfigError: the file cannot be read, or a value is wrong; the message names each.
    """
    given = {_dashed(name): value for name, value in flags.items() if value is not None and value not in ([], ())}
    from_file = _read(file) if file else {}
    for one, other in (("data", "task"), ("task", "data"), ("reward", "group-reward"), ("group-reward", "reward")):
        if one in given and other not in given:
            from_file.pop(other, None)  # the flag replaces the file's choice between the two
    try:
        return RolloutSettings.model_validate({**from_file, **given})
    except ValidationError as error:
        raise ConfigError("\n".join(_line(e, file, from_file) for e in error.errors())) from error


def _read(file: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read --config {file}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file} is not TOML: {error}") from error
    return {_dashed(name).lstrip("-"): value for name, value in values.items()}


def _line(error: Any, file: Path | None, from_file: Mapping[str, Any]) -> str:
    name = _dashed(str(error["loc"][0])) if error["loc"] else ""
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        known = [_dashed(n) for n in RolloutSettings.model_fields]
        near = difflib.get_close_matches(name, known, n=1)
        message = f"no such option{f', did you mean {near[0]}?' if near else ''}"
    where = f"{file}: " if file and name in from_file else ""
    return f"{where}--{name}: {message}" if name else message
