"""The embedded engine: SGLang's HTTP protocol over Hugging Face transformers' continuous batching, on a CPU.

Importing this room loads neither torch nor transformers; `serve` does.
"""

from __future__ import annotations

from onefill.local.config import ServeConfig

__all__ = ["ServeConfig", "serve"]


def serve(config: ServeConfig) -> None:
    """Serves until SIGINT or SIGTERM. Blocks.

    Raises:
        ConfigError: the model cannot be loaded, or the port is taken.
    """
    from onefill.local.server import run  # noqa: PLC0415 (torch)

    run(config)
