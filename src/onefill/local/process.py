"""The embedded engine as a child process.

Invariants:
- Inside the `async with` block the engine answers; outside it the process is gone, with its whole group.
- No orphan: the child watches its parent and stops when that is gone, however it went.
- Importing this module loads neither torch nor transformers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from collections import deque
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

from onefill.errors import ConfigError, InfraError
from onefill.local.config import ServeConfig

__all__ = ["EngineProcess"]

_READY = re.compile(r"is listening on (http://\S+)")
_TAIL_LINES = 20
_POLL_S = 0.05


class EngineProcess:
    """Starts `python -m onefill.local`, waits until it is healthy, and stops it at the end of the block.

    Args:
        config: what to serve; port 0 (the default here is the config's) lets the child choose a free one.
        log: file for the child's output; None keeps it in a temporary file.
        ready_within_s: how long loading may take, fetching the model included.
        grace_s: how long the child may take to stop before it is killed.

    Raises:
        ConfigError: the child refused to start (exit status 2).
        InfraError: it died or did not become healthy in time. Both show its last log lines.
    """

    def __init__(
        self,
        config: ServeConfig,
        *,
        log: Path | None = None,
        ready_within_s: float = 600.0,
        grace_s: float = 5.0,
    ) -> None:
        self._config = config
        self._log = log
        self._own_log = log is None
        self._ready_within_s = ready_within_s
        self._grace_s = grace_s
        self._process: asyncio.subprocess.Process | None = None
        self.url = ""

    @property
    def pid(self) -> int:
        """The child's process id; 0 before it was started."""
        return self._process.pid if self._process is not None else 0

    async def __aenter__(self) -> Self:
        self._log = self._open_log()
        with self._log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "onefill.local",
                *_flags(self._config),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            await self._until_healthy(self._process)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.shield(self._stop())

    def _open_log(self) -> Path:
        if self._log is not None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            self._log.write_bytes(b"")
            return self._log
        handle, name = tempfile.mkstemp(prefix="onefill-local-", suffix=".log")
        os.close(handle)
        return Path(name)

    async def _until_healthy(self, process: asyncio.subprocess.Process) -> None:
        deadline = time.monotonic() + self._ready_within_s
        async with aiohttp.ClientSession(trust_env=False) as session:
            while True:
                if process.returncode is not None:
                    raise self._died(process.returncode)
                if not self.url and (match := _READY.search(self._output())):
                    self.url = match.group(1)
                if self.url and await _healthy(session, self.url):
                    return
                if time.monotonic() >= deadline:
                    raise InfraError(
                        f"the embedded engine was not ready within {self._ready_within_s:g} s; its log ends:\n"
                        f"{self.last_lines()}"
                    )
                await asyncio.sleep(_POLL_S)

    def _died(self, status: int) -> Exception:
        kind = ConfigError if status == 2 else InfraError
        return kind(f"the embedded engine ended with status {status}; its log ends:\n{self.last_lines()}")

    def _output(self) -> str:
        return self._log.read_text(errors="replace") if self._log is not None and self._log.exists() else ""

    def last_lines(self) -> str:
        """The last lines that the child wrote."""
        return "\n".join(deque(self._output().splitlines(), maxlen=_TAIL_LINES))

    async def _stop(self) -> None:
        process = self._process
        if process is not None:
            if process.returncode is None:
                _signal_group(process.pid, signal.SIGTERM)
                try:
                    async with asyncio.timeout(self._grace_s):
                        await process.wait()
                except TimeoutError:
                    _signal_group(process.pid, signal.SIGKILL)
                    await process.wait()
            _signal_group(process.pid, signal.SIGKILL)  # what the child may have left in its group
        if self._own_log and self._log is not None:
            self._log.unlink(missing_ok=True)


def _flags(config: ServeConfig) -> list[str]:
    flags = ["--parent-pid", str(os.getpid())]
    for field in fields(config):
        value = getattr(config, field.name)
        flag = f"--{field.name.replace('_', '-')}"
        if field.name == "parent_pid" or value is None or value is False:
            continue
        flags += [flag] if value is True else [flag, str(value)]
    return flags


async def _healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=5)) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
