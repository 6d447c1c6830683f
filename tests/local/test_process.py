"""The engine as a child process: it starts, answers, stops, and never stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import psutil
import pytest

from onefill.errors import ConfigError, InfraError
from onefill.local.config import ServeConfig
from onefill.local.process import EngineProcess

TINY = ServeConfig(model="tiny", port=0, threads=1)


async def test_it_starts_answers_and_is_gone_afterwards(tmp_path: Path):
    async with EngineProcess(TINY, log=tmp_path / "logs" / "engine.log") as engine:
        async with aiohttp.ClientSession() as session, session.get(engine.url + "/server_info") as response:
            assert (await response.json())["engine"] == "onefill-local"
        pid = engine.pid
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)
    assert "is listening on" in (tmp_path / "logs" / "engine.log").read_text()


async def test_it_stops_promptly_while_it_generates():
    async with EngineProcess(TINY) as engine, aiohttp.ClientSession() as session:
        body = {"text": "x", "sampling_params": {"max_new_tokens": 3500, "ignore_eos": True, "n": 8}}
        task = asyncio.create_task(session.post(engine.url + "/generate", json=body))
        await asyncio.sleep(0.5)
        start = time.monotonic()
        os.kill(engine.pid, signal.SIGTERM)
        while psutil.pid_exists(engine.pid) and psutil.Process(engine.pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.05)
            assert time.monotonic() - start < 4
        await asyncio.gather(task, return_exceptions=True)


async def test_a_child_that_dies_shows_its_last_words(tmp_path: Path):
    with pytest.raises(ConfigError, match="no model 'nonesuch'"):
        async with EngineProcess(ServeConfig(model="nonesuch", port=0)):
            pass


async def test_a_port_in_use_is_a_clear_error():
    async with EngineProcess(TINY) as engine:
        port = int(engine.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match="cannot listen"):
            async with EngineProcess(ServeConfig(model="tiny", port=port, threads=1)):
                pass


async def test_a_child_that_is_too_slow_is_stopped():
    engine = EngineProcess(TINY, ready_within_s=0.2)
    with pytest.raises(InfraError, match="not ready within"):
        await engine.__aenter__()
    assert not psutil.pid_exists(engine.pid)


async def test_no_orphan_when_the_parent_is_killed(tmp_path: Path):
    script = (
        "import asyncio, sys\n"
        "from onefill.local.config import ServeConfig\n"
        "from onefill.local.process import EngineProcess\n"
        "async def main():\n"
        "    async with EngineProcess(ServeConfig(model='tiny', port=0, threads=1)) as engine:\n"
        "        print(engine.pid, flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(await asyncio.to_thread(parent.stdout.readline))
    assert psutil.pid_exists(child)
    parent.kill()
    parent.wait()
    for _ in range(100):
        if not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
            return
        await asyncio.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    raise AssertionError("the child outlived its parent")


def test_the_light_modules_do_not_load_torch():
    code = (
        "import sys, onefill.local, onefill.local.models, onefill.local.process, onefill.local.__main__\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "bad", [{"port": 70000}, {"threads": -1}, {"max_running_requests": 0}, {"max_total_tokens": 3}, {"page_size": 1}]
)
def test_flags_out_of_range_name_themselves(bad: dict[str, int]):
    with pytest.raises(ConfigError, match="--" + next(iter(bad)).replace("_", "-")):
        ServeConfig(**bad)  # type: ignore[arg-type]
