"""The whole path with SmolLM2-135M: every strategy the same, and logprobs that a trainer can use."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onefill.local.config import ServeConfig
from onefill.local.models import resolve
from onefill.local.process import EngineProcess
from tests.cli.test_rollout import rolled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    loop = asyncio.new_event_loop()
    process = EngineProcess(ServeConfig(model="smollm2-135m", port=0, seed=3))
    loop.run_until_complete(process.__aenter__())
    try:
        yield process.url
    finally:
        loop.run_until_complete(process.__aexit__(None, None, None))
        loop.close()


def responses(rows: list[dict[str, Any]]) -> list[tuple[str, int, list[int]]]:
    return [(row["prompt_id"], row["sample_index"], row["response_tokens"]) for row in rows]


def test_greedy_is_token_identical_whatever_the_strategy(engine: str, tmp_path: Path) -> None:
    flags = {"engine": [engine], "task": "leg_counting", "groups": 6, "temperature": 0.0, "max_new_tokens": 32}
    runs = {}
    for strategy in ("native", "split:4", "fanout"):
        _, rows = rolled(tmp_path / strategy.replace(":", ""), strategy=strategy, **flags)
        runs[strategy] = responses(rows)
    assert len(runs["native"]) == 48
    assert runs["native"] == runs["split:4"] == runs["fanout"]


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.9)])
def test_logprobs_are_those_of_a_teacher_forced_forward(
    engine: str, tmp_path: Path, temperature: float, top_p: float
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    flags = {"engine": [engine], "groups": 3, "strategy": "native", "max_new_tokens": 24}
    summary, rows = rolled(tmp_path, temperature=temperature, top_p=top_p, **flags)
    assert summary["groups_by_strategy"]["native"] == 3
    assert len({tuple(row["response_tokens"]) for row in rows}) > 3
    model = AutoModelForCausalLM.from_pretrained(resolve("smollm2-135m"), dtype=torch.float32).eval()
    worst = 0.0
    for row in rows:
        prompt, response = row["prompt_tokens"], row["response_tokens"]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
        expected = torch.log_softmax(logits, dim=-1)[torch.arange(len(response)), torch.tensor(response)]
        worst = max(worst, float(np.abs(expected.numpy() - np.array(row["logprobs"])).max()))
    assert worst < 1e-3
