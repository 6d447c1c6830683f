"""Wrong replies over real HTTP: each gives the documented error, none gives samples."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from onefill.engine import Limits, Placeholders
from onefill.errors import DataError, InfraError, ProtocolError
from onefill.types import FinishReason
from tests.engine.scripted import ScriptedEngine, correct, edited, raw, reply
from tests.engine.support import client_of, make_request


def meta(answer: Any, index: int = 0) -> dict[str, Any]:
    return (answer[index] if isinstance(answer, list) else answer)["meta_info"]


async def outcome(behaviour: Any, n: int = 4, **options: Any) -> Any:
    async with ScriptedEngine([behaviour]) as engine, client_of(engine.url, **options) as (client, _):
        return await client.generate(make_request(n))


async def refused(behaviour: Any, field: str, n: int = 4, **options: Any) -> ProtocolError:
    async with ScriptedEngine([behaviour]) as engine, client_of(engine.url, **options) as (client, _):
        with pytest.raises(ProtocolError) as caught:
            await client.generate(make_request(n))
        error = caught.value
        assert error.field == field
        assert error.engine == engine.url
        assert error.request_id == "r-1"
        assert client.stats.requests_sent == 1, "a broken contract is not retried here"
        return error


@pytest.mark.parametrize("n", [1, 2, 8])
async def test_a_correct_reply_gives_n_completions_in_order(n: int) -> None:
    done = await outcome(reply(), n)
    assert [c.tokens.tolist() for c in done] == [[10 * i + k for k in range(4)] for i in range(n)]
    assert [c.text for c in done] == [f"sample {i}" for i in range(n)]
    assert all(c.finish_reason is FinishReason.STOP and c.prompt_tokens == 5 for c in done)
    assert all(c.cached_tokens == 4 and c.versions[0].end == 4 for c in done)
    assert done[0].logprobs.tolist() == pytest.approx([-0.5, -0.51, -0.52, -0.53])
    assert not done[0].tokens.flags.writeable
    assert done[0].timing.done >= done[0].timing.sent > 0


async def test_a_response_that_used_its_whole_budget_is_truncated() -> None:
    async with ScriptedEngine([reply()]) as engine, client_of(engine.url) as (client, _):
        (done,) = await client.generate(make_request(max_new_tokens=4))
    assert (done.finish_reason, done.tokens.size) == (FinishReason.LENGTH, 4)


@pytest.mark.parametrize("n", [1, 4])
async def test_a_budget_that_the_engine_cut_in_silence_is_noticed(n: int) -> None:
    cut = edited(lambda a: meta(a, n - 1).update(finish_reason={"type": "length", "length": 4}))
    async with ScriptedEngine([cut]) as engine, client_of(engine.url) as (client, _):
        with pytest.raises(DataError, match="r-1 of group g: the engine cut max_new_tokens from 8 to 4 after 5"):
            await client.generate(make_request(n))
        assert client.stats.requests_sent == 1
        assert client.stats.failures_by_cause == {"budget_cut": 1}


async def test_note_5_an_object_for_many_samples_is_the_wrong_type() -> None:
    await refused(edited(lambda a: a[0]), "reply")


async def test_a_list_of_one_is_taken_for_one_sample() -> None:
    assert len(await outcome(edited(lambda a: [a]), n=1)) == 1


@pytest.mark.parametrize("wrong", ["text", 7, None, True, 1.5])
async def test_a_reply_of_no_list_and_no_object_is_refused(wrong: Any) -> None:
    await refused(raw(json.dumps(wrong).encode()), "reply")


async def test_note_12_too_few_and_too_many_items_are_refused() -> None:
    await refused(edited(lambda a: a[:3]), "reply")
    await refused(edited(lambda a: [*a, a[0]]), "reply")
    await refused(edited(lambda _: []), "reply")
    await refused(edited(lambda a: [a, a]), "reply", n=1)


async def test_note_41_missing_logprobs_are_never_padded() -> None:
    field = "[2].meta_info.output_token_logprobs"
    await refused(edited(lambda a: meta(a, 2).pop("output_token_logprobs") and None), field)
    await refused(edited(lambda a: meta(a, 2).update(output_token_logprobs=None)), field)
    await refused(edited(lambda a: meta(a, 2)["output_token_logprobs"].pop() and None), field)
    await refused(edited(lambda a: meta(a, 2)["output_token_logprobs"].__setitem__(0, [None, 20, None])), field)


async def test_note_43_a_null_first_logprob_is_not_dropped() -> None:
    def shift(answer: Any) -> None:
        triples = meta(answer)["output_token_logprobs"]
        meta(answer)["output_token_logprobs"] = [[None, 0, None], *triples]

    await refused(edited(shift), "[0].meta_info.output_token_logprobs")


async def test_note_44_logprobs_of_other_ids_are_refused() -> None:
    field = "[1].meta_info.output_token_logprobs"
    await refused(edited(lambda a: meta(a, 1)["output_token_logprobs"].reverse()), field)


async def test_lengths_that_disagree_are_refused() -> None:
    await refused(edited(lambda a: a[3]["output_ids"].pop() and None), "[3].meta_info.completion_tokens")
    await refused(edited(lambda a: meta(a, 3).update(completion_tokens=5)), "[3].meta_info.completion_tokens")
    await refused(edited(lambda a: meta(a).pop("completion_tokens") and None), "[0].meta_info.completion_tokens")


async def test_a_finish_reason_that_is_missing_or_unknown_is_refused() -> None:
    field = "meta_info.finish_reason"
    await refused(edited(lambda a: meta(a).pop("finish_reason") and None), field, n=1)
    await refused(edited(lambda a: meta(a).update(finish_reason=None)), field, n=1)
    await refused(edited(lambda a: meta(a).update(finish_reason="stop")), field, n=1)
    await refused(edited(lambda a: meta(a).update(finish_reason={"type": "odd"})), f"{field}.type", n=1)
    await refused(edited(lambda a: meta(a).update(finish_reason={"type": []})), f"{field}.type", n=1)


async def test_items_that_are_no_objects_are_refused() -> None:
    await refused(edited(lambda a: [None, *a[1:]]), "[0]")
    await refused(edited(lambda a: a[1].pop("meta_info") and None), "[1].meta_info")
    await refused(edited(lambda a: a[1].pop("text") and None), "[1].text")


async def test_html_is_not_a_reply() -> None:
    page = b"<html><body>Bad gateway</body></html>"
    error = await refused(raw(page, content_type="text/html"), "Content-Type")
    assert "Bad gateway" in str(error)
    await refused(raw(page), "body")


async def test_truncated_json_is_not_a_reply() -> None:
    body = json.dumps(correct({"input_ids": [0] * 5, "rid": "r-1", "sampling_params": {"n": 4, "max_new_tokens": 8}}))
    await refused(raw(body[:-20].encode()), "body")
    await refused(raw(b""), "body")
    await refused(raw(body.replace("-0.5,", "NaN,").encode()), "body")


async def test_logprobs_must_be_numbers_and_not_above_zero() -> None:
    field = "[0].meta_info.output_token_logprobs"
    for value in (0.5, "-0.5", True, -1e300, [], {}):
        await refused(edited(lambda a, v=value: meta(a)["output_token_logprobs"].__setitem__(0, [v, 0, None])), field)
    for triple in ([], [-0.5], None, "x", [-0.5, 0, None, 1]):
        await refused(edited(lambda a, t=triple: meta(a)["output_token_logprobs"].__setitem__(0, t)), field)


async def test_ids_must_be_integers_in_the_vocabulary() -> None:
    limits = Limits(vocab_size=60)
    for value in (60, -1, 2**31, 2**70, 1.0, True, None, "1"):

        def change(answer: Any, value: Any = value) -> None:
            answer[0]["output_ids"][0] = value
            meta(answer)["output_token_logprobs"][0][1] = value

        await refused(edited(change), "[0].output_ids", limits=limits)


async def test_more_tokens_than_asked_for_are_refused() -> None:
    longer = correct({"input_ids": [0] * 5, "rid": "r-1", "sampling_params": {"max_new_tokens": 4}})
    async with ScriptedEngine([edited(lambda _: longer)]) as engine, client_of(engine.url) as (client, _):
        with pytest.raises(ProtocolError, match="asked for 2 at most"):
            await client.generate(make_request(1, max_new_tokens=2))


async def test_a_prompt_that_the_server_cut_is_noticed() -> None:
    await refused(edited(lambda a: meta(a).update(prompt_tokens=4)), "[0].meta_info.prompt_tokens")
    await refused(edited(lambda a: meta(a).update(prompt_tokens=6)), "[0].meta_info.prompt_tokens")
    await refused(edited(lambda a: meta(a).pop("prompt_tokens") and None), "[0].meta_info.prompt_tokens")


@pytest.mark.parametrize(("told", "kept"), [(-3, 0), (999, 5), (0, 0), (5, 5), (None, 0)])
async def test_note_12_cached_tokens_stay_between_nothing_and_the_prompt(told: Any, kept: int) -> None:
    done = await outcome(edited(lambda a: meta(a).update(cached_tokens=told)))
    assert done[0].cached_tokens == kept


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [{"version": "a", "start": 0, "end": 3}],
        [{"version": "a", "start": 1, "end": 4}],
        [{"version": "a", "start": 0, "end": 2}, {"version": "b", "start": 3, "end": 4}],
        [{"version": "a", "start": 0, "end": 5}],
        [{"version": None, "start": 0, "end": 4}],
        [{"version": "a", "start": 0}],
        ["a"],
        "a",
    ],
)
async def test_version_spans_must_tile_the_response(spans: Any) -> None:
    field = "[0].meta_info.weight_versions"
    await refused(edited(lambda a: meta(a).update(weight_versions=spans)), field)


async def test_versions_come_from_spans_then_from_the_single_version_then_not_at_all() -> None:
    spans = [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 4}]
    done = await outcome(edited(lambda a: meta(a).update(weight_versions=spans)))
    assert [(s.version, s.start, s.end) for s in done[0].versions] == [("a", 0, 1), ("b", 1, 4)]
    done = await outcome(edited(lambda a: meta(a).pop("weight_versions") and None))
    assert [(s.version, s.start, s.end) for s in done[0].versions] == [("default", 0, 4)]

    def strip(answer: Any) -> None:
        del meta(answer)["weight_versions"], meta(answer)["weight_version"]

    assert (await outcome(edited(strip)))[0].versions == ()


async def test_note_9_a_child_that_comes_twice_is_refused() -> None:
    await refused(edited(lambda a: [a[0], a[1], a[1], a[3]]), "[2].meta_info.id")


async def test_note_33_an_empty_answer_is_no_success() -> None:
    def empty(answer: Any) -> None:
        answer.update(text="", output_ids=[])
        meta(answer).update(finish_reason={"type": "stop"}, completion_tokens=0, output_token_logprobs=[])
        meta(answer).update(weight_versions=[{"version": "default", "start": 0, "end": 0}])

    await refused(edited(empty), "output_ids", n=1)


async def test_note_27_a_sample_aborted_in_the_queue_lacks_keys_and_is_empty() -> None:
    def queued(answer: Any) -> None:
        finish = {"type": "abort", "message": "Abort in waiting queue"}
        info = {"id": "x", "finish_reason": finish, "weight_version": "default", "e2e_latency": 0.1}
        answer[1] = {"text": "", "output_ids": [], "meta_info": info}

    done = await outcome(edited(queued))
    assert done[1].finish_reason is FinishReason.ABORT
    assert done[1].tokens.size == done[1].logprobs.size == done[1].prompt_tokens == 0
    assert done[1].message == "Abort in waiting queue"
    assert done[0].tokens.size == 4


async def test_an_abort_keeps_its_tokens_and_is_held_to_the_same_contract() -> None:
    finish = {"type": "abort", "message": "Aborted"}
    done = await outcome(edited(lambda a: meta(a).update(finish_reason=finish)))
    assert done[0].tokens.size == 4
    assert done[0].finish_reason is FinishReason.ABORT

    def without_logprobs(answer: Any) -> None:
        meta(answer).update(finish_reason=finish)
        del meta(answer)["output_token_logprobs"]

    await refused(edited(without_logprobs), "[0].meta_info.output_token_logprobs")

    def without_ids(answer: Any) -> None:
        meta(answer).update(finish_reason=finish)
        del answer[0]["output_ids"]

    await refused(edited(without_ids), "[0].meta_info.completion_tokens")


async def test_note_13_a_child_aborted_with_a_status_counts_as_that_status() -> None:
    finish = {"type": "abort", "message": "queue full", "status_code": 503, "err_type": "X"}
    broken = edited(lambda a: meta(a, 2).update(finish_reason=finish))
    async with ScriptedEngine([broken, reply()]) as engine, client_of(engine.url) as (client, _):
        assert len(await client.generate(make_request(4))) == 4
        assert client.stats.retries_by_cause == {"http_503": 1}
    with pytest.raises(InfraError, match="queue full"):
        await outcome(broken)


async def test_note_39_placeholders_in_a_response_become_the_pad_id() -> None:
    done = await outcome(reply(), placeholders=Placeholders(ids=frozenset({11, 13}), pad_id=59))
    assert [c.replaced_placeholders for c in done] == [0, 2, 0, 0]
    assert done[1].tokens.tolist() == [10, 59, 12, 59]
    assert done[1].logprobs.size == 4


async def test_a_dropped_return_routed_experts_is_noticed() -> None:
    ask = make_request(1, routed_experts=True)
    async with ScriptedEngine([reply()]) as engine, client_of(engine.url) as (client, _):
        with pytest.raises(ProtocolError, match="router in between"):
            await client.generate(ask)


async def test_note_42_routed_experts_of_the_wrong_length_are_refused() -> None:
    ask = make_request(1, routed_experts=True)
    for size, good in ((8 * 2 * 4, True), (7 * 2 * 4, False), (3, False)):
        experts = base64.b64encode(bytes(size)).decode()
        script = [edited(lambda a, e=experts: meta(a).update(routed_experts=e))]
        async with ScriptedEngine(script) as engine, client_of(engine.url) as (client, _):
            if good:
                assert len(await client.generate(ask)) == 1
            else:
                with pytest.raises(ProtocolError):
                    await client.generate(ask)


async def test_an_error_object_with_status_200_is_an_error() -> None:
    await refused(edited(lambda _: {"error": "odd"}), "error")
