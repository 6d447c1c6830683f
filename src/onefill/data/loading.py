"""Finding and loading a tokenizer: a directory, a file, the hub.

Invariants: with a tokenizer.json only the small `tokenizers` library is used, set up as transformers sets it up
(padding and truncation off, tokens of tokenizer_config.json added, `add_bos_token` there ignored in favour of
tokenizer.json's own post-processor); without one transformers is asked. Every failure is a ConfigError that
says what to do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Rust

from onefill.data.template import ChatTemplate
from onefill.data.tokenizer import Tokenizer
from onefill.errors import ConfigError

__all__ = ["load_tokenizer"]

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_HUB_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """See `Tokenizer.load`."""
    at = Path(path)
    if at.is_file() and at.name == "tokenizer.json":
        at = at.parent
    if at.is_dir():
        return _from_json(at, str(at)) if (at / "tokenizer.json").is_file() else _from_transformers(str(at))
    if _is_hub_name(str(path)):
        directory = _from_hub(str(path))
        return _from_json(directory, str(path)) if directory else _from_transformers(str(path))
    raise ConfigError(f"no tokenizer at {path}: give a directory with tokenizer.json, or a hub name (org/model)")


def _is_hub_name(path: str) -> bool:
    parts = path.split("/")
    return len(parts) <= 2 and all(parts) and not path.startswith((".", "~", "/"))


def _from_hub(name: str) -> Path | None:
    """Fetches the tokenizer's files; the directory of its tokenizer.json, or None where it has none."""
    try:
        from huggingface_hub import hf_hub_download  # noqa: PLC0415
        from huggingface_hub.errors import EntryNotFoundError  # noqa: PLC0415
    except ImportError:
        raise ConfigError(
            f"{name} is no directory here, and huggingface_hub is not installed to fetch it: "
            "pip install huggingface_hub, or give a local directory"
        ) from None
    directory: Path | None = None
    for file in _HUB_FILES:
        try:
            got = Path(hf_hub_download(name, file))
        except EntryNotFoundError as error:
            if "Local" in type(error).__name__:  # offline, and not in the cache
                raise _unreachable(name, error) from error
            if file == "tokenizer.json":
                return None
            continue
        except Exception as error:
            raise _unreachable(name, error) from error
        directory = directory or got.parent
    return directory


def _unreachable(name: str, error: Exception) -> ConfigError:
    first = str(error).strip().partition("\n")[0]
    return ConfigError(
        f"the tokenizer {name} is no directory here and could not be fetched from the hub "
        f"({type(error).__name__}: {first}): check the name and the network, or give a local directory"
    )


def _from_json(directory: Path, origin: str) -> Tokenizer:
    try:
        rust = Rust.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(
            f"{directory / 'tokenizer.json'} cannot be read ({error}): fetch it again, or update tokenizers"
        ) from error
    config = _config(directory)
    named = {name: text for name in _NAMED if (text := _content(config.get(name))) is not None}
    _settle(rust, config, named)
    template = _template_source(directory, config)
    return Tokenizer(
        backend=_RustBackend(rust),
        template=None if template is None else ChatTemplate(template, variables=named, origin=origin),
        origin=origin,
        eos=named.get("eos_token"),
        pad=named.get("pad_token"),
    )


def _config(directory: Path) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):  # the latter wins
        file = directory / name
        if not file.is_file():
            continue
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{file} is not JSON ({error}): fetch it again") from error
        merged.update(values)
    return merged


def _content(token: Any) -> str | None:
    """A token in tokenizer_config.json is a string, or an object with `content`."""
    value = token.get("content") if isinstance(token, Mapping) else token
    return value if isinstance(value, str) else None


def _settle(rust: Rust, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Sets the library's tokenizer up as transformers does when it loads the same directory."""
    rust.no_padding()
    rust.no_truncation()
    decoder = config.get("added_tokens_decoder") or {}
    known = {token.content for token in rust.get_added_tokens_decoder().values()}
    for _, token in sorted(decoder.items(), key=lambda pair: int(pair[0])):
        if token["content"] not in known:
            flags = {key: bool(token.get(key)) for key in ("single_word", "lstrip", "rstrip", "normalized")}
            rust.add_tokens([AddedToken(token["content"], special=bool(token.get("special")), **flags)])
            known.add(token["content"])
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    extra = extra.values() if isinstance(extra, Mapping) else extra
    for text in [*named.values(), *filter(None, map(_content, extra))]:
        if text not in known:
            rust.add_special_tokens([AddedToken(text, special=True, normalized=False)])
            known.add(text)


def _template_source(directory: Path, config: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if source is None and (directory / "chat_template.json").is_file():  # processors of vision models
        source = json.loads((directory / "chat_template.json").read_text(encoding="utf-8")).get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}
    if isinstance(source, Mapping):
        source = source.get("default")
    return source if isinstance(source, str) else None


class _RustBackend:
    """The `tokenizers` library."""

    def __init__(self, rust: Rust) -> None:
        self._rust = rust
        vocabulary = rust.get_vocab_size(with_added_tokens=True)
        added = rust.get_added_tokens_decoder()
        self._size = max(vocabulary, max(added, default=-1) + 1)

    @property
    def size(self) -> int:
        return self._size

    def encode(self, text: str, *, special: bool) -> Sequence[int]:
        ids: list[int] = self._rust.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        return str(self._rust.decode(ids, skip_special_tokens=skip_special))

    def token_to_id(self, token: str) -> int | None:
        found: int | None = self._rust.token_to_id(token)
        return found


def _from_transformers(path: str) -> Tokenizer:
    try:
        from transformers import AutoTokenizer  # noqa: PLC0415
    except ImportError:
        raise ConfigError(
            f"{path} has no tokenizer.json, and transformers is not installed to read what it has: "
            "pip install 'onefill[local]', or convert the tokenizer to tokenizer.json"
        ) from None
    try:
        loaded = AutoTokenizer.from_pretrained(path)
    except Exception as error:
        raise ConfigError(f"{path} holds no tokenizer that transformers can load ({error})") from error
    source = loaded.chat_template
    if isinstance(source, Mapping):
        source = source.get("default")
    named = dict(loaded.special_tokens_map)
    return Tokenizer(
        backend=_TransformersBackend(loaded),
        template=None if source is None else ChatTemplate(source, variables=named, origin=path),
        origin=path,
        eos=loaded.eos_token,
        pad=loaded.pad_token,
    )


class _TransformersBackend:
    """A tokenizer of transformers, for models without tokenizer.json."""

    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded

    @property
    def size(self) -> int:
        return len(self._loaded)

    def encode(self, text: str, *, special: bool) -> Sequence[int]:
        ids: list[int] = self._loaded.encode(text, add_special_tokens=special)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        return str(self._loaded.decode(ids, skip_special_tokens=skip_special))

    def token_to_id(self, token: str) -> int | None:
        found = self._loaded.get_vocab().get(token)
        return None if found is None else int(found)
