"""The embedded engine: SGLang's HTTP protocol over Hugging Face transformers' continuous batching, on a CPU.

Importing this room loads neither torch nor transformers; `serve` does, after it has checked what it can without.
"""

from __future__ import annotations

import socket

from onefill.errors import ConfigError
from onefill.local.config import ServeConfig
from onefill.local.models import resolve

__all__ = ["ServeConfig", "serve"]


def serve(config: ServeConfig) -> None:
    """Serves until SIGINT or SIGTERM. Blocks. One line on stderr tells the URL once requests are taken.

    Raises:
        ConfigError: the model cannot be had or loaded, a package is missing, or the port is taken.
    """
    with _bind(config.host, config.port) as listener:
        resolve(config.model)
        try:
            from onefill.local.server import run  # noqa: PLC0415 (torch)
        except ModuleNotFoundError as error:
            raise ConfigError(f"the embedded engine needs {error.name}: pip install 'onefill[local]'") from error
        run(config, listener)


def _bind(host: str, port: int) -> socket.socket:
    """A socket that holds the address but does not listen yet, so that nobody connects before the model is there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
    return listener
