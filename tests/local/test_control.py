"""The control plane: pauses, weight updates, flushes, and what the server says of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from onefill.local.models import pull

from .conftest import Client, serving

LONG = {"max_new_tokens": 3500, "ignore_eos": True}
PROMPT = [40 + i % 80 for i in range(100)]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny` with other weights."""
    path = tmp_path_factory.mktemp("other")
    model = AutoModelForCausalLM.from_pretrained(pull("tiny"))
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))
    model.save_pretrained(path)
    return path


@pytest.fixture
async def fresh(session: aiohttp.ClientSession) -> Iterator[Client]:
    """A server of one's own, for tests that change its weights."""
    with serving() as served:
        yield Client(session, served)


async def greedy(client: Client, count: int = 24) -> list[int]:
    return (await client.ask(PROMPT, temperature=0, max_new_tokens=count, ignore_eos=True))["output_ids"]


async def test_health(client: Client):
    await client.get("/health")
    await client.get("/health_generate")
    task = asyncio.create_task(client.ask("x", **LONG))
    await client.until(running=1)
    await client.get("/health_generate")
    task.cancel()


async def test_server_info_has_the_flags_that_clients_need(client: Client):
    for path in ("/server_info", "/get_server_info"):
        info = await client.get(path)
        assert info["engine"] == "onefill-local"
        assert info["version"].startswith("onefill-local ")
        assert (info["context_length"], info["vocab_size"], info["max_running_requests"]) == (4096, 260, 64)
        assert info["model_path"] == info["tokenizer_path"]
        assert info["speculative_algorithm"] is None
        assert info["enable_deterministic_inference"] is False
        assert info["disable_radix_cache"] is False


async def test_model_info(client: Client):
    for path in ("/model_info", "/get_model_info"):
        info = await client.get(path)
        assert info["is_generation"] is True
        assert info["has_image_understanding"] is False
        assert info["weight_version"] == "default"


async def test_unknown_paths_are_404(client: Client):
    await client.get("/get_load", want=404)


async def test_loads_tell_running_waiting_and_used(client: Client):
    task = asyncio.create_task(client.ask(PROMPT, n=3, **LONG))
    await client.until(running=3)
    (load,) = (await client.get("/v1/loads"))["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["dp_rank"]) == (3, 0, 0)
    assert 0 < load["num_used_tokens"] <= load["max_total_num_tokens"]
    task.cancel()


async def test_metrics_count_requests_by_path_and_status(client: Client):
    def count(page: str, status: int) -> int:
        start = f'onefill_http_requests_total{{path="/generate",status="{status}"}} '
        return sum(int(line.removeprefix(start)) for line in page.splitlines() if line.startswith(start))

    before = await client.get("/metrics")
    await client.ask("a", n=4, max_new_tokens=1)
    await client.ask("a", max_new_tokens=1)
    await client.ask("a", want=400, nope=1)
    after = await client.get("/metrics")
    assert count(after, 200) - count(before, 200) == 2
    assert count(after, 400) - count(before, 400) == 1


async def test_flush_forgets_prefixes_and_refuses_while_busy(client: Client):
    await client.ask(PROMPT, max_new_tokens=1)
    task = asyncio.create_task(client.ask("x", **LONG))
    await client.until(running=1)
    assert str(await client.post("/flush_cache", want=400)).startswith("Flush cache failed.")
    assert str(await client.get("/flush_cache?timeout=0.1", want=400)).startswith("Flush cache failed.")
    task.cancel()
    await client.get("/flush_cache?timeout=3")
    assert (await client.ask(PROMPT, max_new_tokens=1))["meta_info"]["cached_tokens"] == 0


async def test_flush_waits_for_running_work(client: Client):
    task = asyncio.create_task(client.ask("x", max_new_tokens=300, ignore_eos=True))
    await client.until(running=1)
    await client.post("/flush_cache?timeout=20")
    assert (await task)["meta_info"]["completion_tokens"] == 300


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_pause_keeps_requests_and_they_go_on(client: Client, mode: str):
    want = {"n": 3, "temperature": 0, "max_new_tokens": 500, "ignore_eos": True}
    whole = await client.ask(PROMPT, **want)
    task = asyncio.create_task(client.ask(PROMPT, **want))
    await client.until(running=3)
    await client.post("/pause_generation", {"mode": mode})
    at = [len(s.tokens) for s in client.engine.live.values()]
    await asyncio.sleep(0.2)
    assert [len(s.tokens) for s in client.engine.live.values()] == at
    later = asyncio.create_task(client.ask("y", max_new_tokens=2, ignore_eos=True))
    await asyncio.sleep(0.1)
    assert not later.done()
    assert not task.done()
    await client.post("/continue_generation", {})
    items = await task
    assert [i["output_ids"] for i in items] == [i["output_ids"] for i in whole]
    assert {i["meta_info"]["num_retractions"] for i in items} == {int(mode == "retract")}
    assert len((await later)["output_ids"]) == 2


async def test_pause_by_abort_returns_the_partial_items(client: Client):
    task = asyncio.create_task(client.ask(PROMPT, n=3, **LONG))
    await client.until(running=3)
    await asyncio.sleep(0.05)
    await client.post("/pause_generation", {"mode": "abort"})
    assert {i["meta_info"]["finish_reason"]["type"] for i in await asyncio.wait_for(task, 1)} == {"abort"}
    await client.post("/continue_generation", {})
    assert len(await greedy(client)) == 24


async def test_requests_can_be_aborted_and_dropped_while_paused(client: Client):
    await client.post("/pause_generation", {"mode": "in_place"})
    tasks = [asyncio.create_task(client.ask("x", n=2, **LONG)) for _ in range(2)]
    await client.until(running=0, waiting=4)
    tasks[0].cancel()
    await client.until(running=0, waiting=2)
    await client.post("/abort_request", {"abort_all": True})
    assert len(await asyncio.wait_for(tasks[1], 1)) == 2


async def test_a_pause_of_an_unknown_mode_is_refused(client: Client):
    assert (await client.post("/pause_generation", {"mode": "gently"}, want=400))["object"] == "error"


async def test_an_update_changes_the_answers_and_their_version(fresh: Client, other: Path):
    before = await greedy(fresh)
    answer = await fresh.post("/update_weights_from_disk", {"model_path": str(other), "weight_version": "v2"})
    assert answer["success"] is True
    item = await fresh.ask(PROMPT, temperature=0, max_new_tokens=24, ignore_eos=True)
    assert item["output_ids"] != before
    assert item["meta_info"]["weight_version"] == "v2"
    assert item["meta_info"]["weight_versions"] == [{"version": "v2", "start": 0, "end": 24}]
    assert item["meta_info"]["cached_tokens"] == 0  # field note 48: nothing of the old weights is reused
    info = await fresh.get("/model_info")
    assert (info["weight_version"], info["model_path"]) == ("v2", str(other))
    await fresh.post("/update_weights_from_disk", {"model_path": "tiny", "weight_version": "v3"})
    assert await greedy(fresh) == before


async def test_an_update_gives_what_a_fresh_server_of_those_weights_gives(
    fresh: Client, other: Path, session: aiohttp.ClientSession
):
    await greedy(fresh)
    await fresh.post("/update_weights_from_disk", {"model_path": str(other)})
    (other / "tokenizer.json").write_bytes((pull("tiny") / "tokenizer.json").read_bytes())
    (other / "tokenizer_config.json").write_bytes((pull("tiny") / "tokenizer_config.json").read_bytes())
    with serving(model=str(other)) as served:
        assert await greedy(fresh) == await greedy(Client(session, served))


async def test_running_samples_go_on_over_an_update_and_tell_which_weights_made_what(fresh: Client, other: Path):
    task = asyncio.create_task(fresh.ask(PROMPT, n=3, return_logprob=True, max_new_tokens=900, ignore_eos=True))
    await fresh.until(running=3)
    await asyncio.sleep(0.2)
    await fresh.post("/update_weights_from_disk", {"model_path": str(other), "weight_version": "v2"})
    for item in await task:
        spans = item["meta_info"]["weight_versions"]
        assert [s["version"] for s in spans] == ["default", "v2"]
        assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], 900)
        assert item["meta_info"]["num_retractions"] == 1
        assert len(item["output_ids"]) == 900 == len(item["meta_info"]["output_token_logprobs"])


async def test_an_update_between_pause_and_continue(fresh: Client, other: Path):
    task = asyncio.create_task(fresh.ask(PROMPT, n=2, max_new_tokens=700, ignore_eos=True))
    await fresh.until(running=2)
    await fresh.post("/pause_generation", {"mode": "retract"})
    await fresh.post("/flush_cache")
    await fresh.post("/update_weights_from_disk", {"model_path": str(other), "weight_version": "v2"})
    await fresh.post("/continue_generation", {})
    for item in await task:
        assert item["meta_info"]["weight_versions"][-1]["version"] == "v2"


async def test_an_update_may_keep_the_pause_and_may_abort(fresh: Client, other: Path):
    task = asyncio.create_task(fresh.ask(PROMPT, **LONG))
    await fresh.until(running=1)
    body = {"model_path": str(other), "abort_all_requests": True, "keep_pause": True}
    await fresh.post("/update_weights_from_disk", body)
    assert (await asyncio.wait_for(task, 1))["meta_info"]["finish_reason"]["type"] == "abort"
    assert fresh.engine.paused
    await fresh.post("/continue_generation", {})
    assert len(await greedy(fresh)) == 24


@pytest.mark.parametrize("kind", ["missing", "shape", "layers"])
async def test_a_wrong_checkpoint_changes_nothing(client: Client, tmp_path: Path, kind: str):
    before = await greedy(client)
    if kind != "missing":
        config = LlamaConfig.from_pretrained(pull("tiny"))
        if kind == "shape":
            config.intermediate_size = 96
        else:
            config.num_hidden_layers = 1
        LlamaForCausalLM(config).save_pretrained(tmp_path / "m")
    answer = await client.post("/update_weights_from_disk", {"model_path": str(tmp_path / "m")}, want=400)
    assert answer["success"] is False
    assert answer["message"]
    assert await greedy(client) == before
    assert (await client.get("/model_info"))["weight_version"] == "default"


async def test_an_update_without_a_path_is_malformed(client: Client):
    assert (await client.post("/update_weights_from_disk", {}, want=400))["object"] == "error"


async def test_scoring_while_others_generate(client: Client):
    task = asyncio.create_task(client.ask(PROMPT, n=2, max_new_tokens=300, ignore_eos=True))
    await client.until(running=2)
    item = await client.ask(PROMPT, max_new_tokens=1, return_logprob=True, logprob_start_len=0)
    assert len(item["meta_info"]["input_token_logprobs"]) == len(PROMPT)
    assert len(await task) == 2
