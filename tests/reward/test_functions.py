"""The user's own rewards: names, arguments, failures, time."""

from __future__ import annotations

import asyncio
import gc
import math
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onefill.errors import ConfigError
from onefill.reward import Rewarder, RewardInput, of_function, parse
from tests.reward.groups import finished


async def scored(function: Callable[..., Any], group: Any, *, per_group: bool = False, limit: float = 5.0) -> Any:
    rewarder = Rewarder(of_function(function, per_group=per_group, name="f"), time_limit_s=limit)
    return await rewarder.score(group)


async def test_a_function_gets_the_arguments_that_it_names() -> None:
    def f(response: str, ground_truth: str, extra_info: dict[str, int], *, index: int, weight: float = 2.0) -> float:
        return weight * (response == ground_truth) + extra_info["bonus"] + index / 10

    out = await scored(f, finished(["a", "b"], "a", {"bonus": 1}))
    assert [o.value for o in out] == [3.0, 1.1]


async def test_one_parameter_of_any_name_is_the_whole_input() -> None:
    def f(x: RewardInput) -> bool:
        return x.text == "a" and x.group_id == "g" and x.prompt == "the question" and x.tokens.tolist() == [1, 2]

    assert [o.value for o in await scored(f, finished(["a", "b"]))] == [1.0, 0.0]


async def test_async_functions_and_instances_are_awaited() -> None:
    class Judge:
        async def __call__(self, text: str) -> float:
            await asyncio.sleep(0)
            return float(text)

    assert [o.value for o in await scored(Judge(), finished(["1", "2"]))] == [1.0, 2.0]


async def test_a_group_reward_is_called_once_in_sample_order() -> None:
    calls = []

    def f(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
        calls.append(completions)
        assert kwargs["index"] == [0, 1, 2]
        return [float(len(c)) for c in completions]

    out = await scored(f, finished(["a", "bbb", "cc"], "x"), per_group=True)
    assert calls == [["a", "bbb", "cc"]]
    assert [o.value for o in out] == [1.0, 3.0, 2.0]


async def test_note_30_a_lost_sample_has_no_reward_and_the_rest_of_the_group_does() -> None:
    group = finished(["a", None, "ccc"])
    for per_group in (False, True):

        def f(text: Any) -> Any:
            return [len(t) for t in text] if isinstance(text, list) else len(text)

        out = await scored(f, group, per_group=per_group)
        assert [o.value for o in out] == [1.0, None, 3.0]
        assert out[1].reason == "the sample is failed: the engine is gone"
    rewarder = Rewarder(of_function(len, name="len"))  # fails on an input: no reward, a reason, no exception
    await rewarder.reward(group)
    assert [s.reward for s in group.samples] == [None, None, None]
    assert "len raised TypeError" in group.samples[0].reward_error
    assert group.samples[1].error == "the engine is gone"


class UntellableError(Exception):
    """An error that cannot even say what it is."""

    def __str__(self) -> str:
        raise ValueError


class Broken:
    """A scalar whose device is gone."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def item(self) -> float:
        raise self._error


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (math.nan, "returned nan"),
        (math.inf, "returned inf"),
        (None, "returned None"),
        ("1", "returned str"),
        ({"score": 1}, "returned dict"),
        (10**400, "returned a number too large for a float"),
        (Fraction(10**400), "returned a number too large for a float"),
        (Broken(RuntimeError("no device")), "returned Broken, which raised RuntimeError: no device"),
        (Broken(SystemExit(3)), "returned Broken, which raised SystemExit(3)"),
        (Broken(UntellableError()), "returned Broken, which raised UntellableError"),
        (Broken(RuntimeError("\ud800")), "which raised RuntimeError: \\ud800"),
    ],
)
async def test_note_50_a_value_that_is_no_number_costs_its_own_sample_only(value: Any, reason: str) -> None:
    out = await scored(lambda text: value if text == "bad" else 1.0, finished(["ok", "bad"]))
    assert [o.value for o in out] == [1.0, None]
    assert reason in out[1].reason
    out = await scored(lambda texts: [1.0, value], finished(["ok", "bad"]), per_group=True)
    assert [o.value for o in out] == [1.0, None]
    assert reason in out[1].reason


async def test_note_50_a_value_that_hangs_is_over_its_time() -> None:
    release = threading.Event()

    class Slow:
        def item(self) -> float:
            release.wait(20)
            return 1.0

    try:
        out = await scored(lambda text: Slow() if text == "hang" else 1.0, finished(["a", "hang"]), limit=0.3)
        assert [o.value for o in out] == [1.0, None]
        assert "took longer than 0.3 s" in out[1].reason
    finally:
        release.set()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([1.0], "returned 1 rewards for 2 samples"),
        ([1.0, 2.0, 3.0], "returned 3 rewards for 2 samples"),
        (1.0, "returned float: a group reward returns a list of 2 numbers"),
        (None, "returned NoneType"),
        ({"a": 1, "b": 2}, "returned dict"),
        ("ab", "returned str"),
    ],
)
async def test_note_50_a_group_reward_of_the_wrong_shape_gives_none_to_anyone(value: Any, reason: str) -> None:
    out = await scored(lambda texts: value, finished(["a", "b"]), per_group=True)
    assert [o.value for o in out] == [None, None]
    assert all(reason in o.reason for o in out)


async def test_note_50_a_group_reward_that_raises_gives_its_reason() -> None:
    def f(texts: list[str]) -> list[float]:
        raise KeyError("gold")

    assert [o.reason for o in await scored(f, finished(["a"]), per_group=True)] == ["f raised KeyError: 'gold'"]


async def test_numbers_of_numpy_and_booleans_count() -> None:
    out = await scored(lambda texts: np.array([1, 0.5], dtype=np.float32), finished(["a", "b"]), per_group=True)
    assert [o.value for o in out] == [1.0, 0.5]
    assert [o.value for o in await scored(lambda text: np.bool_(True), finished(["a"]))] == [1.0]


async def test_note_34_a_hanging_reward_costs_its_sample_only_and_in_time() -> None:
    release = threading.Event()

    def sync(text: str) -> float:
        if text == "hang":
            release.wait(20)
        return 1.0

    async def stubborn(text: str) -> float:
        while text == "hang" and not release.is_set():
            try:
                await asyncio.sleep(0.2)
            except asyncio.CancelledError:  # a judge client that swallows its cancellation
                continue
        return 1.0

    try:
        for function in (sync, stubborn):
            started = time.monotonic()
            out = await scored(function, finished(["a", "hang", "b"]), limit=0.3)
            assert time.monotonic() - started < 5
            assert [o.value for o in out] == [1.0, None, 1.0]
            assert out[1].reason == "f took longer than 0.3 s and was given up"
    finally:
        release.set()


async def test_note_34_after_too_many_hanging_calls_the_function_is_not_called_again() -> None:
    release = threading.Event()
    rewarder = Rewarder(of_function(lambda text: release.wait(20), name="f"), time_limit_s=0.2, threads=2)
    try:
        out = await rewarder.score(finished(["a", "b"]))
        assert [o.value for o in out] == [None, None]
        out = await rewarder.score(finished(["c"]))
        assert "2 earlier calls never returned" in out[0].reason
    finally:
        release.set()
    for _ in range(200):
        await asyncio.sleep(0.02)
        out = await rewarder.score(finished(["d"]))
        if out[0].value == 1.0:  # the threads came back, and so does the function
            break
    assert out[0].value == 1.0


async def test_whatever_a_reward_raises_is_a_reason() -> None:
    for error, reason in (
        (SystemExit(3), "f raised SystemExit(3)"),
        (KeyboardInterrupt(), "f raised KeyboardInterrupt()"),
        (asyncio.CancelledError(), "f raised CancelledError()"),
        (StopIteration(), "f raised StopIteration: "),
        (UntellableError(), "f raised UntellableError"),
        (RuntimeError("x" * 10_000), "f raised RuntimeError: " + "x" * 977),
    ):

        def f(text: str, error: BaseException = error) -> float:
            raise error

        async def g(text: str, error: BaseException = error) -> float:
            raise error

        for function in (f, g, partial(g)):
            if function is not f and isinstance(error, StopIteration):
                continue  # Python turns it into a RuntimeError inside a coroutine
            assert [o.reason for o in await scored(function, finished(["a"]))] == [reason]


async def test_a_label_that_cannot_be_text_costs_no_run() -> None:
    class Label:
        def __str__(self) -> str:
            raise SystemExit(3)

    for name in ("exact", "choice"):
        (outcome,) = await Rewarder(parse(name)).score(finished(["a"], Label()))
        assert outcome.reason == f"{name} raised SystemExit(3)"


async def test_the_run_goes_on_while_a_coroutine_blocks() -> None:
    async def f(text: str) -> float:
        threading.Event().wait(0.5)
        return 1.0

    task = asyncio.ensure_future(scored(f, finished(["a", "b"]), limit=5))
    late = 0.0
    while not task.done():
        before = time.monotonic()
        await asyncio.sleep(0.01)
        late = max(late, time.monotonic() - before)
    assert late < 0.3
    assert [o.value for o in task.result()] == [1.0, 1.0]  # one behind the other, each within its own time


async def test_note_34_a_loop_that_is_blocked_is_given_up_and_replaced() -> None:
    release = threading.Event()

    async def f(text: str) -> float:
        if text == "hang":
            release.wait(20)  # never gives the loop back
        return 1.0

    rewarder = Rewarder(of_function(f, name="f"), time_limit_s=0.3, threads=8)
    try:
        started = time.monotonic()
        out = await rewarder.score(finished(["a", "hang", "hang", "hang", "b"]))
        assert time.monotonic() - started < 5  # not the limit once for each
        assert [o.value for o in out] == [1.0, None, None, None, 1.0]
        assert out[1].reason == "f took longer than 0.3 s and was given up"
        assert [o.value for o in await rewarder.score(finished(["c"]))] == [1.0]
    finally:
        release.set()
        await rewarder.aclose()


async def test_note_34_after_too_many_blocked_loops_the_function_is_not_called_again() -> None:
    release = threading.Event()

    async def f(text: str) -> float:
        release.wait(20)
        return 1.0

    rewarder = Rewarder(of_function(f, name="f"), time_limit_s=0.1, threads=2)
    try:
        for _ in range(3):
            await rewarder.score(finished(["a", "b"]))
        before = threading.active_count()
        out = await rewarder.score(finished(["c"]))
        assert "earlier calls never returned" in out[0].reason
        assert threading.active_count() == before
    finally:
        release.set()
    for _ in range(200):
        await asyncio.sleep(0.02)
        out = await rewarder.score(finished(["d"]))
        if out[0].value == 1.0:
            break
    assert out[0].value == 1.0


async def test_a_task_that_blocks_the_loop_behind_its_call_does_not_hang_the_next_one() -> None:
    release = threading.Event()

    async def block() -> None:
        await asyncio.sleep(0.01)
        release.wait(20)

    tasks = []

    async def f(text: str) -> float:
        if text == "leave":
            tasks.append(asyncio.ensure_future(block()))
        return 1.0

    rewarder = Rewarder(of_function(f, name="f"), time_limit_s=0.3)
    try:
        assert [o.value for o in await rewarder.score(finished(["leave"]))] == [1.0]
        await asyncio.sleep(0.1)
        assert [o.value for o in await rewarder.score(finished(["a"]))] == [1.0]
    finally:
        release.set()


async def test_coroutines_share_a_loop_that_survives_what_they_do_to_it() -> None:
    loops = set()

    async def f(text: str) -> float:
        loop = asyncio.get_running_loop()
        loops.add(loop)
        loop.call_soon(lambda: sys.exit(3))
        loop.stop()
        await asyncio.sleep(0.01)
        return 1.0

    assert [o.value for o in await scored(f, finished(["a", "b", "c"]))] == [1.0] * 3
    assert len(loops) == 1
    assert asyncio.get_running_loop() not in loops


async def test_threads_are_used_again_and_end_with_the_rewarder() -> None:
    seen = set()

    def f(text: str) -> float:
        seen.add(threading.current_thread())
        return 1.0

    rewarder = Rewarder(of_function(f, name="f"))
    for _ in range(50):
        await rewarder.score(finished(["a", "b"]))
    assert len(seen) <= 6  # two at once, and some room for one that is just coming back
    await rewarder.aclose()
    for thread in seen:
        thread.join(5)
        assert not thread.is_alive()


async def test_the_threads_of_a_forgotten_rewarder_end() -> None:
    async def f(text: str) -> float:
        threads.add(threading.current_thread())
        return 1.0

    def g(text: str) -> float:
        threads.add(threading.current_thread())
        return 1.0

    threads: set[threading.Thread] = set()
    await scored(f, finished(["a"]))
    await scored(g, finished(["a"]))
    gc.collect()
    for thread in threads:
        await asyncio.to_thread(thread.join, 5)
        assert not thread.is_alive()


def test_nothing_that_hangs_keeps_the_interpreter_from_ending() -> None:
    code = textwrap.dedent("""
        import asyncio, time
        from onefill.reward import Rewarder, of_function
        from tests.reward.groups import finished

        async def blocks(text):
            time.sleep(600)

        async def stubborn(text):
            while True:
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    pass

        async def in_a_thread(text):
            await asyncio.to_thread(time.sleep, 600)

        def sync(text):
            time.sleep(600)

        async def main():
            for function in (blocks, stubborn, in_a_thread, sync):
                rewarder = Rewarder(of_function(function, name="f"), time_limit_s=0.1)
                (outcome,) = await rewarder.score(finished(["a"]))
                assert "took longer" in outcome.reason, outcome
                await rewarder.aclose()

        asyncio.run(main())
    """)
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0


async def test_cancelling_passes_through() -> None:
    task = asyncio.ensure_future(scored(lambda text: time.sleep(0.5), finished(["a"])))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_file_and_a_module_are_found_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_reward_mod.py").write_text("def f(text):\n    return len(text)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    for name in ("my_reward_mod:f", "my_reward_mod.py:f", f"{tmp_path}/my_reward_mod.py:f"):
        assert (await Rewarder(parse(name)).score(finished(["abc"])))[0].value == 3.0


def test_a_reward_that_cannot_be_had_is_told_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_thing\n")
    (tmp_path / "fine.py").write_text("def two(a, b): ...\ndef none(): ...\n")
    for name, message in (
        ("exat", "did you mean exact"),
        ("zzzzzz", "there are exact, choice, math, reasoning-gym"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        (f"{tmp_path}/broken.py:f", "no_such_thing"),
        (f"{tmp_path}/missing.py:f", "does not exist"),
        (f"{tmp_path}/fine.py:nope", r"has no function nope \(it has two, none\)"),
        (f"{tmp_path}/fine.py:two", "wants a, b"),
        (f"{tmp_path}/fine.py:none", "takes no parameters"),
        (":f", "no import path"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(name)
    with pytest.raises(ConfigError, match="single samples"):
        parse("math", per_group=True)


def test_names_of_the_command_line() -> None:
    assert Rewarder.from_names() is None
    assert Rewarder.from_names(reward="exact") is not None
    with pytest.raises(ValueError, match="not both"):
        Rewarder.from_names(reward="exact", group_reward="a:b")
