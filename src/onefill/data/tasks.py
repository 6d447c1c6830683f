"""Questions made on the spot by reasoning-gym, by the name of a task.

Invariants:
- Question i of a task is a function of (name, options, seed, i) alone, so the cursor is just i.
- A task never ends: past `CHUNK` questions the next dataset begins where the seeds of the last one ended.
- The prompt's metadata holds what the task's own scorer needs (`reasoning_gym`), and nothing that is elsewhere.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from onefill.data.cursor import Cursor
from onefill.data.errors import FieldError, RowError
from onefill.data.plain import check_plain
from onefill.data.source import Item
from onefill.errors import ConfigError
from onefill.types import Prompt

__all__ = ["CHUNK", "TaskSource", "open_task"]

CHUNK = 10_000
_SEEDS_A_STREAM = 1 << 20
_RESERVED = frozenset({"seed", "size"})
_INSTRUCTION = "Give the final answer inside <answer></answer> tags."


@dataclass(frozen=True, slots=True)
class _Alias:
    """A friendly name: a dataset with options, asked in a way that a small model follows."""

    dataset: str
    options: Mapping[str, Any]
    examples: tuple[tuple[str, str], ...]


# Two worked turns instead of an instruction: a 135M-parameter chat model copies a pattern but follows no rules.
_ALIASES = {
    "arithmetic": _Alias(
        dataset="chain_sum",
        options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        examples=(("2 + 3", "5"), ("9 - 5", "4")),
    )
}


def open_task(spec: str, *, seed: int = 0) -> TaskSource:
    """A task by name.

    Args:
        spec: `arithmetic`, or the name of a reasoning-gym dataset (also as `rg:NAME`), with options of its
            configuration behind a colon: `chain_sum:min_terms=2,max_terms=3`.
        seed: another seed, other questions.

    Raises:
        ConfigError: no such task (the message has close matches), or options that it does not have or refuses.
    """
    name, _, given = spec.removeprefix("rg:").partition(":")
    alias = _ALIASES.get(name)
    dataset = alias.dataset if alias else name
    options = {**(alias.options if alias else {}), **_options(given, spec)}
    return TaskSource(name=name, dataset=dataset, options=options, seed=seed)


class TaskSource:
    """An endless stream of questions.

    Args:
        name: what the user called it.
        dataset: reasoning-gym's name of it.
        options: values for the dataset's configuration.
        seed: 0 or more; streams of different seeds do not meet within a million questions.
    """

    def __init__(self, *, name: str, dataset: str, options: Mapping[str, Any], seed: int = 0) -> None:
        if seed < 0:
            raise ConfigError(f"the seed of a task must be 0 or more, got {seed}")
        self._name = name
        self._dataset = dataset
        self._options = dict(options)
        self._seed = seed
        self._check()

    @property
    def name(self) -> str:
        """The name of the task."""
        return self._name

    def read(self, cursor: Cursor | None = None) -> Iterator[Item]:
        """Questions from the start or from behind `cursor`. See `Source.read`."""
        source = f"task:{self._name}:{json.dumps(self._options, sort_keys=True)}"
        start = cursor or Cursor(source=source, seed=self._seed)
        if start.source != source or start.seed != self._seed:
            raise ConfigError(
                f"the saved cursor is of {start.source}, seed {start.seed}, the task now is {source}, "
                f"seed {self._seed}: give the same --task and --seed, or start anew"
            )
        return self._read(start)

    def _read(self, at: Cursor) -> Iterator[Item]:
        chunk, data = -1, None
        while True:
            if at.row // CHUNK != chunk:
                chunk = at.row // CHUNK
                data = self._create(chunk)
            index = at.row
            at = replace(at, row=index + 1)
            try:
                entry = data[index % CHUNK]  # type: ignore[index]
                prompt = self._prompt(index, entry)
                check_plain(prompt.label, "answer")
                check_plain(prompt.metadata, "metadata")
            except FieldError as error:
                yield Item(cursor=at, error=self._failed(index, error.field, error.reason))
                continue
            except Exception as error:  # noqa: BLE001  a generator of someone else, and one question of many
                yield Item(cursor=at, error=self._failed(index, "", f"{type(error).__name__}: {error}"))
                continue
            yield Item(cursor=at, prompt=prompt)

    def _prompt(self, index: int, entry: Mapping[str, Any]) -> Prompt:
        scoring = {
            "task": self._dataset,
            "options": self._options,
            "question": entry["question"],
            "metadata": entry.get("metadata") or {},
        }
        return Prompt(
            id=f"{self._name}-{self._seed}-{index}",
            messages=tuple(self._messages(entry)),
            label=entry["answer"],
            metadata={"reasoning_gym": scoring},
        )

    def _messages(self, entry: Mapping[str, Any]) -> Iterator[Mapping[str, str]]:
        alias = _ALIASES.get(self._name)
        if alias is None:
            yield {"role": "user", "content": f"{entry['question']}\n\n{_INSTRUCTION}"}
            return
        for expression, answer in alias.examples:
            yield {"role": "user", "content": f"What is {expression}?"}
            yield {"role": "assistant", "content": answer}
        yield {"role": "user", "content": f"What is {entry['metadata']['expression']}?"}

    def _create(self, chunk: int) -> Any:
        from reasoning_gym.factory import create_dataset  # noqa: PLC0415

        seed = (self._seed * _SEEDS_A_STREAM + chunk * CHUNK) % (1 << 32)
        return create_dataset(self._dataset, seed=seed, size=CHUNK, **self._options)

    def _check(self) -> None:
        import reasoning_gym  # noqa: F401, PLC0415  registers the datasets; takes 1 to 2 s
        from reasoning_gym.factory import DATASETS  # noqa: PLC0415

        if self._dataset not in DATASETS:
            known = [*_ALIASES, *DATASETS]
            close = difflib.get_close_matches(self._name, known, n=4, cutoff=0.5)
            meant = f"did you mean {', '.join(close)}?" if close else f"known are {', '.join(sorted(known))}"
            raise ConfigError(f"there is no task {self._name!r}: {meant}")
        config = DATASETS[self._dataset][1]
        known_options = {field.name for field in fields(config)} - _RESERVED
        unknown = sorted(set(self._options) - known_options)
        if unknown:
            raise ConfigError(
                f"task {self._name} has no option {', '.join(unknown)}: it has {', '.join(sorted(known_options))}"
            )
        try:
            self._create(0)
        except Exception as error:
            raise ConfigError(f"task {self._name} refuses its options {self._options}: {error}") from error

    def _failed(self, index: int, field: str, why: str) -> RowError:
        return RowError(
            file=f"task {self._name}",
            unit="question",
            number=index + 1,
            field=field,
            reason=why if field else f"reasoning-gym could not make it ({why})",
            hint="pass over it with --on-error skip, or choose other options",
        )


def _options(given: str, spec: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for pair in filter(None, given.split(",")):
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"task {spec!r}: {pair!r} is not an option; write name=value,name=value")
        try:
            options[name.strip()] = json.loads(value.lower() if value in {"True", "False"} else value)
        except json.JSONDecodeError:
            options[name.strip()] = value
    return options
