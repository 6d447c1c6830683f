"""Other architectures, and an engine that breaks."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, MistralConfig, Qwen2Config, Qwen3Config

from onefill.local.models import pull

from .conftest import Client, serving

SMALL = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 258,
}
PROMPT = [40 + i * 3 % 80 for i in range(70)]


@pytest.mark.parametrize(
    "config",
    [Qwen2Config(**SMALL), Qwen3Config(**SMALL, head_dim=16), MistralConfig(**SMALL, sliding_window=24)],
    ids=["qwen2", "qwen3", "mistral-sliding"],
)
async def test_other_architectures_generate_as_transformers_does(
    config: object, tmp_path: Path, session: aiohttp.ClientSession
):
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pull("tiny") / name, tmp_path / name)
    settings = GenerationConfig(do_sample=False, max_new_tokens=20, eos_token_id=None, pad_token_id=259)
    with torch.no_grad():
        want = model.generate(torch.tensor([PROMPT]), generation_config=settings)[0, len(PROMPT) :].tolist()
    with serving(model=str(tmp_path)) as served:
        client = Client(session, served)
        items = await client.ask(PROMPT, n=3, temperature=0, max_new_tokens=20, ignore_eos=True)
        assert [i["output_ids"] for i in items] == [want] * 3
        assert (await client.ask(PROMPT, temperature=0, max_new_tokens=20, ignore_eos=True))["output_ids"] == want


async def test_an_engine_that_breaks_says_so_to_all_and_is_unhealthy(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
):
    with serving() as served:
        client = Client(session, served)
        tasks = [
            asyncio.create_task(client.ask("x", want=500, n=n, max_new_tokens=3000, ignore_eos=True)) for n in (1, 3)
        ]
        await client.until(running=4)
        monkeypatch.setattr(served.engine._model, "forward", _broken)
        for answer in await asyncio.wait_for(asyncio.gather(*tasks), 5):
            assert "the engine broke" in answer["error"]["message"]
        await client.get("/health", want=503)
        await client.get("/health_generate", want=503)
        await client.ask("x", want=503)
        await client.post("/flush_cache", want=503)


def _broken(*_: object, **__: object) -> None:
    raise RuntimeError("out of luck")


async def test_logits_that_are_not_numbers_fail_the_request_not_the_engine(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
):
    with serving() as served:
        client = Client(session, served)
        weight = served.engine._model.lm_head.weight
        kept = weight.clone()
        weight.fill_(float("nan"))
        assert "not numbers" in (await client.ask("x", want=500, n=2))["error"]["message"]
        weight.copy_(kept)
        assert len((await client.ask("x", max_new_tokens=3, ignore_eos=True))["output_ids"]) == 3
