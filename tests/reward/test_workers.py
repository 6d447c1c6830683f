"""Rewards in processes: right, killable, and gone with their parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator

import psutil
import pytest
from reasoning_gym.factory import create_dataset

from onefill.reward import Rewarder, parse
from tests.reward.groups import finished

HANGS = "$9^{9^{9^{9}}}$"


@pytest.fixture
async def math() -> AsyncIterator[Rewarder]:
    rewarder = Rewarder(parse("math"), time_limit_s=2.0, workers=2)
    yield rewarder
    await rewarder.aclose()


async def test_math_sees_equal_expressions(math: Rewarder) -> None:
    group = finished([r"so \boxed{\frac{2}{4}}", "it is 0.5", "$1/2$", "2", "no number"], r"\frac{1}{2}")
    assert [o.value for o in await math.score(group)] == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert (await math.score(finished(["#### 42"], "long\n#### 42")))[0].value == 1.0


async def test_a_label_that_is_no_mathematics_is_a_reason_and_not_a_zero(math: Rewarder) -> None:
    (outcome,) = await math.score(finished(["5"], "???"))
    assert outcome.value is None
    assert "is not a mathematical expression" in outcome.reason
    assert "--label-key" in (await math.score(finished(["5"], None)))[0].reason


async def test_note_34_a_hanging_verifier_is_killed_and_the_others_are_scored(math: Rewarder) -> None:
    await math.score(finished(["5"], "5"))
    before = math.pool.pids
    out = await math.score(finished(["5", HANGS, "6"], "5"))
    assert [o.value for o in out] == [1.0, None, 0.0]
    assert out[1].reason == "math took longer than 2 s and was stopped"
    assert not set(before) & set(math.pool.pids)
    assert not psutil.pid_exists(before[0]) or psutil.Process(before[0]).status() == psutil.STATUS_ZOMBIE


async def test_note_30_a_verifier_that_dies_costs_one_sample(math: Rewarder) -> None:
    await math.score(finished(["5"], "5"))
    task = asyncio.ensure_future(math.score(finished([HANGS, "5"], "5")))
    await asyncio.sleep(0.3)
    for pid in math.pool.pids:
        os.kill(pid, signal.SIGKILL)
    first, second = await task
    assert "died" in first.reason
    assert second.value == 1.0


async def test_a_cancelled_group_leaves_no_busy_worker(math: Rewarder) -> None:
    await math.score(finished(["5"], "5"))
    task = asyncio.ensure_future(math.score(finished([HANGS], "5")))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await math.score(finished(["5"], "5")))[0].value == 1.0


async def test_nothing_is_left_after_closing(math: Rewarder) -> None:
    await math.score(finished(["5"], "5"))
    pids = math.pool.pids
    assert pids
    await math.aclose()
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
