"""Native against fanout on the embedded engine, with the real model: tokens/s of both, and the ratio.

    python benchmarks/native_vs_fanout.py                # the table of the README, as JSON
    python benchmarks/native_vs_fanout.py --prompts 300 --rounds 1 --model tiny

One engine process serves both. Prompts of each length are drawn anew for every run, so prefixes are cold; order
alternates; all samples run to the full length (`ignore_eos`), so both sides decode the same number of tokens.
Three ways are timed: `native` (one request, n = 8), `fanout` (Onefill's: one single first, the rest when its
prefix is cached), and `singles` (eight single requests sent at once, as frameworks do today).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np

from machine import describe
from onefill import Group, Prompt, SamplingParams
from onefill.engine import EngineClient, capabilities, open_session
from onefill.local import ServeConfig
from onefill.local.process import EngineProcess
from onefill.plan import Strategy
from onefill.rollout import Dispatcher, Engine, Tally
from onefill.rollout.budget import SampleBudget
from onefill.types import token_array

WAYS = ("native", "fanout", "singles")


class Bench:
    def __init__(self, client: EngineClient, vocab: int, n: int, new_tokens: int) -> None:
        self.client = client
        self.vocab = vocab
        self.n = n
        self.sampling = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        self.rng = np.random.default_rng(0)
        self.ids = (f"{i:010x}" for i in itertools.count())
        self.info: Any = None

    async def run(self, way: str, prompt_tokens: int) -> float:
        """Seconds for one group."""
        tokens = token_array(self.rng.integers(100, self.vocab - 100, prompt_tokens))
        group = Group.of(Prompt(id="p", tokens=tokens), self.n, self.sampling)
        known = capabilities(self.info)
        if way == "singles":
            known = replace(known, prefix_cache=False)  # nothing is held back: all at once
        engine = Engine(url=self.info.url, client=self.client, capabilities=known)
        strategy = Strategy.parse("native" if way == "native" else "fanout")
        dispatcher = Dispatcher(engines=[engine], strategy=strategy, new_id=lambda: next(self.ids), tally=Tally())
        permit = await SampleBudget(self.n).take(self.n)
        started = time.perf_counter()
        await dispatcher.complete(group, permit)
        took = time.perf_counter() - started
        assert sum(s.tokens.size for s in group.samples) == self.n * self.sampling.max_new_tokens
        await self.client.flush_cache()
        return took


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    async with EngineProcess(ServeConfig(model=options.model, port=0)) as process, open_session() as session:
        client = EngineClient(process.url, session=session, rng=random.Random(0))
        info = await client.describe()
        bench = Bench(client, info.vocab_size or 256, options.n, options.new_tokens)
        bench.info = info
        await bench.run("native", 64)  # warm the process up
        for prompt_tokens in options.prompts:
            times: dict[str, list[float]] = {way: [] for way in WAYS}
            for turn in range(options.rounds):
                for way in WAYS if turn % 2 == 0 else reversed(WAYS):
                    times[way].append(await bench.run(way, prompt_tokens))
            tokens = options.n * options.new_tokens
            medians = {way: statistics.median(times[way]) for way in WAYS}
            rows.append(
                {
                    "prompt_tokens": prompt_tokens,
                    **{f"{way}_s": round(medians[way], 3) for way in WAYS},
                    **{f"{way}_tokens_per_s": round(tokens / medians[way], 1) for way in WAYS},
                    "native_over_fanout": round(medians["fanout"] / medians["native"], 3),
                    "native_over_singles": round(medians["singles"] / medians["native"], 3),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, nargs="+", default=[300, 1000, 2000])
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows = asyncio.run(measure(options))
    print(json.dumps({**describe(), "n": options.n, "new_tokens": options.new_tokens, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
