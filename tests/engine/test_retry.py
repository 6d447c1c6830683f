"""The retry policy, without a clock and without a socket."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefill.engine.retry import AttemptError, Budget, RetryPolicy, classify
from onefill.errors import ConfigError, InfraError

_RETRIED = {408, 429, 502, 503, 504}


def fault(code: int, retry_after: float | None = None) -> AttemptError:
    return AttemptError("x", verdict=classify(code), retry_after=retry_after)


@given(code=st.integers(300, 599))
def test_only_transient_statuses_are_retried(code: int) -> None:
    budget = classify(code).budget
    expected = Budget.TRANSIENT if code in _RETRIED else Budget.FEW if code == 500 else Budget.NEVER
    assert budget is expected


@pytest.mark.parametrize("error", [ConnectionResetError(), TimeoutError(), OSError()])
def test_network_faults_are_retried(error: OSError) -> None:
    assert classify(error).budget is Budget.TRANSIENT
    assert classify(error).error is InfraError


@given(
    code=st.sampled_from([400, 403, 429, 500, 502, 503]),
    made=st.integers(0, 40),
    few=st.integers(0, 40),
    spent=st.floats(0, 2000),
    after=st.none() | st.floats(0, 1e9),
    seed=st.integers(0, 1000),
)
def test_every_wait_is_bounded(code: int, made: int, few: int, spent: float, after: float | None, seed: int) -> None:
    policy = RetryPolicy()
    counts = {Budget.TRANSIENT: made, Budget.FEW: few}
    wait = policy.wait(fault(code, after), made=counts, spent=spent, rng=random.Random(seed))
    limit = {400: 0, 403: 0, 500: policy.retries_500}.get(code, policy.retries)
    used = few if code == 500 else made
    if used >= limit or spent > policy.deadline:
        assert wait is None
    if wait is not None:
        assert 0 <= wait <= (policy.cap if after is None else policy.retry_after_cap + policy.base)
        assert spent + wait <= policy.deadline


def test_waits_grow_and_differ() -> None:
    policy = RetryPolicy(base=1.0, cap=8.0, retries=50)
    rng = random.Random(0)

    def longest(made: int) -> float:
        draws = [policy.wait(fault(503), made={Budget.TRANSIENT: made}, spent=0, rng=rng) or 0.0 for _ in range(200)]
        assert len(set(draws)) > 190
        return max(draws)

    assert longest(0) <= 1 < longest(1) <= 2 < longest(2) <= 4 < longest(3) <= 8
    assert longest(30) <= 8


def test_a_negative_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="retries"):
        RetryPolicy(retries=-1)


def test_wrong_keys_and_addresses_are_the_users_business() -> None:
    assert {classify(code).error for code in (301, 401, 403, 404, 405)} == {ConfigError}


@pytest.mark.parametrize(
    ("error", "left", "broke_off"),
    [
        (ConnectionResetError(), True, True),
        (TimeoutError(), True, True),
        (TimeoutError(), False, False),
        (503, True, False),
        (500, True, False),
    ],
)
def test_only_a_request_that_was_under_way_can_break_off(error: int | OSError, left: bool, broke_off: bool) -> None:
    assert AttemptError("x", verdict=classify(error), left=left).broke_off is broke_off
