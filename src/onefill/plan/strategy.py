"""How a group becomes requests, as the user says it and as it ends up."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from onefill.errors import ConfigError

__all__ = ["Form", "Strategy"]


class Form(StrEnum):
    """What a group was sent as, and what the user may ask for (`AUTO` only asks)."""

    AUTO = "auto"
    NATIVE = "native"
    SPLIT = "split"
    FANOUT = "fanout"


@dataclass(frozen=True, slots=True)
class Strategy:
    """A strategy that a user asks for.

    Args:
        form: auto, native, split or fanout.
        k: samples a request, for split only.
    """

    form: Form = Form.AUTO
    k: int = 0

    def __post_init__(self) -> None:
        if (self.form is Form.SPLIT) != (self.k > 0):
            raise ConfigError(f"strategy {self.form} with k = {self.k}: only split takes a k, of 1 or more")

    @classmethod
    def parse(cls, word: str) -> Strategy:
        """Reads `auto`, `native`, `fanout` or `split:K`.

        Raises:
            ConfigError: it is none of these.
        """
        if match := re.fullmatch(r"split:([1-9][0-9]*)", word):
            return cls(Form.SPLIT, int(match[1]))
        if word in (Form.AUTO, Form.NATIVE, Form.FANOUT):
            return cls(Form(word))
        raise ConfigError(f"unknown strategy {word!r}: use auto, native, fanout or split:K, for example split:4")

    def __str__(self) -> str:
        return f"split:{self.k}" if self.form is Form.SPLIT else str(self.form)
