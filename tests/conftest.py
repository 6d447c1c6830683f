"""One embedded engine as a process of its own, for tests of the whole path."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of an embedded engine that serves `tiny`."""
    log = tmp_path_factory.mktemp("engine") / "log"
    command = [
        sys.executable,
        "-m",
        "onefill.local",
        "--model",
        "tiny",
        "--port",
        "0",
        "--seed",
        "1",
        "--threads",
        "2",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        yield _ready(process, log)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)


def _ready(process: subprocess.Popen[bytes], log: Path) -> str:
    for _ in range(1200):
        if match := re.search(r"is listening on (http://\S+)", log.read_text()):
            return match[1]
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    raise AssertionError(log.read_text())


def generate_calls(url: str) -> int:
    """How many `/generate` requests the engine itself counted."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
        text = page.read().decode()
    return sum(
        int(float(line.split()[-1]))
        for line in text.splitlines()
        if line.startswith("onefill_http_requests_total{") and 'path="/generate"' in line
    )
