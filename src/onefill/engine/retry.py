"""What to do about a fault: try again, or say which error it is. Pure: no clock, no socket, no event loop.

Invariants:
- A fault is classified once, by `classify`; nothing else in the room decides whether to retry.
- The number of retries is bounded for each class, and so are every single wait and the time that waits and
  fruitless tries take together. What an engine generated for before it broke off does not count: a response of
  11 minutes deserves its retry as much as one of 11 seconds.
- A 4xx that blames the request is never retried (a framework did so sixty times, a 403 and a 400 included).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import aiohttp

from onefill.errors import ConfigError, DataError, InfraError, OnefillError, ProtocolError

__all__ = ["AttemptError", "Budget", "RetryPolicy", "Verdict", "classify"]


class Budget(StrEnum):
    """How often a class of faults may be retried."""

    NEVER = "never"
    FEW = "few"
    TRANSIENT = "transient"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a fault means.

    Args:
        cause: short name that retries are counted under: `connection`, `reset`, `timeout`, `http_502` ...
        budget: how often it may be retried.
        error: what the user sees when it is not retried (any more).
    """

    cause: str
    budget: Budget
    error: type[OnefillError]


class AttemptError(Exception):
    """One try failed. Raised inside the room only; `EngineClient` turns the last one into an `OnefillError`.

    Args:
        message: what happened, with the server's own words where it had any.
        verdict: what it means.
        retry_after: seconds that the server asked us to wait, if it did.
        left: whether the request may have reached the server (False where no connection was made).
    """

    def __init__(
        self, message: str, *, verdict: Verdict, retry_after: float | None = None, left: bool = True
    ) -> None:
        super().__init__(message)
        self.verdict = verdict
        self.retry_after = retry_after
        self.left = left

    @property
    def broke_off(self) -> bool:
        """Whether the engine may have been generating: the request left, and was lost without an answer."""
        return self.left and self.verdict.cause in _BREAKS


_TRANSIENT = frozenset({408, 429, 502, 503, 504})
_INPUT = frozenset({400, 413, 422})
_ACCESS = frozenset({401, 403, 404, 405})
_BREAKS = frozenset({"reset", "timeout"})


def classify(fault: int | BaseException) -> Verdict:
    """Says what an HTTP status (200 excepted) or an exception of the transport means."""
    return _of_status(fault) if isinstance(fault, int) else _of_exception(fault)


def _of_status(status: int) -> Verdict:
    cause = f"http_{status}"
    if status in _TRANSIENT:
        return Verdict(cause, Budget.TRANSIENT, InfraError)
    if status == 500:
        return Verdict(cause, Budget.FEW, InfraError)
    if status in _INPUT:
        return Verdict(cause, Budget.NEVER, DataError)
    if status in _ACCESS or 300 <= status < 400:  # wrong address or missing key: every request would fail
        return Verdict(cause, Budget.NEVER, ConfigError)
    if 200 <= status < 300:
        return Verdict(cause, Budget.NEVER, ProtocolError)
    return Verdict(cause, Budget.NEVER, InfraError)


def _of_exception(fault: BaseException) -> Verdict:
    if isinstance(fault, aiohttp.InvalidURL | aiohttp.ClientSSLError | aiohttp.ClientConnectorCertificateError):
        return Verdict("address", Budget.NEVER, ConfigError)
    if isinstance(fault, TimeoutError):
        return Verdict("timeout", Budget.TRANSIENT, InfraError)
    if isinstance(fault, aiohttp.ClientConnectorError):
        return Verdict("connection", Budget.TRANSIENT, InfraError)
    if isinstance(fault, aiohttp.ClientPayloadError | aiohttp.ClientConnectionError | OSError):
        return Verdict("reset", Budget.TRANSIENT, InfraError)
    return Verdict("not_http", Budget.NEVER, ProtocolError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often, and after what wait. Times in seconds.

    Args:
        retries: retries of a transient fault (connection, reset, timeout, 408, 429, 502, 503, 504).
        retries_500: retries of a 500, which may as well be a bug that every try meets again.
        base: the first wait is drawn from 0 .. base, the next from 0 .. 2 * base, and so on (full jitter,
            so that hundreds of requests that failed together do not come back together).
        cap: no drawn wait is longer.
        retry_after_cap: a longer `Retry-After` is cut to this.
        deadline: no retry starts once waits, and tries that got nowhere (no connection, a status), took this long.

    Raises:
        ValueError: a value is negative.
    """

    retries: int = 6
    retries_500: int = 2
    base: float = 0.5
    cap: float = 20.0
    retry_after_cap: float = 60.0
    deadline: float = 600.0

    def __post_init__(self) -> None:
        for name in ("retries", "retries_500", "base", "cap", "retry_after_cap", "deadline"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)!r}")

    def wait(
        self, fault: AttemptError, *, made: Mapping[Budget, int], spent: float, rng: random.Random
    ) -> float | None:
        """Seconds to wait before the next try, or None to give up.

        Args:
            fault: the try that just failed.
            made: retries made so far, by budget.
            spent: seconds spent so far on waits and on tries that did not break off.
            rng: draws the jitter.
        """
        budget = fault.verdict.budget
        limit = {Budget.NEVER: 0, Budget.FEW: self.retries_500, Budget.TRANSIENT: self.retries}[budget]
        if made.get(budget, 0) >= limit:
            return None
        doublings = min(sum(made.values()), 30)
        drawn = rng.uniform(0.0, min(self.cap, self.base * 2.0**doublings))
        if fault.retry_after is not None:
            drawn = min(max(fault.retry_after, 0.0), self.retry_after_cap) + rng.uniform(0.0, self.base)
        return drawn if spent + drawn <= self.deadline else None
