"""When a response is over, and what its text is. Pure: token ids in, text and verdicts out.

Invariants:
- Text grows only by whole characters: bytes of an unfinished UTF-8 sequence wait for the tokens that end it.
- A stop string is seen with the token that completes it, wherever the token borders lie.
- Each token is decoded a bounded number of times, however long the response.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

__all__ = ["Detokenizer", "StopWatch"]

Decode = Callable[[Sequence[int]], str]

_REPLACEMENT = "\ufffd"
_LONGEST_REGEX_WINDOW = 4096


class Detokenizer:
    """Turns a growing list of token ids into a growing text.

    Args:
        decode: decodes a list of ids; bytes that are no UTF-8 become U+FFFD.
    """

    __slots__ = ("_context", "_decode", "_done", "_ids", "text")

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._context = 0  # ids from here on are decoded again, since neighbours change how an id reads
        self._done = 0  # ids before this one are in `text`
        self.text = ""

    def push(self, token: int) -> str:
        """Adds one id and returns the text that became certain, perhaps nothing."""
        self._ids.append(token)
        before = self._decode(self._ids[self._context : self._done])
        now = self._decode(self._ids[self._context :])
        if now.endswith(_REPLACEMENT) and len(self._ids) - self._done < 8:
            return ""  # an unfinished character; eight ids in, it is garbage and shown as such
        new = now[len(before) :]
        self._context, self._done = self._done, len(self._ids)
        self.text += new
        return new


class StopWatch:
    """Looks for stop strings and patterns in one response while it is generated.

    Args:
        decode: as for `Detokenizer`.
        strings: stop strings.
        patterns: regular expressions.
    """

    __slots__ = ("_detokenizer", "_longest", "_patterns", "_strings")

    def __init__(self, decode: Decode, strings: Sequence[str], patterns: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(decode)
        self._strings = tuple(strings)
        self._patterns = tuple(re.compile(p) for p in patterns)
        self._longest = max((len(s) for s in strings), default=0)

    def push(self, token: int) -> str | None:
        """Adds one id; returns the stop string or the pattern once it is complete (SGLang names the pattern too)."""
        new = self._detokenizer.push(token)
        if not new:
            return None
        text = self._detokenizer.text
        tail = text[-(len(new) + self._longest) :]
        for stop in self._strings:
            if stop in tail:
                return stop
        window = text[-_LONGEST_REGEX_WINDOW:]
        for pattern in self._patterns:
            if pattern.search(window):
                return pattern.pattern
        return None

    def undecided(self) -> bool:
        """Whether the text ends with the beginning of a stop string, so that it should not be shown yet."""
        text = self._detokenizer.text
        return any(text.endswith(stop[:length]) for stop in self._strings for length in range(1, len(stop)))
