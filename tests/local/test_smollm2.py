"""The real default model. Slow: a 135M-parameter forward pass on a CPU."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest
import torch
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from .conftest import Client, Served, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

QUESTIONS = (
    "A farmer has 17 sheep. All but 9 run away. How many are left?",
    "Name the capital of France and one river that flows through it.",
    "Write one sentence about the sea.",
)


@pytest.fixture(scope="module")
def real() -> Iterator[Served]:
    with serving(model="smollm2-135m", threads=2) as one:
        yield one


@pytest.fixture
async def smol(real: Served) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        yield Client(session, real)


def chat(client: Client, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    text = client.engine.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return client.engine.tokenizer.encode(text)


async def test_it_answers_and_ends_with_the_chats_end_of_turn(smol: Client):
    item = await smol.ask(chat(smol, QUESTIONS[1]), temperature=0, max_new_tokens=80)
    assert "Paris" in item["text"]
    end = smol.engine.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert smol.engine.eos_ids == (end,)
    assert item["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}
    assert "<|im_end|>" not in item["text"]


async def test_greedy_is_the_same_natively_split_cold_and_warm(smol: Client):
    want = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
    for question in QUESTIONS[:2]:
        prompt = chat(smol, question * 3)
        await smol.post("/flush_cache")
        native = [i["output_ids"] for i in await smol.ask(prompt, n=8, **want)]
        warm = await asyncio.gather(*(smol.ask(prompt, **want) for _ in range(8)))
        await smol.post("/flush_cache")
        cold = await asyncio.gather(*(smol.ask(prompt, **want) for _ in range(8)))
        await smol.post("/flush_cache")
        halves = await asyncio.gather(*(smol.ask(prompt, n=4, **want) for _ in range(2)))
        others = [*warm, *cold, *(i for half in halves for i in half)]
        assert all(ids == native[0] for ids in native)
        assert all(item["output_ids"] == native[0] for item in others)


async def test_logprobs_agree_with_a_teacher_forced_forward(smol: Client):
    prompt = chat(smol, QUESTIONS[0])
    items = await smol.ask(prompt, n=4, max_new_tokens=32, temperature=0.8, top_p=0.9, return_logprob=True)
    model = AutoModelForCausalLM.from_pretrained(smol.engine.model_path, dtype=torch.float32)
    assert len({tuple(i["output_ids"]) for i in items}) == 4
    for item in items:
        ids = item["output_ids"]
        with torch.no_grad():
            scores = log_softmax(model(torch.tensor([prompt + ids])).logits[0] / 0.8, -1)
        got = [lp for lp, _, _ in item["meta_info"]["output_token_logprobs"]]
        want = [float(scores[len(prompt) - 1 + i, token]) for i, token in enumerate(ids)]
        assert got == pytest.approx(want, abs=1e-3)


async def test_a_native_group_is_clearly_faster_than_cold_singles(smol: Client):
    """Each single prefills anew; measured 4 to 5 times on an idle machine. Singles sent together share (no test)."""
    prompt = smol.engine.encode("The quick brown fox jumps over the lazy dog. " * 50)[:500]
    want = {"max_new_tokens": 8, "ignore_eos": True}
    await smol.post("/flush_cache")
    start = time.monotonic()
    await smol.ask(prompt, n=8, **want)
    native = time.monotonic() - start
    start = time.monotonic()
    for _ in range(8):
        await smol.post("/flush_cache")
        await smol.ask(prompt, **want)
    assert time.monotonic() - start > 2 * native
