"""What the client costs: CPU seconds and peak memory per 10,000 samples against an engine that answers at once.

    python benchmarks/client_overhead.py                 # the table of the README, as JSON
    python benchmarks/client_overhead.py --quick

Everything that `onefill rollout` does is measured: reading JSON lines with 1,000 token ids a row, planning,
encoding, HTTP, validation, the `exact` reward, the summary and Parquet. The engine is another process
(`mock_engine.py`) and not counted. Beside it, in the same run and against the same engine, stands the least that
Python can do: bare aiohttp with orjson that sends the same requests and parses the replies, nothing else.
Orders alternate, medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import describe

HERE = Path(__file__).parent
PROMPT_TOKENS, RESPONSE_TOKENS, GROUP, WARM_UP = 1000, 64, 8, 50


def write_data(path: Path, rows: int) -> None:
    """Rows of 1,000 token ids; every row differs, so nothing can be cached across groups."""
    with path.open("w") as file:
        for row in range(rows):
            ids = [(row * 7919 + i * 31) % 50_000 for i in range(PROMPT_TOKENS)]
            file.write(json.dumps({"id": f"row-{row}", "input_ids": ids, "label": "lorem"}) + "\n")


def usage(cpu_before: float, samples: int) -> dict[str, float]:
    cpu = time.process_time() - cpu_before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"cpu_s_per_10k": cpu / samples * 10_000, "cpu_ms_per_sample": cpu / samples * 1000, "peak_mib": peak}


def work_pipeline(url: str, data: Path, strategy: str, in_flight: int, groups: int) -> dict[str, float]:
    from rich.console import Console

    from onefill.cli.rollout import roll_out, run_async
    from onefill.cli.settings import load_settings

    def run(count: int) -> None:
        with tempfile.TemporaryDirectory() as out:
            flags = {
                "engine": [url],
                "data": [str(data)],
                "strategy": strategy,
                "concurrency": in_flight,
                "group_size": GROUP,
                "groups": count,
                "epochs": 1_000_000,
                "max_new_tokens": RESPONSE_TOKENS,
                "reward": "exact",
                "out": out,
            }
            report = run_async(roll_out(load_settings(flags, None), stderr=Console(stderr=True, quiet=True)))
        assert report.summary["samples_done"] == count * GROUP, report.summary

    run(WARM_UP)  # imports, TLS set-up and the like are paid once a process, not once a sample
    before = time.process_time()
    run(groups)
    return usage(before, groups * GROUP)


def work_bare(url: str, data: Path, strategy: str, in_flight: int, groups: int) -> dict[str, float]:
    import aiohttp
    import orjson
    import uvloop

    n = GROUP if strategy == "native" else 1
    rows = [orjson.loads(line)["input_ids"] for line in data.read_bytes().splitlines()]

    async def main(groups: int) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, json_serialize=lambda v: orjson.dumps(v).decode()) as s:
            jobs = iter([rows[g % len(rows)] for g in range(groups) for _ in range(GROUP // n)])

            async def worker() -> None:
                for ids in jobs:
                    sampling = {"n": n, "max_new_tokens": RESPONSE_TOKENS, "temperature": 1.0}
                    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
                    async with s.post(f"{url}/generate", data=orjson.dumps(body)) as reply:
                        orjson.loads(await reply.read())

            await asyncio.gather(*(worker() for _ in range(max(1, in_flight // n))))

    uvloop.run(main(WARM_UP))
    before = time.process_time()
    uvloop.run(main(groups))
    return usage(before, groups * GROUP)


def spawn(work: str, url: str, data: Path, strategy: str, in_flight: int, groups: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--work", work, url, str(data), strategy, str(in_flight), str(groups)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def median(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(r[key] for r in runs), 4) for key in runs[0]}


def measure_concurrency(url: str, data: Path, levels: list[int], groups: int, rounds: int) -> list[dict[str, Any]]:
    cells = [(w, s, c) for w in ("pipeline", "bare") for s in ("native", "fanout") for c in levels]
    runs: dict[tuple[str, str, int], list[dict[str, float]]] = {cell: [] for cell in cells}
    for turn in range(rounds):
        for cell in cells if turn % 2 == 0 else reversed(cells):
            runs[cell].append(spawn(cell[0], url, data, cell[1], cell[2], groups))
    return [{"work": w, "strategy": s, "in_flight": c, **median(runs[w, s, c])} for w, s, c in cells]


def measure_memory(url: str, data: Path, sizes: list[int]) -> list[dict[str, Any]]:
    return [{"groups": g, "strategy": "native", **spawn("pipeline", url, data, "native", 512, g)} for g in sizes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and samples")
    parser.add_argument("--work", nargs=6, metavar="ARG", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work, url, data, strategy, in_flight, groups = options.work
        run = work_pipeline if work == "pipeline" else work_bare
        print(json.dumps(run(url, Path(data), strategy, int(in_flight), int(groups))))
        return
    command = [sys.executable, str(HERE / "mock_engine.py"), "--response-tokens", str(RESPONSE_TOKENS)]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert engine.stdout
        url = engine.stdout.readline().strip()
        with tempfile.TemporaryDirectory() as scratch:
            data = Path(scratch) / "prompts.jsonl"
            write_data(data, 1250)
            levels, groups, rounds = ([128, 4096], 625, 1) if options.quick else ([128, 512, 4096], 1250, 5)
            sizes = [1_000, 10_000] if options.quick else [1_000, 10_000, 100_000]
            report = {
                **describe(),
                "prompt_tokens": PROMPT_TOKENS,
                "response_tokens": RESPONSE_TOKENS,
                "group_size": GROUP,
                "samples_a_run": groups * GROUP,
                "concurrency": measure_concurrency(url, data, levels, groups, rounds),
                "memory": measure_memory(url, data, sizes),
            }
    finally:
        engine.kill()
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
