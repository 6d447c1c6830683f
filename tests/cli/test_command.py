"""The command as a shell sees it: exit codes, what goes to which stream, Ctrl-C, how fast it starts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.cli.test_rollout import prompts
from tests.conftest import generate_calls

ROOT = Path(__file__).parent.parent.parent


def onefill(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "onefill", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=cwd)


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def test_json_is_one_object_on_stdout_and_all_else_on_stderr(tiny_engine: str, tmp_path: Path) -> None:
    data = prompts(tmp_path / "p.jsonl", 2)
    done = onefill("rollout", "--engine", tiny_engine, "--data", data, "--max-new-tokens", "4", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["groups_done"], summary["samples_done"]) == (2, 16)
    for key in [
        "groups_done",
        "groups_failed",
        "samples_done",
        "requests_sent",
        "requests_retried",
        "groups_by_strategy",
        "ineligible",
        "prompt_tokens",
        "prefill_tokens",
        "saved_tokens",
        "response_tokens",
        "tokens_per_s",
        "wall_s",
        "reward_mean",
        "reward_std",
        "finish_reasons",
        "duplicate_samples",
        "warnings",
        "errors",
    ]:
        assert key in summary


def test_a_reward_that_prints_does_not_spoil_the_json(tiny_engine: str, tmp_path: Path) -> None:
    data = prompts(tmp_path / "p.jsonl", 1)
    (tmp_path / "loud.py").write_text("def loud(text):\n    print('debug', text)\n    return 1.0\n")
    done = onefill(
        *("rollout", "--engine", tiny_engine, "--data", data, "--max-new-tokens", "4", "--json"),
        *("--reward", f"{tmp_path / 'loud.py'}:loud"),
    )
    assert json.loads(done.stdout)["reward_mean"] == 1.0
    assert "debug" in done.stderr


def test_the_table_is_for_people(tiny_engine: str, tmp_path: Path) -> None:
    data = prompts(tmp_path / "p.jsonl", 2)
    out = tmp_path / "out"
    done = onefill("rollout", "--engine", tiny_engine, "--data", data, "--max-new-tokens", "4", "--out", str(out))
    assert done.returncode == 0
    assert "2 done, 0 failed (2 native)" in done.stdout
    assert "saved by sharing" in done.stdout
    assert sorted(p.name for p in out.iterdir()) == ["samples.parquet", "summary.json"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["rollout", "--strategy", "best"], "unknown strategy 'best'"),
        (["rollout", "--group-size", "0"], "--group-size"),
        (["rollout", "--no-such-flag"], "No such option"),
        (["rollout", "--data", "absent.jsonl"], "absent.jsonl"),
        (["rollout", "--task", "no_such_task"], "no_such_task"),
        (["rollout", "--reward", "exakt"], "exact"),
        (["rollout", "--config", "absent.toml"], "absent.toml"),
        (["models", "pull", "gpt-5"], "known: "),
        (["serve", "--model", "no-such-model"], "no model"),
    ],
)
def test_bad_usage_ends_with_2_and_says_what(words: list[str], says: str, tmp_path: Path) -> None:
    done = onefill(*words, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_is_one_line_and_the_last(tiny_engine: str, tmp_path: Path) -> None:
    data = prompts(tmp_path / "p.jsonl", 1, tokens=9000)
    done = onefill("rollout", "--engine", tiny_engine, "--data", data)
    assert done.returncode == 2
    line = last_line(done.stderr)
    assert line.startswith("error: ")
    assert "9000" in line
    assert "context" in line


def test_the_list_of_models_says_what_is_here(tiny_engine: str) -> None:
    listed = {line.split()[0]: line for line in onefill("models", "list").stdout.splitlines()}
    assert " here " in listed["tiny"]  # the engine of these tests serves it
    assert set(listed) >= {"tiny", "smollm2-135m"}


def test_explain_names_strategy_and_rules_and_sends_nothing(tiny_engine: str, tmp_path: Path) -> None:
    data = prompts(tmp_path / "p.jsonl", 3)
    before = generate_calls(tiny_engine)
    done = onefill("explain", "--engine", tiny_engine, "--data", data, "--group-size", "1", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [g["barred_by"] for g in report["groups"]] == [["single-sample"]] * 3
    assert next(r for r in report["rules"] if r["rule"] == "single-sample")["groups"] == 3
    table = onefill("explain", "--engine", tiny_engine, "--data", data, "--strategy", "split:4")
    assert "1 x n=8" not in table.stdout
    assert "2 x n=4" in table.stdout
    assert generate_calls(tiny_engine) == before


def test_ctrl_c_keeps_what_finished_says_so_and_leaves_the_engine_idle(tiny_engine: str, tmp_path: Path) -> None:
    data, out = prompts(tmp_path / "p.jsonl", 5000), tmp_path / "out"
    command = [sys.executable, "-m", "onefill", "rollout", "--engine", tiny_engine, "--data", data, "--json"]
    command += ["--max-new-tokens", "64", "--concurrency", "64", "--out", str(out)]
    before = generate_calls(tiny_engine)
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while generate_calls(tiny_engine) < before + 12:
        assert running.poll() is None, running.stderr and running.stderr.read()
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    stdout, stderr = running.communicate(timeout=20)
    assert running.returncode == 1, stderr
    summary: dict[str, Any] = json.loads(stdout)
    assert any("interrupted" in line for line in summary["warnings"])
    assert "finished groups were kept" in stderr
    assert pq.read_table(out / "samples.parquet").num_rows == summary["samples_done"]
    assert summary["samples_done"] == 8 * summary["groups_done"] > 0
    for _ in range(100):
        with urllib.request.urlopen(f"{tiny_engine}/v1/loads", timeout=10) as page:
            if sum(rank["num_running_reqs"] for rank in json.load(page)["loads"]) == 0:
                return
        time.sleep(0.1)
    raise AssertionError("the engine still works for a client that is gone")


@pytest.fixture
def instant_engine() -> Iterator[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "mock_engine.py"), "--response-tokens", "8"]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert engine.stdout
    try:
        yield engine.stdout.readline().strip()
    finally:
        engine.kill()
        engine.wait()


def counted(url: str) -> int:
    with urllib.request.urlopen(f"{url}/counts", timeout=10) as page:
        count: int = json.load(page)["/generate"]
    return count


def test_the_first_request_of_a_100_000_row_file_leaves_within_2_seconds(instant_engine: str, tmp_path: Path) -> None:
    data = prompts(tmp_path / "p.jsonl", 100_000, tokens=40)
    took = []
    for _ in range(3):  # the best of three: the machine is shared
        before, started = counted(instant_engine), time.monotonic()
        command = [sys.executable, "-m", "onefill", "rollout", "--engine", instant_engine, "--data", data]
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while counted(instant_engine) == before:
            assert running.poll() is None
            time.sleep(0.005)
        took.append(time.monotonic() - started)
        running.kill()
        running.wait()
    assert min(took) < 2.0, took


def test_memory_does_not_grow_with_the_number_of_groups(instant_engine: str, tmp_path: Path) -> None:
    data = prompts(tmp_path / "p.jsonl", 500, tokens=200)
    peaks = []
    for epochs in (2, 20):
        code = (
            "import asyncio, resource, sys\nfrom rich.console import Console\n"
            "from onefill.cli.rollout import roll_out\nfrom onefill.cli.settings import load_settings\n"
            f"flags = dict(engine=[{instant_engine!r}], data=[{data!r}], epochs={epochs}, concurrency=64,\n"
            f"             max_new_tokens=8, out={str(tmp_path / str(epochs))!r})\n"
            "report = asyncio.run(roll_out(load_settings(flags, None), stderr=Console(quiet=True)))\n"
            f"assert report.summary['groups_done'] == 500 * {epochs}\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
    assert peaks[1] < 1.2 * peaks[0], peaks
