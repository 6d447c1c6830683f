"""The run as a whole: whole groups, bounded, ended cleanly."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from onefill.data.source import Item, OnError
from onefill.errors import ConfigError, DataError, InfraError
from onefill.rollout import Dispatcher, Engine, Outcome, PromptReader, Rollout, RolloutOptions, Tally
from onefill.rollout.sink import ParquetSink, Sink
from onefill.types import FinishReason, Group, GroupState, Prompt, SamplingParams
from tests.rollout.fakes import a_dispatcher, an_engine, client_of, items


class Kept:
    """A sink that keeps the groups."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.closed = False

    def add(self, group: Group) -> None:
        self.groups.append(group)

    async def drain(self) -> None:
        await asyncio.sleep(0)

    async def close(self) -> None:
        self.closed = True


def a_rollout(
    source: Iterator[Item],
    *engines: Engine,
    sink: Sink | None = None,
    tally: Tally | None = None,
    dispatcher: Dispatcher | None = None,
    **options: object,
) -> Rollout:
    tally = tally if tally is not None else Tally()
    settings = {"group_size": 4, "sampling": SamplingParams(max_new_tokens=8), "concurrency": 16} | options
    return Rollout(
        prompts=PromptReader(source, lambda prompt: prompt),
        dispatcher=dispatcher or a_dispatcher(*engines, tally=tally),
        options=RolloutOptions(**settings),  # type: ignore[arg-type]
        tally=tally,
        sink=sink,
    )


async def finish(rollout: Rollout) -> Outcome:
    outcome = await asyncio.wait_for(rollout.run(), 10)
    assert len(asyncio.all_tasks()) == 1, "a task outlived the run"
    return outcome


async def test_every_group_is_delivered_whole_and_once() -> None:
    sink, tally = Kept(), Tally()
    outcome = await finish(a_rollout(items(50), an_engine(), sink=sink, tally=tally))
    assert outcome.error is None
    assert sorted(int(g.id.split("-")[0]) for g in sink.groups) == list(range(50))
    assert all(g.complete and g.state is GroupState.DONE for g in sink.groups)
    assert (tally.groups_done, tally.samples_done) == (50, 200)
    assert sink.closed


async def test_it_stops_after_the_wanted_number_of_groups() -> None:
    engine = an_engine()
    await finish(a_rollout(items(1000), engine, groups=7))
    assert len(client_of(engine).requests) == 7


async def test_group_ids_are_unique_also_where_prompt_ids_are_not() -> None:
    sink = Kept()
    await finish(a_rollout((item for _ in range(3) for item in items(2)), an_engine(), sink=sink))
    assert len({g.id for g in sink.groups}) == 6


@pytest.mark.parametrize("strategy", ["native", "fanout", "split:2"])
async def test_samples_in_flight_stay_within_the_concurrency(strategy: str) -> None:
    engine, tally = an_engine(delay=0.002), Tally()
    dispatcher = a_dispatcher(engine, strategy=strategy, tally=tally)
    await finish(a_rollout(items(40), tally=tally, dispatcher=dispatcher, concurrency=12))
    assert tally.groups_done == 40
    assert client_of(engine).peak <= 12
    assert strategy == "fanout" or client_of(engine).peak >= 8


async def test_a_bad_row_ends_the_run_by_default_and_names_itself() -> None:
    tally = Tally()
    outcome = await finish(a_rollout(items(10, bad=[3]), an_engine(), tally=tally))
    assert isinstance(outcome.error, DataError)
    assert "line 4" in str(outcome.error)


async def test_a_bad_row_is_skipped_and_counted_on_request() -> None:
    tally = Tally()
    outcome = await finish(a_rollout(items(10, bad=[3, 5]), an_engine(), tally=tally, on_error=OnError.SKIP))
    assert outcome.error is None
    assert (tally.groups_done, tally.rows_skipped) == (8, 2)
    assert len(tally.errors.lines()) == 2


async def test_note_31_one_failed_group_does_not_take_the_others_with_it() -> None:
    tally, sink = Tally(), Kept()
    engine = an_engine([FinishReason.STOP, InfraError("gone"), DataError("too long")])
    await finish(a_rollout(items(10), engine, tally=tally, sink=sink, on_error=OnError.SKIP))
    assert (tally.groups_done, tally.groups_failed) == (8, 2)
    assert len(sink.groups) == 8


async def test_a_failed_group_ends_the_run_where_the_user_wants_that() -> None:
    tally = Tally()
    outcome = await finish(a_rollout(items(10), an_engine([InfraError("gone")], delay=0.01), tally=tally))
    assert isinstance(outcome.error, InfraError)
    assert tally.groups_failed == 1


async def test_stopping_keeps_what_finished_and_leaves_nothing_running() -> None:
    engine, tally, sink = an_engine(), Tally(), Kept()
    gate = asyncio.Event()
    rollout = a_rollout(items(100), engine, tally=tally, sink=sink)
    rollout._on_group = lambda _: setattr(client_of(engine), "gate", gate) if tally.groups_done == 5 else None
    running = asyncio.create_task(rollout.run())
    while tally.groups_done < 5:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    rollout.stop()
    outcome = await asyncio.wait_for(running, 5)
    assert outcome.interrupted
    assert outcome.dropped > 0
    assert len(sink.groups) == tally.groups_done >= 5
    assert client_of(engine).in_flight == 0
    assert sink.closed


async def test_cancelling_the_run_ends_its_tasks_and_closes_the_sink() -> None:
    sink = Kept()
    rollout = a_rollout(items(100), an_engine(gate=asyncio.Event()), sink=sink)
    running = asyncio.create_task(rollout.run())
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sink.closed
    assert len(asyncio.all_tasks()) == 1


async def test_a_source_that_cannot_be_read_is_an_error_and_no_silent_end() -> None:
    def broken() -> Iterator[Item]:
        yield from items(3)
        raise DataError("train.jsonl: vanished while it was read")

    tally = Tally()
    outcome = await finish(a_rollout(broken(), an_engine(), tally=tally))
    assert "vanished" in str(outcome.error)
    assert tally.groups_done == 3  # what was read before it is rolled out


async def test_an_error_that_no_row_can_cure_ends_the_run_after_what_was_read_before_it() -> None:
    def prepare(prompt: Prompt) -> Prompt:
        if prompt.id == "p4":
            raise ConfigError("no tokenizer")
        return prompt

    tally = Tally()
    rollout = Rollout(
        prompts=PromptReader(items(9), prepare),
        dispatcher=a_dispatcher(an_engine(), tally=tally),
        options=RolloutOptions(group_size=2, on_error=OnError.SKIP),
        tally=tally,
    )
    outcome = await finish(rollout)
    assert isinstance(outcome.error, ConfigError)
    assert tally.groups_done == 4


async def test_note_32_an_endless_source_of_bad_rows_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onefill.rollout.loop._MOST_SKIPS_IN_A_ROW", 50)
    endless = (item for _ in itertools.count() for item in items(1, bad=[0]))
    outcome = await finish(a_rollout(endless, an_engine(), on_error=OnError.SKIP))
    assert "50 rows in a row" in str(outcome.error)


async def test_a_wrong_engine_does_not_burn_through_the_data_also_where_failures_are_skipped() -> None:
    tally = Tally()
    engine = an_engine([InfraError("gone")] * 1000)
    outcome = await finish(a_rollout(items(1000), engine, tally=tally, on_error=OnError.SKIP))
    assert isinstance(outcome.error, InfraError)
    assert 16 <= tally.groups_failed <= 24
    assert "16 groups in a row failed" in tally.warnings.lines()[-1]
    tally = Tally()
    engine = an_engine([ConfigError("404: no such address")] * 1000)
    outcome = await finish(a_rollout(items(1000), engine, tally=tally, on_error=OnError.SKIP))
    assert isinstance(outcome.error, ConfigError)
    assert tally.groups_failed <= 8


@pytest.mark.parametrize("stop_after", range(20, 120, 7))
async def test_stopping_at_any_moment_ends_cleanly(stop_after: int) -> None:
    tally, sink = Tally(), Kept()
    rollout = a_rollout(items(100_000), an_engine(), tally=tally, sink=sink)
    rollout._on_group = lambda _: rollout.stop() if tally.groups_done == stop_after else None
    outcome = await finish(rollout)
    assert outcome.interrupted
    assert len(sink.groups) == tally.groups_done >= stop_after


async def test_stopping_waits_a_moment_for_the_reward_of_a_group_that_finished() -> None:
    class Soon:
        async def reward(self, group: Group) -> None:
            await asyncio.sleep(0.05)
            for sample in group.samples:
                sample.reward = 1.0

    tally, sink = Tally(), Kept()
    rollout = Rollout(
        prompts=PromptReader(items(1), lambda prompt: prompt),
        dispatcher=a_dispatcher(an_engine(), tally=tally),
        options=RolloutOptions(group_size=2),
        tally=tally,
        rewards=Soon(),
        sink=sink,
    )
    running = asyncio.create_task(rollout.run())
    await asyncio.sleep(0.02)
    rollout.stop()
    outcome = await asyncio.wait_for(running, 5)
    assert (outcome.dropped, tally.groups_done, tally.reward.mean) == (0, 1, 1.0)


async def test_tokenisation_that_refuses_a_prompt_is_that_rows_error() -> None:
    def prepare(prompt: Prompt) -> Prompt:
        if prompt.id == "p2":
            raise DataError("row 3: prompt cannot be tokenised")
        return prompt

    tally = Tally()
    rollout = Rollout(
        prompts=PromptReader(items(5), prepare),
        dispatcher=a_dispatcher(an_engine(), tally=tally),
        options=RolloutOptions(group_size=2, on_error=OnError.SKIP),
        tally=tally,
    )
    await finish(rollout)
    assert (tally.groups_done, tally.rows_skipped) == (4, 1)


async def test_note_34_a_slow_reward_holds_admission_back_instead_of_filling_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow:
        async def reward(self, group: Group) -> None:
            await asyncio.sleep(3600)

    engine = an_engine()
    tally = Tally()
    rollout = Rollout(
        prompts=PromptReader(items(10_000), lambda prompt: prompt),
        dispatcher=a_dispatcher(engine, tally=tally),
        options=RolloutOptions(group_size=4, concurrency=16),
        tally=tally,
        rewards=Slow(),
    )
    running = asyncio.create_task(rollout.run())
    await asyncio.sleep(0.3)
    assert len(client_of(engine).requests) <= 8
    monkeypatch.setattr("onefill.rollout.loop._FINISHING_S", 0.1)
    rollout.stop()
    outcome = await asyncio.wait_for(running, 5)
    assert outcome.dropped == 8


async def test_the_parquet_file_holds_every_sample_in_its_columns(tmp_path: Path) -> None:
    tally = Tally()
    sink = ParquetSink(tmp_path / "new" / "run")
    await finish(a_rollout(items(600), an_engine(), sink=sink, tally=tally))
    table = pq.read_table(sink.path)
    assert table.num_rows == 2400
    rows = table.to_pylist()
    assert {r["sample_index"] for r in rows} == {0, 1, 2, 3}
    assert len({r["group_id"] for r in rows}) == 600
    first = rows[0]
    assert first["prompt_tokens"] == list(range(1, 101))
    assert len(first["response_tokens"]) == len(first["logprobs"]) == len(first["loss_mask"]) == 4
    assert (first["finish_reason"], first["status"], first["strategy"]) == ("stop", "completed", "native")
    assert (first["label"], first["weight_version"], first["engine"]) == ("42", "v1", "http://one")
    assert first["metadata"] == '{"row":"p0"}'
    assert first["reward"] is None
    assert not (tmp_path / "new" / "run" / "samples.parquet.part").exists()


async def test_an_interrupted_run_leaves_a_readable_file_with_what_was_counted(tmp_path: Path) -> None:
    tally, sink = Tally(), ParquetSink(tmp_path)
    rollout = a_rollout(items(100_000), an_engine(), sink=sink, tally=tally)
    running = asyncio.create_task(rollout.run())
    while tally.groups_done < 700:
        await asyncio.sleep(0.001)
    rollout.stop()
    await asyncio.wait_for(running, 10)
    assert pq.read_table(sink.path).num_rows == tally.samples_done


async def test_a_directory_that_cannot_be_written_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="--out"):
        ParquetSink(tmp_path / "file")


async def test_a_disk_that_refuses_ends_the_run_and_leaves_no_file_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, tally = ParquetSink(tmp_path), Tally()
    good, calls = sink._writer.write_table, 0

    def full(table: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(28, "No space left on device")
        good(table)

    monkeypatch.setattr(sink._writer, "write_table", full)
    outcome = await finish(a_rollout(items(2000), an_engine(), sink=sink, tally=tally))
    assert isinstance(outcome.error, InfraError)
    assert "No space left" in str(outcome.error)
    assert not sink.path.exists()
    assert (tmp_path / "samples.parquet.part").exists()


async def test_an_earlier_runs_file_stays_until_this_one_is_whole_and_its_summary_goes(tmp_path: Path) -> None:
    await finish(a_rollout(items(3), an_engine(), sink=ParquetSink(tmp_path)))
    (tmp_path / "summary.json").write_text("{}")
    sink = ParquetSink(tmp_path)
    assert pq.read_table(sink.path).num_rows == 12
    assert (tmp_path / "summary.json").exists()
    await finish(a_rollout(items(2), an_engine(), sink=sink))
    assert pq.read_table(sink.path).num_rows == 8
    assert not (tmp_path / "summary.json").exists()  # it was the earlier run's


async def test_a_run_that_delivers_nothing_leaves_an_earlier_runs_file_alone(tmp_path: Path) -> None:
    await finish(a_rollout(items(3), an_engine(), sink=ParquetSink(tmp_path)))
    sink = ParquetSink(tmp_path)
    await finish(a_rollout(items(3, bad=[0]), an_engine(), sink=sink))
    assert pq.read_table(tmp_path / "samples.parquet").num_rows == 12
    assert not sink.path.with_suffix(".parquet.part").exists()


async def test_a_row_that_utf_8_or_64_bits_cannot_hold_costs_no_other_row(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path)

    def odd() -> Iterator[Item]:
        for i, item in enumerate(items(4)):
            assert item.prompt
            label = ["fine", "half \ud800 pair", 2**80, {"deep": "\udfff"}][i]
            changes = {"label": label, "metadata": {"n": 2**70, "s": "\ud800"}, "id": f"p\ud800{i}"}
            yield replace(item, prompt=replace(item.prompt, **changes))

    await finish(a_rollout(odd(), an_engine(), sink=sink))
    labels = {row["label"] for row in pq.read_table(sink.path).to_pylist()}
    assert labels == {"fine", "half ? pair", str(2**80), '{"deep": "\\udfff"}'}
