"""What is only there with an extra."""

from __future__ import annotations

from importlib.util import find_spec

from onefill.errors import ConfigError

__all__ = ["need_local"]


def need_local() -> None:
    """Raises ConfigError where the embedded engine's packages are not installed."""
    missing = [name for name in ("torch", "transformers", "gguf", "safetensors") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the embedded engine needs {', '.join(missing)}: pip install 'onefill[local]', "
            "or name a running server with --engine http://host:30000"
        )
