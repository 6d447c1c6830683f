"""The user's own reward functions: found by import path, given the arguments they name.

Invariants: what cannot work (no such module, no such function, a parameter that we know nothing for) is a
ConfigError before the run begins, with the cause.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from onefill.errors import ConfigError
from onefill.reward.call import RewardInput

__all__ = ["PARAMETERS", "Arguments", "bind", "is_async", "load_function"]

Arguments = Callable[[Sequence[RewardInput]], tuple[list[Any], dict[str, Any]]]
"""Turns the inputs (one for a sample reward, the group's for a group reward) into args and kwargs."""

PARAMETERS: dict[str, tuple[str, ...]] = {
    "input": ("input", "sample", "inputs", "samples", "group"),
    "text": ("text", "response", "completion", "solution_str", "texts", "responses", "completions"),
    "label": ("label", "answer", "ground_truth", "solution", "labels", "answers", "solutions"),
    "prompt": ("prompt", "question", "prompts", "questions"),
    "metadata": ("metadata", "extra_info"),
    "tokens": ("tokens", "completion_ids"),
    "finish_reason": ("finish_reason", "finish_reasons"),
    "index": ("index", "indices"),
    "group_id": ("group_id",),
}
_FIELD = {name: field for field, names in PARAMETERS.items() for name in names}


def load_function(path: str) -> Callable[..., Any]:
    """The function at `module:function` or `path/to/file.py:function`.

    Raises:
        ConfigError: it is not there, or importing it fails; the message has the cause.
    """
    where, _, name = path.rpartition(":")
    if not where or not name:
        raise ConfigError(f"the reward {path!r} is no import path: write module:function or file.py:function")
    try:
        module = _load_file(Path(where)) if where.endswith(".py") else _load_module(where)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the reward {path}: importing {where} failed ({type(error).__name__}: {error}); "
            "repair it, or run from the directory that holds it"
        ) from error
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        has = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(f"the reward {path}: {where} has no function {name} (it has {', '.join(has) or 'none'})")
    function: Callable[..., Any] = found
    return function


def _load_module(name: str) -> ModuleType:
    here = str(Path.cwd())
    local = Path.cwd() / name.split(".", maxsplit=1)[0]
    if here not in sys.path and (local.is_dir() or local.with_suffix(".py").is_file()):
        sys.path.append(here)  # a console script, unlike python -m, does not look in the working directory
    return importlib.import_module(name)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"the reward file {path} does not exist: check the path (now in {Path.cwd()})")
    name = f"onefill_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"the reward file {path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def is_async(function: Callable[..., Any]) -> bool:
    """True where calling it gives something to await."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  an instance whose __call__ is async
    )


def bind(function: Callable[..., Any], *, per_group: bool, name: str) -> Arguments:
    """How to call a function, from the names of its parameters.

    A parameter gets the field of `RewardInput` that `PARAMETERS` lists it under; a single parameter of another
    name gets the input itself. A group reward gets lists, in sample order.

    Raises:
        ConfigError: a required parameter has a name that stands for nothing.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return lambda inputs: ([_value("input", inputs, per_group)], {})
    named = [p for p in parameters if p.kind not in {p.VAR_POSITIONAL, p.VAR_KEYWORD}]
    required = [p for p in named if p.default is p.empty]
    unknown = [p.name for p in required if p.name not in _FIELD]
    whole = unknown[0] if len(required) == 1 and len(unknown) == 1 else None
    if unknown and whole is None:
        raise ConfigError(
            f"the reward {name} wants {', '.join(unknown)}, which is not known here; parameters may be called "
            f"{', '.join(sorted(_FIELD))}, or take one parameter, the whole input"
        )
    chosen = [
        (p.name, _FIELD.get(p.name, "input"), p.kind is p.POSITIONAL_ONLY)
        for p in named
        if p.name in _FIELD or p.name == whole
    ]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        taken = {field for _, field, _ in chosen}
        chosen += [(field, field, False) for field in PARAMETERS if field not in taken | {"input"}]
    elif not chosen and any(p.kind is p.VAR_POSITIONAL for p in parameters):
        chosen = [("", "input", True)]
    elif not chosen:
        raise ConfigError(f"the reward {name} takes no parameters: let it take one, the input")

    def arguments(inputs: Sequence[RewardInput]) -> tuple[list[Any], dict[str, Any]]:
        args = [_value(field, inputs, per_group) for _, field, positional in chosen if positional]
        kwargs = {key: _value(field, inputs, per_group) for key, field, positional in chosen if not positional}
        return args, kwargs

    return arguments


def _value(field: str, inputs: Sequence[RewardInput], per_group: bool) -> Any:
    values = list(inputs) if field == "input" else [getattr(one, field) for one in inputs]
    return values if per_group else values[0]
