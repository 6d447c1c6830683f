"""How the embedded engine is set up: one frozen record, checked where it is made."""

from __future__ import annotations

from dataclasses import dataclass

from onefill.errors import ConfigError

__all__ = ["ServeConfig"]

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What `serve` needs to know.

    Args:
        model: a known name (`smollm2-135m`, `tiny`), a local directory, or a hub name.
        host: address to listen on.
        port: TCP port; 0 picks a free one.
        threads: torch threads; 0 leaves torch's own choice.
        max_running_requests: most samples that decode together.
        max_total_tokens: size of the KV cache in tokens, over all samples. Bounds the memory.
        max_batch_tokens: most tokens of one forward pass; longer prompts are prefilled in chunks.
        page_size: tokens a cache block holds; prefixes are shared in whole blocks.
        context_length: longest prompt plus response; 0 takes the model's own limit.
        seed: seed of the sampler's random generator; None draws one.
        deterministic: sample by `sampling_seed` (default 42), as SGLang's deterministic mode does.
        disable_radix_cache: share no prefix between requests. Forks of one request still share.
        weight_version: what the weights that are loaded at start are called.
        parent_pid: stop when this process is gone; 0 watches nobody.

    Raises:
        ConfigError: a value is out of its range; the message names the flag.
    """

    model: str = DEFAULT_MODEL
    host: str = "127.0.0.1"
    port: int = 30000
    threads: int = 0
    max_running_requests: int = 64
    max_total_tokens: int = 32768
    max_batch_tokens: int = 512
    page_size: int = 32
    context_length: int = 0
    seed: int | None = None
    deterministic: bool = False
    disable_radix_cache: bool = False
    weight_version: str = "default"
    parent_pid: int = 0

    def __post_init__(self) -> None:
        for flag, good, want in (
            ("--model", bool(self.model), "not empty"),
            ("--port", 0 <= self.port <= 65535, "in 0..65535"),
            ("--threads", self.threads >= 0, "0 (torch decides) or more"),
            ("--max-running-requests", self.max_running_requests >= 1, "at least 1"),
            ("--max-total-tokens", self.max_total_tokens >= 64, "at least 64"),
            ("--max-batch-tokens", self.max_batch_tokens >= 8, "at least 8"),
            ("--page-size", 4 <= self.page_size <= 1024, "in 4..1024"),
            ("--context-length", self.context_length >= 0, "0 (the model's) or more"),
        ):
            if not good:
                raise ConfigError(f"{flag} must be {want}, got {getattr(self, flag[2:].replace('-', '_'))!r}")
