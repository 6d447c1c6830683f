"""Rewards in processes: right, killable, and gone with their parent."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import psutil
import pytest
import uvloop
from reasoning_gym.factory import create_dataset

from onefill.reward import Rewarder, RewardOutcome, parse
from onefill.reward.pool import WorkerPool
from tests.reward.groups import finished

HANGS = "$9^{9^{9^{9}}}$"


@pytest.fixture
async def verifier() -> AsyncIterator[Rewarder]:
    rewarder = Rewarder(parse("math"), time_limit_s=2.0, workers=2)
    yield rewarder
    await rewarder.aclose()


async def test_math_sees_equal_expressions(verifier: Rewarder) -> None:
    group = finished([r"so \boxed{\frac{2}{4}}", "it is 0.5", "$1/2$", "2", "no number"], r"\frac{1}{2}")
    assert [o.value for o in await verifier.score(group)] == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert (await verifier.score(finished(["#### 42"], "long\n#### 42")))[0].value == 1.0


async def test_a_label_that_is_no_mathematics_is_a_reason_and_not_a_zero(verifier: Rewarder) -> None:
    (outcome,) = await verifier.score(finished(["5"], "???"))
    assert outcome.value is None
    assert "is not a mathematical expression" in outcome.reason
    assert "--label-key" in (await verifier.score(finished(["5"], None)))[0].reason


async def test_note_34_a_hanging_verifier_is_killed_and_the_others_are_scored(verifier: Rewarder) -> None:
    await verifier.score(finished(["5"], "5"))
    before = verifier.pool.pids
    out = await verifier.score(finished(["5", HANGS, "6"], "5"))
    assert [o.value for o in out] == [1.0, None, 0.0]
    assert out[1].reason == "math took longer than 2 s and was stopped"
    assert not set(before) & set(verifier.pool.pids)
    assert not psutil.pid_exists(before[0]) or psutil.Process(before[0]).status() == psutil.STATUS_ZOMBIE


async def test_note_34_hanging_calls_of_one_group_are_spread_over_the_workers() -> None:
    rewarder = Rewarder(parse("math"), time_limit_s=1.0, workers=4)
    try:
        await rewarder.score(finished(["5"], "5"))
        running, most = 0, 0
        on_one = rewarder.pool._on_one

        async def counted(calls: Any) -> Any:
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                return await on_one(calls)
            finally:
                running -= 1

        rewarder.pool._on_one = counted  # type: ignore[method-assign]
        out = await rewarder.score(finished([HANGS] * 5 + ["5"], "5"))
        assert [o.value for o in out] == [None] * 5 + [1.0]
        assert most >= 3
    finally:
        await rewarder.aclose()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
async def test_note_50_a_score_that_is_no_finite_number_is_a_failure_with_a_reason(value: float) -> None:
    outcome = WorkerPool(kind="math", size=1, time_limit_s=1)._outcome({"value": value})
    assert outcome.value is None
    assert outcome.reason == f"math returned {value}: return a finite number"
    with pytest.raises(ValueError, match="finite"):
        RewardOutcome(value)


async def test_a_worker_that_cannot_be_started_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    (outcome,) = await Rewarder(parse("math")).score(finished(["5"], "5"))
    assert "cannot start" in outcome.reason


async def test_note_30_a_verifier_that_dies_costs_one_sample(verifier: Rewarder) -> None:
    await verifier.score(finished(["5"], "5"))
    task = asyncio.ensure_future(verifier.score(finished([HANGS, "5"], "5")))
    await asyncio.sleep(0.3)
    for pid in verifier.pool.pids:
        os.kill(pid, signal.SIGKILL)
    first, second = await task
    assert "died" in first.reason
    assert second.value == 1.0


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_worker_that_was_killed_while_idle_costs_nobody(run: Callable[[Any], Any]) -> None:
    async def main() -> list[RewardOutcome]:
        rewarder = Rewarder(parse("math"), workers=1)
        try:
            await rewarder.score(finished(["5"], "5"))
            os.kill(rewarder.pool.pids[0], signal.SIGKILL)
            await asyncio.sleep(0.3)
            return await rewarder.score(finished(["5", "6"], "5"))
        finally:
            await rewarder.aclose()

    assert [o.value for o in run(main())] == [1.0, 0.0]


async def test_a_cancelled_group_leaves_no_busy_worker(verifier: Rewarder) -> None:
    await verifier.score(finished(["5"], "5"))
    task = asyncio.ensure_future(verifier.score(finished([HANGS], "5")))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await verifier.score(finished(["5"], "5")))[0].value == 1.0


async def test_nothing_is_left_after_closing(verifier: Rewarder) -> None:
    await verifier.score(finished(["5"], "5"))
    pids = verifier.pool.pids
    assert pids
    await verifier.aclose()
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.skipif(sys.platform != "linux", reason="the parent's death is signalled on Linux")
@pytest.mark.parametrize("text", ["5", HANGS])
def test_workers_die_with_a_killed_parent(text: str) -> None:
    code = textwrap.dedent(f"""
        import asyncio
        from onefill.reward import Rewarder, parse
        from tests.reward.groups import finished

        async def main():
            rewarder = Rewarder(parse("math"), workers=1)
            await rewarder.score(finished(["5"], "5"))
            print(rewarder.pool.pids[0], flush=True)
            await rewarder.score(finished([{text!r}], "5"))
            await asyncio.sleep(60)

        asyncio.run(main())
    """)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    time.sleep(0.3)
    parent.kill()
    parent.wait()
    gone, _ = psutil.wait_procs([worker], timeout=5)
    assert gone or worker.status() == psutil.STATUS_ZOMBIE


async def test_reasoning_gym_uses_the_tasks_own_scorer() -> None:
    entry = create_dataset("chain_sum", seed=1, size=1)[0]
    scoring = {"task": "chain_sum", "options": {}, "question": entry["question"], "metadata": entry["metadata"]}
    rewarder = Rewarder(parse("reasoning-gym"), workers=1)
    try:
        texts = [entry["answer"], f"<answer>{entry['answer']}</answer>", "no"]
        out = await rewarder.score(finished(texts, entry["answer"], {"reasoning_gym": scoring}))
        assert [o.value for o in out] == [1.0, 1.0, 0.0]
        (other,) = await rewarder.score(finished(["1"], "1"))
        assert "not of a reasoning-gym task" in other.reason
        unsendable = {"reasoning_gym": {"task": lambda: None}}
        assert "cannot be sent" in (await rewarder.score(finished(["1"], "1", unsendable)))[0].reason
    finally:
        await rewarder.aclose()
