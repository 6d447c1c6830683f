"""The built-in rewards that run a computer algebra system or a task's own scorer.

Invariants: they may hang or eat memory on what a model wrote, so they are only ever called in a worker process,
with the libraries' own timeouts off (math-verify's need the main thread's SIGALRM); the time limit is the pool's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from onefill.reward.answers import final_answer, label_text

__all__ = ["SCORERS", "Scorer"]

Scorer = Callable[[str, Any, Any], float]
"""Called with the response, the label, and the scorer's own part of the metadata. Raises ValueError with a reason."""


def math_scorer() -> Scorer:
    """`math`: 1 where the response's last expression equals the label, as math-verify sees it."""
    from math_verify import parse, verify  # noqa: PLC0415

    @lru_cache(maxsize=64)
    def gold_of(label: str) -> Any:
        delimited = "$" in label or "\\(" in label or "\\[" in label
        return parse(label if delimited else f"${label}$", fallback_mode="no_fallback", parsing_timeout=None)

    def score(text: str, label: Any, extra: Any) -> float:
        del extra
        gold = gold_of(label_text(label))
        if not gold:
            raise ValueError(f"the label {label!r:.60} is not a mathematical expression")
        marked = final_answer(text)
        answer = f"\\boxed{{{marked}}}" if marked != text.strip() else text
        return float(verify(gold, parse(answer, parsing_timeout=None), timeout_seconds=None))

    return score


def reasoning_gym_scorer() -> Scorer:
    """`reasoning-gym`: what the task's own scorer says of the final answer, from 0 to 1."""
    from reasoning_gym.factory import create_dataset  # noqa: PLC0415

    datasets: dict[str, Any] = {}

    def score(text: str, label: Any, extra: Any) -> float:
        if not isinstance(extra, Mapping) or "task" not in extra:
            raise ValueError("the prompt is not of a reasoning-gym task: use --task, or another reward")
        key = repr((extra["task"], extra.get("options")))
        if key not in datasets:
            datasets[key] = create_dataset(extra["task"], seed=0, size=1, **extra.get("options", {}))
        entry = {"question": extra["question"], "answer": label, "metadata": extra["metadata"]}
        return float(datasets[key].score_answer(final_answer(text), entry))

    return score


SCORERS: Mapping[str, Callable[[], Scorer]] = {"math": math_scorer, "reasoning-gym": reasoning_gym_scorer}
