"""A prompt gets its token ids.

Invariants: ids that came with the row are never touched; messages go through the chat template; a plain string
is one user message, or is encoded as it stands where the user asked for raw.
"""

from __future__ import annotations

from onefill.data.chat import place_media, with_system
from onefill.data.errors import FieldError
from onefill.data.tokenizer import Tokenizer
from onefill.errors import ConfigError, DataError
from onefill.types import Prompt

__all__ = ["tokenize"]


def tokenize(prompt: Prompt, tokenizer: Tokenizer, *, chat: bool | None = None, system: str | None = None) -> Prompt:
    """The prompt with `tokens`. Safe to call from several threads.

    Args:
        prompt: text, messages or ids.
        tokenizer: the model's.
        chat: True wraps a string as a user message, False encodes it as it stands; None wraps it where the
            model has a chat template.
        system: a system message put in front of messages that have none.

    Raises:
        ConfigError: messages, or `system`, but no chat template or raw.
        DataError: the prompt comes out empty, or the template refuses it.
    """
    if prompt.tokens is not None:
        return prompt
    if prompt.messages is not None:
        if chat is False:
            raise ConfigError(
                f"prompt {prompt.id} is a list of messages, which cannot be sent raw: drop --raw, or give a string"
            )
        return prompt.with_tokens(tokenizer.chat(with_system(prompt.messages, system)))
    text = prompt.text or ""
    if chat or (chat is None and tokenizer.has_template):
        messages = with_system([{"role": "user", "content": text}], system)
        try:
            placed = place_media(messages, prompt.media, field="prompt")
        except FieldError as error:
            raise DataError(f"prompt {prompt.id}: {error.field} {error.reason}; {error.hint}") from None
        return prompt.with_tokens(tokenizer.chat(placed))
    if system:
        raise ConfigError("a system prompt needs a chat template: drop --system, or use --apply-chat-template")
    tokens = tokenizer.encode(text)
    if not tokens.size:
        raise DataError(f"prompt {prompt.id} has no tokens; give it some text")
    return prompt.with_tokens(tokens)
