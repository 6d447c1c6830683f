"""The control plane: describe, load, abort, flush, health."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web

from onefill.engine import Deadlines, EngineKind, EngineLoad, capabilities
from onefill.engine.info import engine_info, engine_load
from onefill.errors import ConfigError, InfraError
from onefill.plan.capabilities import Support
from tests.engine.scripted import Behaviour, Body, ScriptedEngine, hang, raw, reply, says, status
from tests.engine.support import client_of

SERVER = {  # the part of SGLang 0.5.23's that matters
    "model_path": "m",
    "tokenizer_path": "t",
    "context_length": None,
    "disable_radix_cache": False,
    "speculative_algorithm": None,
    "enable_deterministic_inference": False,
    "rl_on_policy_target": None,
    "enable_lora": None,
    "lora_paths": None,
    "disaggregation_mode": "null",
    "weight_version": "default",
    "version": "0.5.23",
    "max_req_input_len": 2042,
}
MODEL = {"model_path": "m2", "weight_version": "v7", "has_image_understanding": True, "disaggregation_mode": "null"}
MODELS = {"object": "list", "data": [{"id": "m", "max_model_len": 2048}]}
LOADS = {"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1, "num_used_tokens": 30}] * 2}


async def described(routes: dict[str, Behaviour], **options: Any) -> Any:
    async with ScriptedEngine([reply()], routes=routes) as engine, client_of(engine.url, **options) as (client, _):
        return await client.describe()


async def test_a_real_sglang_is_described() -> None:
    routes = {"GET /server_info": says(SERVER), "GET /model_info": says(MODEL), "GET /v1/models": says(MODELS)}
    info = await described(routes)
    assert info.kind is EngineKind.SGLANG
    assert (info.version, info.model_path, info.tokenizer_path) == ("0.5.23", "m2", "t")
    assert (info.weight_version, info.context_length, info.vocab_size) == ("v7", 2048, None)
    assert info.has_image_understanding
    assert info.prefix_cache
    assert (info.deterministic, info.speculative_decoding, info.lora_enabled) == (False, False, False)
    assert info.disaggregation == ""
    assert info.usable_context == 2046, "SGLang cuts a response 2 tokens below its context"
    assert info.flags["max_req_input_len"] == 2042
    assert capabilities(info).parallel_sampling is Support.UNKNOWN
    assert capabilities(info).context_length == 2048


async def test_an_older_server_is_described_by_its_older_names() -> None:
    info = await described({"GET /get_server_info": says(SERVER), "GET /get_model_info": says(MODEL)})
    assert info.kind is EngineKind.SGLANG
    assert info.weight_version == "v7"


async def test_a_server_that_tells_nothing_is_unknown_and_no_error() -> None:
    for routes in (
        {},
        {"GET /server_info": raw(b"<html>", content_type="text/html")},
        {"GET /server_info": says([1])},
    ):
        info = await described(routes)
        assert info.kind is EngineKind.UNKNOWN
        assert info.context_length is None


async def test_a_router_is_known_by_its_workers() -> None:
    workers = {"workers": [{"url": "http://a:1", "is_healthy": True}, {"url": "http://b:2"}], "total": 2}
    info = await described({"GET /server_info": says(SERVER), "GET /workers": says(workers)})
    assert info.kind is EngineKind.ROUTER
    assert info.workers == ("http://a:1", "http://b:2")


async def test_what_a_router_does_not_tell_is_no_evidence() -> None:
    workers = {"workers": [{"url": "http://a:1"}]}  # all of it as sglang-router 0.3.2 answers
    routes = {"GET /get_server_info": says({"router_manager": True}), "GET /get_model_info": says(MODEL)}
    info = await described(routes | {"GET /workers": says(workers)})
    assert (info.kind, info.weight_version, info.usable_context) == (EngineKind.ROUTER, "v7", None)
    assert all("untold" in line for line in capabilities(info).evidence.values())


def test_the_usable_context_is_the_smaller_of_context_and_kv_pool() -> None:
    def usable(**fields: Any) -> int | None:
        return engine_info("u", server=fields, model=None).usable_context

    assert usable(context_length=4096, max_req_input_len=1018) == 1022  # a KV pool of 1,024 tokens
    assert usable(context_length=4096, max_total_num_tokens=32768) == 4094  # the embedded engine
    assert usable(context_length=4096, max_total_num_tokens=1024) == 1022
    assert usable(context_length=4096) == 4096
    assert usable(max_req_input_len=1018) == 1022
    assert usable() is None


async def test_a_sick_optional_endpoint_does_not_stop_the_description() -> None:
    info = await described(
        {"GET /server_info": says(SERVER), "GET /workers": status(503), "GET /model_info": status(500)}
    )
    assert info.kind is EngineKind.SGLANG


async def test_a_refused_key_is_a_config_error_at_once() -> None:
    with pytest.raises(ConfigError, match="401"):
        await described({"GET /server_info": status(401)})


def test_flags_that_bar_native_sampling_are_seen() -> None:
    def info(**flags: Any) -> Any:
        return capabilities(engine_info("u", server=SERVER | flags, model=None))

    assert info(speculative_algorithm="EAGLE").speculative_decoding
    assert info(enable_deterministic_inference=True).deterministic
    assert info(rl_on_policy_target="fsdp").deterministic
    assert not info(disable_radix_cache=True).prefix_cache
    assert info(vocab_size=100).vocab_size == 100
    assert engine_info("u", server=SERVER | {"lora_paths": {"a": "b"}}, model=None).lora_enabled
    assert (
        engine_info("u", server=SERVER | {"disaggregation_mode": "prefill"}, model=None).disaggregation == "prefill"
    )


def test_the_embedded_engine_is_known_to_fork() -> None:
    info = engine_info("u", server={"engine": "onefill-local", "vocab_size": 9, "context_length": 64}, model={})
    assert info.kind is EngineKind.LOCAL
    assert capabilities(info).parallel_sampling is Support.YES


def test_odd_fields_become_unknown() -> None:
    odd = {key: object() for key in SERVER} | {"context_length": "many", "vocab_size": True}
    info = engine_info("u", server=odd, model="x", models=[1], workers=7)
    assert (info.version, info.context_length, info.vocab_size, info.workers) == ("", None, None, ())


async def test_loads_are_summed_over_ranks_and_old_forms_understood() -> None:
    async with (
        ScriptedEngine([reply()], routes={"GET /v1/loads": says(LOADS)}) as engine,
        client_of(engine.url) as (client, _),
    ):
        assert await client.loads() == EngineLoad(running=4, waiting=2, used_tokens=60)
        engine.routes = {"GET /get_load": says([{"num_reqs": 3, "num_waiting_reqs": 1, "num_tokens": 5}])}
        assert await client.loads() == EngineLoad(running=2, waiting=1, used_tokens=5)
        engine.routes = {}
        with pytest.raises(InfraError, match="tells no load"):
            await client.loads()
    assert EngineLoad(running=0, waiting=0, used_tokens=9).idle
    assert engine_load({"loads": [{"a": 1}]}) is None


async def test_abort_says_what_to_abort() -> None:
    seen: list[Body] = []

    async def record(_: web.Request, body: Body) -> web.StreamResponse:
        seen.append(body)
        return web.Response()

    async with (
        ScriptedEngine([reply()], routes={"POST /abort_request": record}) as engine,
        client_of(engine.url) as (client, _),
    ):
        await client.abort("r-1")
        await client.abort_all()
        with pytest.raises(ValueError, match="rid"):
            await client.abort("")
    assert seen == [{"rid": "r-1"}, {"rid": "", "abort_all": True}]


async def test_note_25_an_abort_that_a_router_does_not_know_is_no_success() -> None:
    async with ScriptedEngine([reply()]) as engine, client_of(engine.url) as (client, _):
        with pytest.raises(InfraError, match="has no /abort_request"):
            await client.abort_all()


async def test_note_23_one_502_on_a_control_call_is_retried() -> None:
    answers = iter([status(502), raw(b"", content_type="text/plain")])

    async def flaky(request: web.Request, body: Body) -> web.StreamResponse:
        return await next(answers)(request, body)

    async with (
        ScriptedEngine([reply()], routes={"POST /abort_request": flaky}) as engine,
        client_of(engine.url) as (client, _),
    ):
        await client.abort_all()
        assert client.stats.control_retried == 1
        assert client.stats.requests_retried == client.stats.requests_sent == 0


async def test_note_48_a_flush_that_the_server_refused_is_told() -> None:
    routes = {"POST /flush_cache": status(400, message="Flush cache failed.")}
    async with ScriptedEngine([reply()], routes=routes) as engine, client_of(engine.url) as (client, _):
        assert await client.flush_cache(wait=1) is False
        engine.routes = {"POST /flush_cache": raw(b"Cache flushed.", content_type="text/plain")}
        assert await client.flush_cache() is True


async def test_health_is_one_bounded_try() -> None:
    async with (
        ScriptedEngine([reply()], routes={"GET /health": raw(b"")}) as engine,
        client_of(engine.url, deadlines=Deadlines(control=0.1)) as (client, _),
    ):
        assert await client.healthy()
        for behaviour in (status(503), hang()):
            engine.routes = {"GET /health": behaviour}
            assert not await client.healthy()
        url = client.url
    async with client_of(url) as (client, _):
        assert not await client.healthy()


async def test_a_control_call_that_hangs_ends() -> None:
    with pytest.raises(InfraError, match="no answer within"):
        await described({"GET /server_info": hang()}, deadlines=Deadlines(control=0.1))


@pytest.mark.parametrize("name", ["connect", "total", "between_bytes", "control"])
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_deadlines_are_finite(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Deadlines(**{name: value})
