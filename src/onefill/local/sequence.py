"""One response while it is generated.

Invariants:
- Written by the generation thread alone, from the moment it is submitted until `finish` is set; other threads read
  it after they were notified, and then only the first `published` tokens.
- `tokens` and `logprobs` have one length; version spans tile them.
- `finish` is set once. After that nothing changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

from onefill.local.params import SamplingParams
from onefill.local.stopping import StopWatch

__all__ = ["ABORTED", "ABORTED_IN_QUEUE", "Sequence"]

ABORTED = "Aborted"
ABORTED_IN_QUEUE = "Abort in waiting queue"


class Sequence:
    """One response: what was asked, what came so far, why it ended.

    Args:
        rid: the id that clients see.
        prompt_tokens: length of the prompt.
        params: how it is drawn.
        max_new_tokens: the most tokens it may get, already clipped to context and cache.
        eos_ids: ids that end it, unless `ignore_eos`.
        watch: looks for stop strings, or None.
        streams: whether somebody wants to hear of it before it ends.
        grouped: whether it is one of several samples of one prompt.
        notify: called on the generation thread when there is news. Must not block.
    """

    __slots__ = (
        "_stops",
        "_watch",
        "abort_requested",
        "cached_tokens",
        "error",
        "finish",
        "grouped",
        "logprobs",
        "max_new_tokens",
        "notify",
        "params",
        "prompt_tokens",
        "published",
        "retractions",
        "rid",
        "spans",
        "streams",
        "time_created",
        "time_finished",
        "time_started",
        "tokens",
    )

    def __init__(
        self,
        *,
        rid: str,
        prompt_tokens: int,
        params: SamplingParams,
        max_new_tokens: int,
        eos_ids: SequenceOf[int],
        watch: StopWatch | None,
        streams: bool = False,
        grouped: bool = False,
        notify: Callable[[], None],
    ) -> None:
        self.rid = rid
        self.prompt_tokens = prompt_tokens
        self.params = params
        self.max_new_tokens = max_new_tokens
        self.streams = streams
        self.grouped = grouped
        self.notify = notify
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[tuple[str, int, int]] = []
        self.published = 0
        self.cached_tokens: int | None = None
        self.retractions = 0
        self.finish: dict[str, Any] | None = None
        self.error: str | None = None
        self.abort_requested = False
        self.time_created = time.monotonic()
        self.time_started = 0.0
        self.time_finished = 0.0
        self._watch = watch
        self._stops = frozenset((*eos_ids, *params.stop_token_ids))

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end it (end-of-sequence and `stop_token_ids`)."""
        return self._stops

    def start(self, cached_tokens: int) -> None:
        """Notes that the engine took it up, with this much of the prompt in its cache already. Later calls are void.

        A sample of a group always counts all but the last prompt token as cached: SGLang prefills the prompt of a
        group in a hidden request of its own.
        """
        if self.cached_tokens is None:
            self.cached_tokens = self.prompt_tokens - 1 if self.grouped else cached_tokens
            self.time_started = time.monotonic()

    def append(self, token: int, logprob: float, version: str) -> bool:
        """Adds a token drawn by the weights called `version`; returns True when that ends the response."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        count = len(self.tokens)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1], count)
        else:
            self.spans.append((version, count - 1, count))
        finish = self._verdict(token, count)
        if finish is not None:
            self._end(finish)
            return True
        if self.streams and self._should_publish(count):
            self.published = count
            self.notify()
        return False

    def _should_publish(self, count: int) -> bool:
        due = self.published == 0 or count - self.published >= self.params.stream_interval
        return due and (self._watch is None or not self._watch.undecided())

    def _verdict(self, token: int, count: int) -> dict[str, Any] | None:
        """Why it ends here, or None. Strings before ids before length, as SGLang judges them."""
        matched = self._watch.push(token) if self._watch is not None else None
        if matched is not None:
            return {"type": "stop", "matched": matched}
        if token in self._stops and not self.params.ignore_eos:
            return {"type": "stop", "matched": token}
        if count >= self.max_new_tokens:
            return {"type": "length", "length": self.max_new_tokens}
        return None

    def abort(self) -> None:
        """Ends it as aborted, keeping what it has. Void once it has ended."""
        if self.finish is None:
            queued = self.cached_tokens is None
            message = ABORTED_IN_QUEUE if queued else ABORTED
            self._end({"type": "abort", "message": message, "status_code": None, "err_type": None})

    def fail(self, error: str) -> None:
        """Ends it because the engine broke. Void once it has ended."""
        if self.finish is None:
            self.error = error
            self._end({"type": "abort", "message": error, "status_code": 500, "err_type": "InternalServerError"})

    def end_at_prefill(self) -> None:
        """Ends a request that wanted no tokens."""
        if self.finish is None:
            self._end({"type": "length", "length": 0})

    def _end(self, finish: dict[str, Any]) -> None:
        self.published = len(self.tokens)
        self.time_finished = time.monotonic()
        self.finish = finish
        self.notify()
