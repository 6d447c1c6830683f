"""From the settings to groups on disk, against the embedded engine and against a scripted one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from onefill.cli.rollout import Report, roll_out
from onefill.cli.settings import load_settings
from onefill.engine import RetryPolicy
from onefill.errors import ConfigError, DataError, InfraError
from tests.conftest import generate_calls
from tests.engine.scripted import Behaviour, ScriptedEngine, edited, hang, raw, reply, reset, says, status

INFO = {
    "GET /server_info": says({"version": "0.5.23", "context_length": 2048}),
    "GET /model_info": says({"model_path": "scripted", "vocab_size": 1000}),
}


def rolled(tmp_path: Path, **flags: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    report = asyncio.run(report_of(tmp_path, **flags))
    assert report.exit_code == 0, report.summary
    return report.summary, rows_in(tmp_path)


async def report_of(tmp_path: Path, **flags: Any) -> Report:
    settings = load_settings({"out": tmp_path, **flags}, None)
    return await asyncio.wait_for(roll_out(settings, stderr=Console(stderr=True, quiet=True)), 100)


def rows_in(tmp_path: Path) -> list[dict[str, Any]]:
    if not (tmp_path / "samples.parquet").exists():  # no group was delivered
        return []
    rows: list[dict[str, Any]] = pq.read_table(tmp_path / "samples.parquet").to_pylist()
    return sorted(rows, key=lambda row: (int(row["group_id"].split("-")[0]), row["sample_index"]))


def prompts(path: Path, count: int, tokens: int = 80) -> str:
    lines = ({"id": f"row{i}", "input_ids": [(i * 7 + t) % 250 + 1 for t in range(tokens)]} for i in range(count))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_greedy_native_split_and_fanout_are_token_identical(tiny_engine: str, tmp_path: Path) -> None:
    data = prompts(tmp_path / "p.jsonl", 12)
    runs = {}
    for strategy in ("native", "split:4", "fanout"):
        out = tmp_path / strategy.replace(":", "")
        flags = {"engine": [tiny_engine], "data": [data], "strategy": strategy}
        summary, rows = rolled(out, temperature=0.0, max_new_tokens=24, **flags)
        assert summary["groups_by_strategy"][strategy.split(":")[0]] == 12
        runs[strategy] = [(row["prompt_id"], row["sample_index"], row["response_tokens"]) for row in rows]
    assert runs["native"] == runs["split:4"] == runs["fanout"]
    assert len({tuple(tokens) for _, _, tokens in runs["native"]}) == 12  # one answer a prompt, and they differ


@pytest.mark.parametrize(("strategy", "requests"), [("native", 64), ("fanout", 512)])
def test_64_groups_of_8_are_64_requests_natively_and_512_in_fanout(
    tiny_engine: str, tmp_path: Path, strategy: str, requests: int
) -> None:
    before = generate_calls(tiny_engine)
    data = prompts(tmp_path / "p.jsonl", 64)
    summary, rows = rolled(
        tmp_path / "out", engine=[tiny_engine], data=[data], strategy=strategy, max_new_tokens=4, group_size=8
    )
    assert generate_calls(tiny_engine) - before == requests == summary["requests_sent"]
    assert (summary["groups_done"], summary["samples_done"], len(rows)) == (64, 512, 512)
    assert 0 < summary["saved_tokens"] <= 7 * 64 * 80
    assert summary["prompt_tokens"] == 512 * 80
    assert sum(summary["finish_reasons"].values()) == 512


def test_sampled_responses_of_a_native_group_are_distinct(tiny_engine: str, tmp_path: Path) -> None:
    data = prompts(tmp_path / "p.jsonl", 8)
    summary, rows = rolled(tmp_path / "out", engine=[tiny_engine], data=[data], strategy="native", max_new_tokens=16)
    firsts = []
    for group in {row["group_id"] for row in rows}:
        responses = [tuple(row["response_tokens"]) for row in rows if row["group_id"] == group]
        assert len(set(responses)) == 8
        firsts.append(len({tokens[0] for tokens in responses}))
    assert max(firsts) > 1  # also the first token is drawn for each; of some prompts all eight like the same best
    assert summary["duplicate_samples"] == 0
    assert summary["warnings"] == []


def test_a_task_brings_its_reward(tiny_engine: str, tmp_path: Path) -> None:
    summary, rows = rolled(tmp_path, engine=[tiny_engine], groups=3, group_size=4, max_new_tokens=8)
    assert summary["reward_mean"] is not None
    assert all(row["reward"] is not None and row["label"] is not None for row in rows)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_a_group_reward_sees_the_group_in_sample_order(tiny_engine: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def by_place(inputs):\n    return [float(x.index) for x in inputs]\n")
    data = prompts(tmp_path / "p.jsonl", 3)
    flags = {"engine": [tiny_engine], "data": [data], "group_reward": f"{tmp_path / 'mine.py'}:by_place"}
    _, rows = rolled(tmp_path / "out", max_new_tokens=4, **flags)
    assert [row["reward"] for row in rows] == [float(row["sample_index"]) for row in rows]


def test_text_prompts_take_the_engines_tokenizer_and_raw_is_raw(tiny_engine: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "What is 2 + 3?", "label": "5"}\n')
    flags = {"engine": [tiny_engine], "data": [str(tmp_path / "p.jsonl")], "max_new_tokens": 4, "group_size": 2}
    _, chat = rolled(tmp_path / "chat", **flags)
    _, raw_rows = rolled(tmp_path / "raw", apply_chat_template=False, **flags)
    assert len(chat[0]["prompt_tokens"]) > len(raw_rows[0]["prompt_tokens"])


async def scripted(
    tmp_path: Path, script: list[Behaviour], *, groups: int = 1, n: int = 4, **flags: Any
) -> tuple[Report | Exception, list[dict[str, Any]], ScriptedEngine]:
    data = prompts(tmp_path / "p.jsonl", groups, tokens=20)
    async with ScriptedEngine(script, routes=INFO) as engine:
        settings = {"engine": [engine.url], "data": [data], "group_size": n, "strategy": "native", **flags}
        report = await report_of(tmp_path, max_new_tokens=8, **settings)
    return report, rows_in(tmp_path), engine


def without(field: str) -> Callable[[Any], Any]:
    def change(answer: Any) -> Any:
        for it in answer if isinstance(answer, list) else [answer]:
            it["meta_info"].pop(field)
        return answer

    return change


def shorter(answer: Any) -> Any:
    items = answer if isinstance(answer, list) else [answer]
    items[-1]["meta_info"]["output_token_logprobs"].pop()
    return answer


BROKEN: dict[str, Behaviour] = {
    "wrong type": edited(lambda answer: answer[0] if isinstance(answer, list) else [answer, answer]),
    "too few": edited(lambda answer: answer[:-1] if isinstance(answer, list) else []),
    "too many": edited(lambda answer: [*answer, answer[0]] if isinstance(answer, list) else [answer, answer]),
    "an item without logprobs": edited(without("output_token_logprobs")),
    "lengths that disagree": edited(shorter),
    "finish reason missing": edited(without("finish_reason")),
    "html": raw(b"<html><body>502 Bad Gateway</body></html>", content_type="text/html"),
    "truncated json": raw(b'[{"text": "a", "output_ids": [1, 2', content_type="application/json"),
}


@pytest.mark.parametrize("fault", BROKEN)
async def test_a_broken_native_reply_is_dropped_whole_and_the_group_sent_singly(tmp_path: Path, fault: str) -> None:
    report, rows, engine = await scripted(tmp_path, [BROKEN[fault], reply()])
    assert isinstance(report, Report)
    assert report.exit_code == 0
    assert len(rows) == 4
    assert len(engine.requests) == 5
    assert all(row["strategy"] == "fanout" and row["response_tokens"] for row in rows)
    assert report.summary["ineligible"] == {"native-reply-broken": 1}
    assert any("broke the contract" in line for line in report.summary["warnings"])


@pytest.mark.parametrize("fault", BROKEN)
async def test_when_singles_are_broken_too_the_group_fails_and_nothing_of_it_is_written(
    tmp_path: Path, fault: str
) -> None:
    report, rows, _ = await scripted(tmp_path, [BROKEN[fault]], on_error="skip", groups=2)
    assert isinstance(report, Report)
    assert report.exit_code == 1
    assert rows == []
    assert report.summary["groups_failed"] == 2
    assert report.summary["errors"]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of milliseconds, so that faults that last can be shown."""
    monkeypatch.setattr("onefill.engine.client.RetryPolicy", lambda: RetryPolicy(base=0.001, cap=0.002))


@pytest.mark.usefixtures("impatient")
async def test_502_twice_then_good_is_a_good_run_with_its_retries_counted(tmp_path: Path) -> None:
    report, rows, _ = await scripted(tmp_path, [status(502), status(502), reply()])
    assert isinstance(report, Report)
    assert report.exit_code == 0
    assert len(rows) == 4
    assert (report.summary["requests_sent"], report.summary["requests_retried"]) == (3, 2)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("fault", "says_so", "retried"),
    [(status(503), "503", 6), (reset(), "reset", 6), (status(500), "500", 2)],
    ids=["503", "reset", "500"],
)
async def test_a_fault_that_lasts_fails_the_group_whole(
    tmp_path: Path, fault: Behaviour, says_so: str, retried: int
) -> None:
    report, rows, _ = await scripted(tmp_path, [fault])
    assert isinstance(report, Report)
    assert report.exit_code == 1
    assert rows == []
    assert says_so in report.summary["errors"][0]
    assert report.summary["requests_retried"] == retried


async def test_a_400_fails_at_once_with_the_servers_words(tmp_path: Path) -> None:
    report, rows, engine = await scripted(tmp_path, [status(400, message="no such thing")])
    assert isinstance(report, Report)
    assert report.exit_code == 2
    assert rows == []
    assert len(engine.requests) == 1
    assert "no such thing" in report.summary["errors"][0]


async def test_a_hang_past_the_deadline_fails_the_group_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onefill.engine.client.RetryPolicy", lambda: RetryPolicy(retries=1, base=0.001))
    report, rows, _ = await scripted(tmp_path, [hang()], on_error="skip", request_timeout=0.25)
    assert isinstance(report, Report)
    assert report.summary["groups_failed"] == 1
    assert rows == []
    assert "0.25 s" in report.summary["errors"][0]


async def test_a_bad_row_ends_with_bad_input_or_is_skipped(tiny_engine: str, tmp_path: Path) -> None:
    data = tmp_path / "p.jsonl"
    data.write_text('{"input_ids": [1, 2, 3]}\n{"input_ids": []}\n{"input_ids": [4, 5]}\n')
    flags = {"engine": [tiny_engine], "data": [str(data)], "group_size": 2, "max_new_tokens": 4}
    report = await report_of(tmp_path / "a", **flags)
    assert report.exit_code == 2
    assert any("p.jsonl" in line and "line 2" in line for line in report.summary["errors"])
    report = await report_of(tmp_path / "b", on_error="skip", **flags)
    assert (report.exit_code, report.summary["groups_done"], report.summary["rows_skipped"]) == (0, 2, 1)


async def test_rule_3_an_id_past_the_vocabulary_never_leaves(tiny_engine: str, tmp_path: Path) -> None:
    data = tmp_path / "p.jsonl"
    data.write_text('{"input_ids": [1, 99999]}\n')
    before = generate_calls(tiny_engine)
    report = await report_of(tmp_path, engine=[tiny_engine], data=[str(data)], group_size=2)
    assert report.exit_code == 2
    assert "99999" in report.summary["errors"][0]
    assert generate_calls(tiny_engine) == before


async def test_a_run_that_cannot_start_leaves_an_earlier_ones_output_alone(tiny_engine: str, tmp_path: Path) -> None:
    data = prompts(tmp_path / "p.jsonl", 1)
    flags = {"data": [data], "group_size": 2, "max_new_tokens": 4}
    await report_of(tmp_path / "out", engine=[tiny_engine], **flags)
    with pytest.raises(InfraError):
        await report_of(tmp_path / "out", engine=["http://127.0.0.1:9"], **flags)
    assert len(rows_in(tmp_path / "out")) == 2
    assert (tmp_path / "out" / "summary.json").exists()


async def test_options_that_do_nothing_are_told(tiny_engine: str, tmp_path: Path) -> None:
    flags = {"engine": [tiny_engine], "group_size": 2, "max_new_tokens": 4, "groups": 1}
    report = await report_of(tmp_path, shuffle=True, label_key="x", threads=2, **flags)
    told = [line.split()[0] for line in report.summary["warnings"]]
    assert told == ["--shuffle", "--label-key", "--threads"]


async def test_a_wrong_address_ends_the_run_with_2_also_where_failures_are_skipped(tmp_path: Path) -> None:
    report, rows, engine = await scripted(tmp_path, [status(404)], groups=50, on_error="skip", concurrency=8)
    assert isinstance(report, Report)
    assert report.exit_code == 2
    assert rows == []
    assert len(engine.requests) < 10


async def test_a_run_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(InfraError, match="no engine answers at http"):
        await report_of(tmp_path, engine=["http://127.0.0.1:9"])
    async with ScriptedEngine([reply()]) as engine:
        with pytest.raises(ConfigError, match="is no engine"):
            await report_of(tmp_path, engine=[f"{engine.url}/foo"])
    with pytest.raises(DataError, match=r"absent\.jsonl"):
        await report_of(tmp_path, data=[str(tmp_path / "absent.jsonl")])
    with pytest.raises(ConfigError, match="exact"):
        await report_of(tmp_path, reward="exakt")
    with pytest.raises(ConfigError, match="chain_sum"):
        await report_of(tmp_path, task="chain_sums")


async def test_note_06_an_engine_that_gives_copies_is_noticed(tmp_path: Path) -> None:
    def copies(answer: Any) -> Any:
        for it in answer:
            ids = list(range(9))
            it["output_ids"] = ids
            meta = it["meta_info"]
            meta["output_token_logprobs"] = [[-0.5, token, None] for token in ids]
            meta |= {"completion_tokens": 9, "output_token_logprobs_length": 9}
            meta["weight_versions"] = [{"version": "default", "start": 0, "end": 9}]
        return answer

    data = prompts(tmp_path / "p.jsonl", 2, tokens=20)
    async with ScriptedEngine([edited(copies)], routes=INFO) as engine:
        report = await report_of(tmp_path, engine=[engine.url], data=[data], max_new_tokens=16)
    assert report.summary["duplicate_samples"] == 14
    assert any("not sampling" in line for line in report.summary["warnings"])
