"""From the name on the command line to a reward.

Invariants: a name is a built-in or an import path; anything else is a ConfigError with close matches, before
the run begins.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from onefill.errors import ConfigError
from onefill.reward.answers import choice, exact
from onefill.reward.call import RewardInput, RewardOutcome
from onefill.reward.scorers import SCORERS
from onefill.reward.user import Arguments, bind, is_async, load_function

__all__ = ["BUILT_IN", "Place", "Reward", "of_function", "parse"]

_INLINE: dict[str, Callable[[RewardInput], RewardOutcome]] = {"exact": exact, "choice": choice}
BUILT_IN: tuple[str, ...] = (*_INLINE, *SCORERS)


class Place(StrEnum):
    """Where a reward is computed."""

    INLINE = "inline"
    """In a thread of the pool: cheap, and cannot hang."""
    WORKER = "worker"
    """In a process that is killed when it hangs."""
    USER = "user"
    """The user's function: in a thread, or awaited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A reward, ready to be called by a `Rewarder`.

    Args:
        name: what it is called in messages.
        place: where it is computed.
        per_group: called once with all samples of a group.
        check: the built-in comparison, for INLINE.
        function: the user's function, for USER.
        arguments: how to call it.
    """

    name: str
    place: Place
    per_group: bool = False
    check: Callable[[RewardInput], RewardOutcome] | None = None
    function: Callable[..., Any] | None = None
    arguments: Arguments | None = None

    @property
    def coroutine(self) -> bool:
        """True where the user's function is async."""
        return self.function is not None and is_async(self.function)


def parse(name: str, *, per_group: bool = False) -> Reward:
    """The reward that a name stands for.

    Args:
        name: `exact`, `choice`, `math`, `reasoning-gym`, `module:function` or `path/to/file.py:function`.
        per_group: as a group reward (`--group-reward`), which only a function of the user's can be.

    Raises:
        ConfigError: no such reward, or it cannot be imported; the message says what to do.
    """
    if ":" in name:
        return of_function(load_function(name), per_group=per_group, name=name)
    known = name.replace("_", "-")
    if known not in BUILT_IN:
        close = difflib.get_close_matches(known, BUILT_IN, n=2, cutoff=0.5)
        meant = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(BUILT_IN)}"
        raise ConfigError(f"there is no reward {name!r}: {meant} (your own is module:function)")
    if per_group:
        raise ConfigError(f"{known} rewards single samples: use --reward {known}; a group reward is your own")
    if known in _INLINE:
        return Reward(name=known, place=Place.INLINE, check=_INLINE[known])
    return Reward(name=known, place=Place.WORKER)


def of_function(function: Callable[..., Any], *, per_group: bool = False, name: str = "") -> Reward:
    """A function, sync or async, as a reward.

    Raises:
        ConfigError: its parameters have names that stand for nothing (see `user.PARAMETERS`).
    """
    shown = name or getattr(function, "__qualname__", repr(function))
    return Reward(
        name=shown,
        place=Place.USER,
        per_group=per_group,
        function=function,
        arguments=bind(function, per_group=per_group, name=shown),
    )
