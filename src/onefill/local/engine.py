"""The embedded engine: a model, its tokenizer and its generation thread, without HTTP.

Invariants:
- `live` holds exactly the sequences that were submitted and have not ended.
- Weights change only between two steps, all tensors or none, and cached prefixes go with them.
- Methods marked blocking are for worker threads; the others return at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from onefill.errors import ConfigError, DataError
from onefill.local.config import ServeConfig
from onefill.local.continuous import Core
from onefill.local.models import resolve
from onefill.local.params import SamplingParams
from onefill.local.sequence import Sequence
from onefill.local.stopping import StopWatch

__all__ = ["Counters", "Engine"]

_SCORED_LOGITS = 1 << 27  # most logits (positions x vocabulary) held at once when a prompt is scored


@dataclass(slots=True)
class Counters:
    """Running totals since the start."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    aborted: int = 0


class Engine:
    """Generates. Loading blocks for as long as the model takes.

    Args:
        config: what to serve and within which bounds.

    Raises:
        ConfigError: the model cannot be found, loaded or fitted into memory.
    """

    def __init__(self, config: ServeConfig) -> None:
        if config.threads:
            torch.set_num_threads(config.threads)
        transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.config = config
        self.model_path = self.tokenizer_path = str(resolve(config.model))
        self.weight_version = config.weight_version
        self.counters = Counters()
        self.live: dict[str, Sequence] = {}
        self._lock = threading.Lock()
        self._update = threading.Lock()
        self.tokenizer = _load_tokenizer(self.model_path)
        self._model = _load_model(self.model_path)
        text = self._model.config.get_text_config()
        own = int(getattr(text, "max_position_embeddings", 0) or config.max_total_tokens)
        self.context_length = min(config.context_length, own) if config.context_length else own
        self.vocab_size = int(self._model.get_input_embeddings().num_embeddings)
        self.eos_ids = _eos_ids(self._model, self.tokenizer)
        self.model_type = str(getattr(self._model.config, "model_type", ""))
        self.architectures = getattr(self._model.config, "architectures", None)
        self._core = Core(
            self._model,
            version=lambda: self.weight_version,
            max_requests=config.max_running_requests,
            max_total_tokens=config.max_total_tokens,
            max_batch_tokens=config.max_batch_tokens,
            page_size=config.page_size,
            share_prefixes=not config.disable_radix_cache,
            deterministic=config.deterministic,
            seed=config.seed,
        )
        self.capacity = self._core.capacity

    def decode(self, ids: SequenceOf[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids; ids that the tokenizer does not know read as nothing."""
        text = self.tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt string, with the special tokens that the tokenizer adds."""
        return [int(i) for i in self.tokenizer.encode(text)]

    def room(self, prompt: SequenceOf[int], params: SamplingParams) -> int:
        """How many tokens a response to this prompt may get. Follows SGLang 0.5.23, also in what it clips.

        Raises:
            DataError: the prompt is empty, too long or holds an id that is no token; or too much is asked for.
        """
        if not prompt:
            raise DataError("The input is empty: input_ids and text must hold at least one token.")
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise DataError(f"Token id {bad} is outside the vocabulary (0..{self.vocab_size - 1}).")
        count, asked = len(prompt), params.max_new_tokens
        if count >= self.context_length:
            raise DataError(
                f"The input ({count} tokens) is longer than the model's context length "
                f"({self.context_length} tokens)."
            )
        if count >= self.capacity - 1:
            raise DataError(f"Request prompt exceeds the KV memory budget: input_len={count}, cache={self.capacity}.")
        if asked is not None and asked + count > self.context_length:
            raise DataError(
                "Requested token count exceeds the model's maximum context length of "
                f"{self.context_length} tokens: {count} tokens from the input and {asked} for the completion."
            )
        longest = min(self.context_length, self.capacity) - 1
        return max(0, min(1 << 30 if asked is None else asked, longest - count - 1))

    def watch(self, params: SamplingParams) -> StopWatch | None:
        """What looks for the stop strings of one response, or None where it has none."""
        if not params.stop and not params.stop_regex:
            return None
        # special tokens are text here, whatever the reply shows: SGLang stops at "<|im_end|>" as a string too
        return StopWatch(lambda ids: self.decode(ids, skip_special_tokens=False), params.stop, params.stop_regex)

    def submit(self, prompt: list[int], sequences: SequenceOf[Sequence]) -> None:
        """Queues the samples of one prompt.

        Raises:
            InfraError: the engine has stopped.
        """
        for sequence in sequences:
            self._track(sequence)
        try:
            self._core.submit(prompt, sequences)
        except BaseException:
            with self._lock:
                for sequence in sequences:
                    self.live.pop(sequence.rid, None)
            raise
        self.counters.prompt_tokens += len(prompt) * len(sequences)

    def _track(self, sequence: Sequence) -> None:
        tell = sequence.notify

        def news() -> None:
            if sequence.finish is not None:
                with self._lock:
                    self.live.pop(sequence.rid, None)
                    self.counters.finished += 1
                    self.counters.aborted += sequence.finish["type"] == "abort"
                    self.counters.generated_tokens += len(sequence.tokens)
            tell()

        sequence.notify = news
        with self._lock:
            self.live[sequence.rid] = sequence

    def abort(self, sequences: SequenceOf[Sequence]) -> None:
        """Asks for these to end, keeping what they have."""
        pending = [s for s in sequences if s.finish is None]
        if pending:
            self._core.abort(pending)

    def abort_all(self) -> list[Sequence]:
        """Asks for everything to end; returns what was asked."""
        with self._lock:
            pending = list(self.live.values())
        self.abort(pending)
        return pending

    def abort_matching(self, rid: str) -> None:
        """Aborts by request id as SGLang does: a known id, and then all that begin with it."""
        with self._lock:
            known = rid in self.live
            pending = [s for r, s in self.live.items() if known and r.startswith(rid)]
        self.abort(pending)

    def load(self) -> tuple[int, int]:
        """How many sequences run and how many wait."""
        with self._lock:
            started = sum(s.cached_tokens is not None for s in self.live.values())
            return started, len(self.live) - started

    def waiting_tokens(self) -> int:
        """Prompt tokens of the sequences that wait."""
        with self._lock:
            return sum(s.prompt_tokens for s in self.live.values() if s.cached_tokens is None)

    @property
    def alive(self) -> bool:
        """Whether the generation thread takes requests."""
        return self._core.alive

    @property
    def paused(self) -> bool:
        """Whether generation is paused."""
        return self._core.paused

    @property
    def used_tokens(self) -> int:
        """Tokens' worth of cache in use."""
        return self._core.used

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens run through the model so far."""
        return self._core.prefilled

    def pause(self, mode: str) -> None:
        """Stops generating (blocking).

        Args:
            mode: `abort` ends all requests; `retract` queues them again and frees their cache; `in_place` keeps it.
        """
        self._core.paused = True
        if mode == "abort":
            _wait_ended(self.abort_all())
        with self._core.parked():
            if mode == "retract":
                self._core.retract()

    def resume(self) -> None:
        """Goes on generating."""
        self._core.paused = False

    def wait_idle(self, timeout: float) -> bool:
        """Waits until nothing is queued or running (blocking); False where that took too long."""
        deadline = time.monotonic() + timeout
        while self.live:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        return True

    def flush_cache(self, timeout: float = 0.0) -> bool:
        """Forgets all cached prefixes (blocking). False, and nothing done, where work is queued or running.

        Requests that were retracted hold no cache, so they are no hindrance.
        """
        retracted = self.paused and self._core.running == 0
        if not retracted and not self.wait_idle(timeout):
            return False
        with self._core.parked():
            self._core.drop_cached_prefixes()
        return True

    def update_weights(self, path: str, *, version: str | None, flush: bool, abort: bool, keep_pause: bool) -> int:
        """Replaces all weights by those of a checkpoint (blocking). Running requests go on with the new ones.

        Args:
            path: a known name, local directory or hub name.
            version: what the new weights are called; None keeps the name.
            flush: recompute what running requests have cached, and forget all cached prefixes. Otherwise both stay
                as the old weights left them.
            abort: abort all requests first.
            keep_pause: leave generation paused.

        Returns:
            How many running requests were retracted.

        Raises:
            ConfigError: the checkpoint cannot be loaded or is of another shape. Nothing has changed then.
        """
        with self._update:
            where = str(resolve(path))
            fresh = _load_model(where).state_dict()
            own = self._model.state_dict()
            _check_same_shape(own, fresh)
            if abort:
                _wait_ended(self.abort_all())
            with self._core.parked(), torch.no_grad():
                retracted = self._core.retract() if flush else 0
                for name, tensor in own.items():
                    tensor.copy_(fresh[name])
                if flush:
                    self._core.drop_cached_prefixes()
                if version is not None:
                    self.weight_version = version
                if keep_pause:
                    self._core.paused = True
            self.model_path = where
            return retracted

    def score(self, prompt: list[int]) -> list[float]:
        """Log softmax at every prompt token but the first, given those before (blocking); shape [tokens - 1]."""
        ids = torch.tensor([prompt])
        step = max(1, _SCORED_LOGITS // self.vocab_size)
        scores: list[float] = []
        with self._core.parked(), torch.no_grad():
            for start in range(0, len(prompt) - 1, step):
                rows = torch.arange(start, min(start + step, len(prompt) - 1))
                logits: Tensor = self._model(input_ids=ids, use_cache=False, logits_to_keep=rows).logits[0].float()
                scores += log_softmax(logits, dim=-1).gather(1, ids[0, rows + 1].unsqueeze(1)).squeeze(1).tolist()
        return scores

    def close(self) -> None:
        """Stops (blocking). What was live ends as aborted."""
        self._core.close()


def _wait_ended(sequences: SequenceOf[Sequence], timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while any(s.finish is None for s in sequences) and time.monotonic() < deadline:
        time.sleep(0.005)


def _load_tokenizer(path: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load the tokenizer of {path}: {error}") from error


def _load_model(path: str) -> Any:
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ConfigError(f"cannot load the model of {path}: {error}") from error
    loaded: Any = model
    return loaded.eval().requires_grad_(False)


def _eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    own = getattr(model.generation_config, "eos_token_id", None)
    ids = [*own] if isinstance(own, list) else [own]
    return tuple(sorted({int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None and i >= 0}))


def _check_same_shape(own: dict[str, Tensor], fresh: dict[str, Tensor]) -> None:
    if missing := sorted(own.keys() ^ fresh.keys()):
        raise ConfigError(f"the checkpoint is of another architecture: {missing[0]} is only in one of the two models")
    for name, tensor in own.items():
        if tensor.shape != fresh[name].shape:
            raise ConfigError(
                f"the checkpoint is of another size: {name} is {tuple(fresh[name].shape)}, not {tuple(tensor.shape)}"
            )
