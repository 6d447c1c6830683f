r"""Final answers in responses, and the built-in rewards that only compare text: `exact` and `choice`.

Invariants: every search is linear in the length of the text, so no response can make these hang; they are cheap
enough to run without a process of their own.
"""

from __future__ import annotations

import re
from typing import Any

from onefill.reward.call import RewardInput, RewardOutcome

__all__ = ["choice", "exact", "final_answer", "label_text"]

_NO_LABEL = "the prompt has no label to compare with: name its key with --label-key"
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_SAID = re.compile(r"\b(?:answer|choice|option)\b[^\n]{0,24}?[^A-Za-z0-9\n]\(?\*{0,2}([A-Z])\b", re.IGNORECASE)
_LEADING = re.compile(r"[\s(*]*([A-Z])(?:[).:,*\s]|$)")
_LONE = re.compile(r"(?<![A-Za-z0-9'])\(?([A-Z])(?:\)|(?![A-Za-z0-9']))")
_LABEL = re.compile(r"[\s(]*([A-Za-z])[\s).:]*$")


def final_answer(text: str) -> str:
    r"""What a response gives as its answer.

    The last `<answer>...</answer>`; else the last `\boxed{...}`; else what follows the last `####`; else the
    whole text. Without surrounding space.
    """
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    if start >= 0:
        return text[start + len("<answer>") : end].strip()
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    marked = text.rfind("####")
    return text[marked + 4 :].strip() if marked >= 0 else text.strip()


def label_text(label: Any) -> str:
    """A label as text: of a worked solution (GSM8K's `... #### 42`, a boxed answer) the answer only."""
    return final_answer(label) if isinstance(label, str) else str(label)


def exact(call: RewardInput) -> RewardOutcome:
    """1 where the final answer equals the label, or one of a list of labels, but for case, space and commas."""
    if call.label is None:
        return RewardOutcome.failed(_NO_LABEL)
    labels = call.label if isinstance(call.label, list | tuple) else [call.label]
    answer = _normal(final_answer(call.text))
    return RewardOutcome(float(any(answer == _normal(label_text(label)) for label in labels)))


def choice(call: RewardInput) -> RewardOutcome:
    """1 where the letter that was chosen is the label's; 0 where it is another, or there is none."""
    if call.label is None:
        return RewardOutcome.failed(_NO_LABEL)
    label = _LABEL.match(str(call.label))
    if label is None:
        return RewardOutcome.failed(f"the label {call.label!r:.40} is not a letter, as `choice` needs")
    return RewardOutcome(float(_letter(call.text) == label[1].upper()))


def _letter(text: str) -> str | None:
    """The letter of a marked answer; else of the last "answer is X"; else the first word; else the last lone one."""
    marked = final_answer(text)
    if marked != text.strip() or len(marked) <= 3:
        found = _LABEL.match(marked) or _LEADING.match(marked)
        if found:
            return found[1].upper()
    said = _SAID.findall(text)
    if said:
        return str(said[-1]).upper()
    leading = _LEADING.match(text)
    if leading and leading[0].strip() not in {"A", "I"}:
        return leading[1].upper()
    lone = [letter for letter in _LONE.findall(text) if letter != "I"]
    return str(lone[-1]) if lone else None


def _last_boxed(text: str) -> str | None:
    at = text.rfind("\\boxed{")
    if at < 0:
        return None
    start = at + len("\\boxed{")
    depth = 1
    for i in range(start, len(text)):
        if text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if depth == 0:
                return text[start:i]
    return None


def _normal(text: str) -> str:
    plain = " ".join(text.split()).casefold().strip("$").rstrip(".").strip()
    return _THOUSANDS.sub("", plain) if "," in plain else plain
