"""The engine as a child process: it starts, answers, stops, and never stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
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


async def test_it_starts_answers_and_is_gone_afterwards_even_while_it_generates(tmp_path: Path):
    log = tmp_path / "logs" / "engine.log"
    async with aiohttp.ClientSession() as session:
        async with EngineProcess(TINY, log=log) as engine:
            async with session.get(engine.url + "/server_info") as response:
                assert (await response.json())["engine"] == "onefill-local"
            body = {"text": "x", "sampling_params": {"max_new_tokens": 3500, "ignore_eos": True, "n": 8}}
            task = asyncio.create_task(session.post(engine.url + "/generate", json=body))
            await asyncio.sleep(0.3)
            pid, start = engine.pid, time.monotonic()
        assert time.monotonic() - start < 4  # stopped by SIGTERM, not killed after the grace
        assert not psutil.pid_exists(pid)
        assert "is listening on" in log.read_text()
        assert "Traceback" not in log.read_text()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_child_that_dies_shows_its_last_words():
    start = time.monotonic()
    with pytest.raises(ConfigError, match="no model 'nonesuch'"):
        async with EngineProcess(ServeConfig(model="nonesuch", port=0)):
            pass
    assert time.monotonic() - start < 5  # said before torch is loaded


async def test_a_port_in_use_is_a_clear_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServeConfig(model="tiny", port=taken.getsockname()[1], threads=1)
        with pytest.raises(ConfigError, match="cannot listen"):
            async with EngineProcess(config):
                pass


async def test_a_child_that_is_too_slow_is_stopped():
    engine = EngineProcess(TINY, ready_within_s=0.2)
    with pytest.raises(InfraError, match="not ready within"):
        await engine.__aenter__()
    assert not psutil.pid_exists(engine.pid)


async def test_no_orphan_when_the_parent_is_killed():
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
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    child = int(await parent.stdout.readline())
    assert psutil.pid_exists(child)
    parent.kill()
    await parent.wait()
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
