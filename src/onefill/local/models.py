"""Where models come from: known names, local directories, the Hugging Face hub.

Invariants:
- A model directory appears in the cache whole or not at all, also when two processes fetch it at once.
- Importing this module loads neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from onefill.errors import ConfigError

__all__ = ["cache_dir", "fetched", "known", "pull", "resolve"]

_KNOWN = MappingProxyType(
    {
        "smollm2-135m": "SmolLM2-135M-Instruct, fp32 (Apache-2.0); fetched once, about 150 MB, 540 MB on disk",
        "tiny": "a random two-layer Llama with a byte-level tokenizer, built on the spot; for tests",
    }
)
_VERSION = "2"  # of what the builders write; a change builds anew


def known() -> Mapping[str, str]:
    """The names that `pull` knows, each with a line about it."""
    return _KNOWN


def fetched(name: str) -> bool:
    """Whether a known model is in the cache."""
    return (_place(name) / "config.json").is_file()


def _place(name: str) -> Path:
    return cache_dir() / f"{name}-v{_VERSION}"


def cache_dir() -> Path:
    """Where models are kept: `$ONEFILL_CACHE/models`, or the platform's cache directory."""
    root = os.environ.get("ONEFILL_CACHE")
    if root:
        return Path(root) / "models"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "onefill" / "models"


def resolve(name_or_path: str) -> Path:
    """The local directory of a model, fetching it first where that is needed.

    Args:
        name_or_path: a known name, a local directory with a `config.json`, or a hub name such as `org/model`.

    Raises:
        ConfigError: there is no such model, or it cannot be fetched; the message says why.
    """
    if name_or_path in _KNOWN:
        return pull(name_or_path)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{path} is no model directory: it has no config.json")
        return path.resolve()
    if name_or_path.count("/") == 1 and not name_or_path.startswith((".", "/", "~")):
        return _from_hub(name_or_path)
    raise ConfigError(
        f"no model {name_or_path!r}: it is neither a directory nor one of {', '.join(_KNOWN)} "
        "nor a hub name (org/model)"
    )


def pull(name: str) -> Path:
    """Fetches or builds a known model once and returns its directory.

    Raises:
        ConfigError: the name is not known, or the model cannot be fetched.
    """
    if name not in _KNOWN:
        raise ConfigError(f"unknown model {name!r}; known: {', '.join(_KNOWN)}")
    final = _place(name)
    if fetched(name):
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(final.with_suffix(".lock")):
            if not fetched(name):
                _build_into(final, _builder(name))
    except OSError as error:
        raise ConfigError(f"cannot write model {name} to {final.parent} (set ONEFILL_CACHE?): {error}") from error
    return final


def _builder(name: str) -> Callable[[Path], None]:
    if name == "tiny":
        from onefill.local.tiny import build  # noqa: PLC0415 (torch)
    else:
        from onefill.local.smollm2 import build  # noqa: PLC0415 (torch)
    return build


def _build_into(final: Path, build: Callable[[Path], None]) -> None:
    """Builds beside the final place and moves the result there in one step."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        build(scratch)
        scratch.chmod(0o755)
        scratch.rename(final)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a file lock; another process that wants it waits."""
    import fcntl  # noqa: PLC0415 (not on every platform)

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError  # noqa: PLC0415

    wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"cannot reach the hub for model {name}, and it is not in the local cache: "
            "go online, or give a local directory"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ConfigError(f"cannot fetch model {name} from the hub: {error}") from error
