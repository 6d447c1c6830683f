"""Finished groups for the tests of this room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onefill.types import Completion, FinishReason, Group, Prompt, SamplingParams, token_array


def finished(texts: Sequence[str | None], label: Any = None, metadata: Mapping[str, Any] | None = None) -> Group:
    """A group whose samples said `texts`; None is a sample that failed."""
    prompt = Prompt(id="g", text="the question", label=label, metadata=metadata or {})
    group = Group.of(prompt, len(texts), SamplingParams())
    for sample, text in zip(group.samples, texts, strict=True):
        if text is None:
            sample.fail("the engine is gone")
            continue
        sample.append(
            Completion(
                tokens=token_array([1, 2]),
                logprobs=np.zeros(2, dtype=np.float32),
                text=text,
                finish_reason=FinishReason.STOP,
                prompt_tokens=3,
            )
        )
    return group
