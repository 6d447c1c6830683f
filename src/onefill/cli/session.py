"""Puts a run together from its settings: engines, tokenizer, prompts, rewards, sink.

Invariants:
- What is started here (embedded engines, sessions, reward workers) ends here, on every way out.
- The tokenizer is loaded when the first prompt needs it; a run on `input_ids` needs none.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import orjson

from onefill.cli.extras import need_local
from onefill.cli.settings import RolloutSettings
from onefill.data import Fields, Source, Tokenizer, open_files, open_task, tokenize
from onefill.engine import (
    Deadlines,
    EngineClient,
    EngineInfo,
    EngineKind,
    Limits,
    Placeholders,
    RetryPolicy,
    capabilities,
    open_session,
)
from onefill.errors import ConfigError, InfraError
from onefill.rollout import Engine
from onefill.types import Prompt

__all__ = ["Connected", "LazyTokenizer", "connect", "new_ids", "open_source"]


@dataclass(frozen=True, slots=True)
class Connected:
    """The engines of a run.

    Args:
        engines: as the dispatcher takes them.
        clients: the same engines' clients, for their counters.
        infos: what each says of itself.
        tokenizer: loads on first use.
    """

    engines: Sequence[Engine]
    clients: Sequence[EngineClient]
    infos: Sequence[EngineInfo]
    tokenizer: LazyTokenizer

    @property
    def requests_sent(self) -> int:
        return sum(client.stats.requests_sent for client in self.clients)

    @property
    def requests_retried(self) -> int:
        return sum(client.stats.requests_retried for client in self.clients)


class LazyTokenizer:
    """A tokenizer that is loaded when it is first needed. Thread-safe.

    Args:
        where: directory or hub name, or None where nobody knows one.
        chat: whether a string prompt goes through the chat template (None: it does where there is one).
        system: a system message to put first, or None.
    """

    def __init__(self, where: str | None, *, chat: bool | None, system: str | None) -> None:
        self._where = where
        self._chat = chat
        self._system = system
        self._lock = threading.Lock()
        self._loaded: Tokenizer | None = None

    def get(self) -> Tokenizer:
        """The tokenizer. Raises ConfigError where there is none to load."""
        with self._lock:
            if self._loaded is None:
                if self._where is None:
                    raise ConfigError(
                        "the prompts are text, and the engine names no tokenizer that is here: give --tokenizer DIR"
                    )
                self._loaded = Tokenizer.load(self._where)
            return self._loaded

    def prepare(self, prompt: Prompt) -> Prompt:
        """Gives a prompt its token ids; token ids of the data are left as they are."""
        if prompt.tokens is not None:
            return prompt
        return tokenize(prompt, self.get(), chat=self._chat, system=self._system)


@asynccontextmanager
async def connect(settings: RolloutSettings, *, log: Callable[[str], None]) -> AsyncIterator[Connected]:
    """Starts what is local, asks every engine what it is, and ends what it started.

    Raises:
        ConfigError: no tokenizer can be found, or packages for the embedded engine are missing.
        InfraError: an engine does not answer.
    """
    _allow_connections(settings.concurrency)
    async with AsyncExitStack() as stack:
        urls = [await _start_local(settings, stack, log) if e == "local" else e for e in settings.engine]
        session = await stack.enter_async_context(open_session())
        infos = [await _describe(url, session) for url in urls]
        patience = Deadlines(total=settings.request_timeout, between_bytes=settings.request_timeout)
        clients = [EngineClient(url, session=session, deadlines=patience, rng=random.Random(url)) for url in urls]
        where = _tokenizer_path(settings, infos)
        tokenizer = LazyTokenizer(where, chat=settings.apply_chat_template, system=settings.system)
        for client, info in zip(clients, infos, strict=True):
            client.limits = await asyncio.to_thread(_limits, info, tokenizer if where else None, log)
            client.placeholders = await asyncio.to_thread(_placeholders, info, tokenizer if where else None)
        engines = [
            Engine(url=client.url, client=client, capabilities=capabilities(info))
            for client, info in zip(clients, infos, strict=True)
        ]
        yield Connected(engines, clients, infos, tokenizer)


def _allow_connections(concurrency: int) -> None:
    """Raises the limit of open files where the requests in flight would not fit (each has a connection)."""
    try:
        import resource  # noqa: PLC0415 - not on every platform
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = concurrency + 256
    if soft == resource.RLIM_INFINITY or soft >= need:
        return
    if hard != resource.RLIM_INFINITY and hard < need:
        raise ConfigError(
            f"--concurrency {concurrency} needs {need} open files, this system allows {hard}: lower it, or ulimit -n"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))


async def _describe(url: str, session: aiohttp.ClientSession) -> EngineInfo:
    """Asks with little patience: at the start of a run a wrong address is likelier than an engine that is busy."""
    probe = EngineClient(url, session=session, policy=RetryPolicy(retries=2), rng=random.Random(url))
    try:
        info = await probe.describe()
        if info.kind is EngineKind.UNKNOWN and not (info.model_path or info.version):
            raise ConfigError(
                f"what answers at {url} is no engine: neither /server_info nor /model_info is there; "
                "is the address right, and without a path?"
            )
        return info
    except InfraError as error:
        raise InfraError(f"no engine answers at {url}: {error}; is it running, and is the address right?") from error


async def _start_local(settings: RolloutSettings, stack: AsyncExitStack, log: Callable[[str], None]) -> str:
    need_local()
    from onefill.local.config import ServeConfig  # noqa: PLC0415 - only where it is asked for
    from onefill.local.process import EngineProcess  # noqa: PLC0415

    log(f"starting the embedded engine with {settings.model} ...")
    config = ServeConfig(model=settings.model, port=0, threads=settings.threads or 0, seed=settings.seed)
    process = await stack.enter_async_context(EngineProcess(config))
    return process.url


def _tokenizer_path(settings: RolloutSettings, infos: Sequence[EngineInfo]) -> str | None:
    """--tokenizer, else what the engines name: a directory that is here too, or a name on the hub."""
    if settings.tokenizer:
        return settings.tokenizer
    named = [path for info in infos for path in (info.tokenizer_path, info.model_path) if path]
    here = (path for path in named if _is_here(path))
    on_the_hub = (path for path in named if re.fullmatch(r"[\w.-]+/[\w.-]+", path))
    return next(here, None) or next(on_the_hub, None)


def _is_here(path: str) -> bool:
    """An absolute directory: a relative one would be another on this machine than on the engine's."""
    return Path(path).is_absolute() and Path(path).is_dir()


def _limits(info: EngineInfo, tokenizer: LazyTokenizer | None, log: Callable[[str], None]) -> Limits:
    """What must not be sent. A tokenizer's vocabulary may be smaller than the model's, which may answer with more."""
    vocab, exact = info.vocab_size or _vocab_in(info.model_path), True
    if vocab is None and tokenizer is not None:
        try:
            vocab, exact = tokenizer.get().vocab_size, False
        except ConfigError as error:
            log(f"warning: {error}")
    if vocab is None:
        log(
            f"warning: engine {info.url} does not tell its vocabulary and no tokenizer is here, so token ids go out "
            "unchecked (SGLang 0.5.23 dies of an id past it): give --tokenizer"
        )
    return Limits(vocab_size=vocab, context_length=info.usable_context, exact=exact)


def _vocab_in(model: str) -> int | None:
    """Rows of the embedding, from the model's own config where its directory is here too."""
    if not _is_here(model):
        return None
    try:
        config = orjson.loads((Path(model) / "config.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    for part in (config, config.get("text_config")) if isinstance(config, dict) else ():
        if isinstance(part, dict) and isinstance(part.get("vocab_size"), int):
            return int(part["vocab_size"])
    return None


def _placeholders(info: EngineInfo, tokenizer: LazyTokenizer | None) -> Placeholders | None:
    """A model that sees can make up placeholder tokens; a text model's ids mean nothing of the kind."""
    if tokenizer is None or not info.has_image_understanding:
        return None
    loaded = tokenizer.get()
    if not loaded.placeholder_ids or loaded.pad_id is None:
        return None
    return Placeholders(ids=loaded.placeholder_ids, pad_id=loaded.pad_id)


def open_source(settings: RolloutSettings) -> Source:
    """Where the run's prompts come from.

    Raises:
        ConfigError: unknown task.
        DataError: files that are not there or cannot be read.
    """
    if settings.task_name is not None:
        return open_task(settings.task_name, seed=settings.seed)
    fields = Fields(
        prompt=settings.prompt_key,
        label=settings.label_key,
        image=settings.image_key,
        video=settings.video_key,
        audio=settings.audio_key,
    )
    shuffle = settings.seed if settings.shuffle else None
    return open_files(settings.data, fields=fields, shuffle_seed=shuffle, epochs=settings.epochs)


def new_ids() -> Callable[[], str]:
    """Request ids of one length, so that none is a prefix of another (SGLang aborts by prefix)."""
    run = secrets.token_hex(4)
    counter = itertools.count()
    return lambda: f"{run}-{next(counter):010x}"
