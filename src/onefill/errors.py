"""The errors of Onefill, sorted by who can do something about them.

Four kinds under `OnefillError`, and the kind decides what the rollout does next:

- `InfraError`: the engine or the network failed. The same request may work elsewhere or later.
- `DataError`: the input is at fault (a row, an image, a prompt that is too long). Never retried.
- `ProtocolError`: the engine answered, but broke the contract. Nothing of the answer is used; a native
  group falls back to single requests.
- `ConfigError`: the user asked for something that cannot be. Exit code 2.

Every message says what happened, where, and what to do next.
"""

from __future__ import annotations

__all__ = ["ConfigError", "DataError", "InfraError", "OnefillError", "ProtocolError"]


class OnefillError(Exception):
    """Base class of everything that Onefill raises on purpose."""


class InfraError(OnefillError):
    """An engine or the network failed in a way that another try, or another engine, may cure."""


class DataError(OnefillError):
    """The input cannot be rolled out. Trying again gives the same answer."""


class ProtocolError(OnefillError):
    """An engine's answer broke the contract, so nothing of it was applied.

    Args:
        message: what was wrong.
        engine: base URL of the engine that answered.
        request_id: the request that it answered.
        field: the first field of the reply that was wrong, for example `[3].meta_info.finish_reason`.
    """

    def __init__(self, message: str, *, engine: str = "", request_id: str = "", field: str = "") -> None:
        where = ", ".join(
            f"{name} {value}"
            for name, value in (("engine", engine), ("request", request_id), ("field", field))
            if value
        )
        super().__init__(f"{message} ({where})" if where else message)
        self.engine = engine
        self.request_id = request_id
        self.field = field


class ConfigError(OnefillError):
    """The command line, the configuration or the environment is not usable as it stands."""
