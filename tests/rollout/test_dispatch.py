"""What becomes of a group when engines answer, err, abort and die."""

from __future__ import annotations

import asyncio

import pytest

from onefill.errors import DataError, InfraError, OnefillError, ProtocolError
from onefill.plan import Capabilities, Request, Support
from onefill.rollout import Dispatcher, Tally
from onefill.rollout.budget import SampleBudget
from onefill.types import Completion, FinishReason, Group, Sample, Status
from tests.rollout.fakes import a_dispatcher, a_group, an_engine, client_of

STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


async def complete(dispatcher: Dispatcher, group: Group, budget: int = 64) -> SampleBudget:
    samples = SampleBudget(budget)
    permit = await samples.take(len(group.samples))
    try:
        await asyncio.wait_for(dispatcher.complete(group, permit), 5)
    finally:
        permit.release()
    assert samples.held == 0
    return samples


def untouched(sample: Sample) -> bool:
    return sample.untouched


@pytest.mark.parametrize(("strategy", "requests"), [("native", 1), ("auto", 1), ("split:2", 2), ("fanout", 4)])
async def test_every_strategy_fills_the_group_with_its_number_of_requests(strategy: str, requests: int) -> None:
    engine, tally, group = an_engine(), Tally(), a_group(4)
    await complete(a_dispatcher(engine, strategy=strategy, tally=tally), group)
    assert group.complete
    assert len(client_of(engine).requests) == requests
    assert tally.forms[group.strategy] == 1
    assert engine.in_flight == 0


async def test_output_i_belongs_to_sample_i() -> None:
    engine, group = an_engine([[STOP, LENGTH, STOP, LENGTH]]), a_group(4)
    await complete(a_dispatcher(engine), group)
    assert [s.status for s in group.samples] == [Status.COMPLETED, Status.TRUNCATED] * 2
    assert [int(s.tokens[0]) for s in group.samples] == [1000, 1004, 1008, 1012]


async def test_note_20_the_rest_of_a_fanout_waits_for_the_leads_first_token() -> None:
    engine = an_engine(delay=0.05)
    group = a_group(4)
    running = asyncio.create_task(complete(a_dispatcher(engine, strategy="fanout"), group))
    await asyncio.sleep(0.02)
    assert [r.samples for r in client_of(engine).requests] == [(0,)]
    await running
    assert len(client_of(engine).requests) == 4


async def test_the_rest_does_not_wait_for_the_leads_last_token() -> None:
    gate = asyncio.Event()
    engine, group = an_engine(gate=gate), a_group(4)
    running = asyncio.create_task(complete(a_dispatcher(engine, strategy="fanout"), group))
    await asyncio.sleep(0.02)
    assert len(client_of(engine).requests) == 4  # the lead still runs
    gate.set()
    await running


async def test_a_broken_native_reply_half_fills_nothing_and_falls_back_to_singles() -> None:
    engine, tally, group = an_engine([ProtocolError("7 items for n = 8")]), Tally(), a_group(4)
    await complete(a_dispatcher(engine, tally=tally), group)
    assert group.complete
    assert [r.n for r in client_of(engine).requests] == [4, 1, 1, 1, 1]
    assert group.strategy == "fanout"
    assert (tally.forms["native"], tally.forms["fanout"]) == (0, 1)
    assert tally.ineligible == {"native-reply-broken": 1}
    assert "7 items" in tally.warnings.lines()[0]


async def test_after_three_broken_native_replies_the_engine_gets_singles_only() -> None:
    engine, tally = an_engine([ProtocolError("broken")]), Tally()
    dispatcher = a_dispatcher(engine, tally=tally)
    for _ in range(4):
        client_of(engine).script[:] = [ProtocolError("broken")] if engine.broken_replies < 3 else []
        await complete(dispatcher, a_group(2))
    assert engine.capabilities.parallel_sampling is Support.NO
    assert tally.ineligible == {"native-reply-broken": 3, "parallel-sampling-broken": 1}


async def test_a_broken_single_reply_fails_the_group() -> None:
    engine, group = an_engine([ProtocolError("no logprobs")]), a_group(2, prompt_tokens=8)
    with pytest.raises(ProtocolError):
        await complete(a_dispatcher(engine, strategy="fanout"), group)
    assert untouched(group.samples[0])


async def test_a_broken_lead_holds_the_rest_back() -> None:
    engine, group = an_engine([ProtocolError("no logprobs")]), a_group(4)
    with pytest.raises(ProtocolError):
        await complete(a_dispatcher(engine, strategy="fanout"), group)
    assert len(client_of(engine).requests) == 1
    assert all(untouched(s) for s in group.samples)


async def test_note_18_a_dead_engines_group_goes_to_another() -> None:
    dead, alive = an_engine([InfraError("connection refused")], "http://dead"), an_engine(url="http://alive")
    alive.in_flight = 1  # so that the dead one is chosen first
    tally, group = Tally(), a_group(4)
    await complete(a_dispatcher(dead, alive, tally=tally), group)
    assert {s.engine for s in group.samples} == {"http://alive"}
    assert group.strategy == "native"
    assert "http://dead failed" in tally.warnings.lines()[0]


async def test_samples_that_finished_before_an_engine_died_stay_as_they_are() -> None:
    dead = an_engine([STOP, STOP, InfraError("gone"), STOP], "http://dead")
    alive = an_engine(url="http://alive")
    alive.in_flight = 1
    group = a_group(4)
    await complete(a_dispatcher(dead, alive, strategy="fanout"), group)
    assert [s.engine for s in group.samples] == ["http://dead"] * 2 + ["http://alive"] + ["http://dead"]
    assert len(client_of(alive).requests) == 1


async def test_when_every_engine_failed_the_group_fails_and_is_untouched() -> None:
    engines = [an_engine([InfraError("gone")], f"http://{i}") for i in range(2)]
    group = a_group(4)
    with pytest.raises(InfraError, match="gone"):
        await complete(a_dispatcher(*engines), group)
    assert all(untouched(s) for s in group.samples)


@pytest.mark.parametrize("error", [DataError("prompt too long"), OnefillError("other")])
async def test_note_21_what_no_retry_can_cure_fails_at_once(error: OnefillError) -> None:
    engines = [an_engine([error], f"http://{i}") for i in range(2)]
    with pytest.raises(type(error)):
        await complete(a_dispatcher(*engines), a_group(4))
    assert sum(len(client_of(e).requests) for e in engines) == 1


async def test_an_aborted_sample_goes_on_from_its_tokens_and_keeps_them() -> None:
    engine, group = an_engine([[STOP, ABORT]]), a_group(2, max_new_tokens=8)
    await complete(a_dispatcher(engine), group)
    resumed = client_of(engine).requests[1]
    assert resumed.samples == (1,)
    assert resumed.tokens.size == 102
    assert resumed.sampling.max_new_tokens == 6
    sample = group.samples[1]
    assert sample.status is Status.COMPLETED
    assert sample.tokens.size == sample.logprobs.size == 2 + 4
    assert sample.tokens[:2].tolist() == resumed.tokens[-2:].tolist()
    assert sample.prompt_tokens == 100


async def test_a_group_aborted_before_any_output_goes_natively_again() -> None:
    engine, group = an_engine([[ABORT] * 4], aborted_tokens=0), a_group(4)
    await complete(a_dispatcher(engine), group)
    assert [r.n for r in client_of(engine).requests] == [4, 4]


async def test_an_aborted_sample_with_its_budget_spent_is_truncated() -> None:
    engine, group = an_engine([[STOP, ABORT]], aborted_tokens=4), a_group(2, max_new_tokens=4)
    await complete(a_dispatcher(engine), group)
    assert group.samples[1].status is Status.TRUNCATED
    assert len(client_of(engine).requests) == 1


async def test_note_35_a_group_is_not_aborted_and_resumed_for_ever() -> None:
    engine = an_engine([ABORT] * 50, aborted_tokens=0)
    with pytest.raises(InfraError, match="5 times in a row without a new token"):
        await complete(a_dispatcher(engine), a_group(2, max_new_tokens=100))
    assert len(client_of(engine).requests) == 6


async def test_an_abort_is_no_failure_while_tokens_come_and_each_is_followed_by_a_longer_wait() -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    engine = an_engine([ABORT] * 12, aborted_tokens=1)
    dispatcher = a_dispatcher(engine, strategy="fanout")
    dispatcher._sleep = sleep
    group = a_group(2, prompt_tokens=8, max_new_tokens=50)
    await complete(dispatcher, group)
    assert group.complete
    assert len(waits) == 6
    assert all(0.25 <= wait <= 0.5 for wait in waits)  # progress each time: never more than the first wait
    engine = an_engine([ABORT] * 4, aborted_tokens=0)
    dispatcher = a_dispatcher(engine)
    dispatcher._sleep = sleep
    waits.clear()
    await complete(dispatcher, a_group(2))
    assert len(waits) == 4
    assert waits[3] > waits[0]


async def test_note_31_a_cancelled_group_cancels_its_requests_and_gives_its_permit_back() -> None:
    gate = asyncio.Event()
    engine, group, budget = an_engine(gate=gate), a_group(4), SampleBudget(8)
    permit = await budget.take(4)
    running = asyncio.create_task(a_dispatcher(engine, strategy="fanout").complete(group, permit))
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    permit.release()
    assert client_of(engine).cancelled == 4
    assert (engine.in_flight, client_of(engine).in_flight, budget.held) == (0, 0, 0)
    assert all(untouched(s) for s in group.samples)


async def test_a_fault_of_ours_in_one_request_ends_its_siblings() -> None:
    engine = an_engine(gate=asyncio.Event())
    client, plain = client_of(engine), client_of(engine).generate

    async def faulty(request: Request, *, on_first_token: object = None) -> list[Completion]:
        if request.samples == (2,):
            await asyncio.sleep(0.01)
            raise ZeroDivisionError
        return await plain(request)

    client.generate = faulty  # type: ignore[method-assign, assignment]
    with pytest.raises(ZeroDivisionError):
        await complete(a_dispatcher(engine, strategy="fanout"), a_group(4, prompt_tokens=8))
    assert (client.in_flight, client.cancelled) == (0, 3)


async def test_a_group_is_booked_as_what_it_was_in_the_end() -> None:
    dead, alive = (
        an_engine([InfraError("gone")] * 2, "http://dead"),
        an_engine([ProtocolError("bad")], "http://alive"),
    )
    dead.capabilities, alive.in_flight = Capabilities(deterministic=True), 1
    tally = Tally()
    await complete(a_dispatcher(dead, alive, tally=tally), a_group(2, prompt_tokens=8))
    assert +tally.forms == {"fanout": 1}
    assert tally.ineligible == {"native-reply-broken": 1}
    assert all(count >= 0 for count in tally.forms.values())


async def test_note_18_an_engine_that_failed_lately_is_not_chosen_first_again() -> None:
    dead, alive = an_engine([InfraError("gone")] * 9, "http://dead"), an_engine(url="http://alive")
    dispatcher, now = a_dispatcher(dead, alive), [0.0]
    dispatcher._clock = lambda: now[0]
    for _ in range(5):
        await complete(dispatcher, a_group(2))
    assert len(client_of(dead).requests) == 1
    now[0] = 31.0
    await complete(dispatcher, a_group(2))
    assert len(client_of(dead).requests) == 2


async def test_an_engine_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="only once"):
        a_dispatcher(an_engine(), an_engine())


async def test_a_fanout_group_larger_than_the_budget_stays_within_it() -> None:
    engine, group = an_engine(delay=0.005), a_group(8, prompt_tokens=8)
    await complete(a_dispatcher(engine, strategy="fanout"), group, budget=3)
    assert group.complete
    assert client_of(engine).peak == 3


async def test_groups_go_to_the_engine_with_the_fewest_samples_in_flight() -> None:
    gate = asyncio.Event()
    engines = [an_engine(url=f"http://{i}", gate=gate) for i in range(3)]
    dispatcher = a_dispatcher(*engines)
    running = []
    for n in (8, 4, 2, 1, 1):
        running.append(asyncio.create_task(complete(dispatcher, a_group(n))))
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    assert [e.in_flight for e in engines] == [8, 4, 4]
    gate.set()
    await asyncio.gather(*running)
    assert [e.in_flight for e in engines] == [0, 0, 0]


async def test_rule_9_native_that_was_not_to_be_had_is_told_once() -> None:
    engine = an_engine()
    engine.capabilities = Capabilities(deterministic=True)
    tally = Tally()
    tally.asked = type(tally.asked)("native")
    dispatcher = a_dispatcher(engine, tally=tally)
    for _ in range(3):
        await complete(dispatcher, a_group(2))
    assert tally.ineligible == {"deterministic-mode": 3}
    (line,) = tally.warnings.lines()
    assert "deterministic-mode" in line
    assert "copies" in line
