"""What the figures were measured on."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import version
from pathlib import Path


def describe() -> dict[str, object]:
    names = ("onefill", "torch", "transformers", "aiohttp", "orjson", "pyarrow")
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in names},
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
