"""A prompt gets its token ids.

Invariants: ids that came with the row are never touched; messages go through the chat template; a plain string
is one user message, or is encoded as it stands where the user asked for raw.
"""

from __future__ import annotations

from onefill.data.chat import place_media, with_system
from onefill.data.errors import FieldError
from onefill.data.tokenizer import Tokenizer
from onefill.errors import ConfigError, DataError
from onefill.types import Prompt, TokenArray

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
        ConfigError: `system`, or `chat`, but no chat template: no row could cure that.
        DataError: messages but raw or no chat template (other rows may be strings), the prompt comes out empty, or
            the template refuses it. The message names the prompt.
    """
    if prompt.tokens is not None:
        return prompt
    try:
        return prompt.with_tokens(_tokens(prompt, tokenizer, chat, system))
    except FieldError as error:
        raise DataError(f"prompt {prompt.id}: {error.field} {error.reason}; {error.hint}") from None
    except DataError as error:
        raise DataError(f"prompt {prompt.id}: {error}") from error
    except (UnicodeEncodeError, TypeError) as error:  # lone surrogates
        raise DataError(f"prompt {prompt.id}: its text cannot be encoded ({error}); is it valid Unicode?") from error


def _tokens(prompt: Prompt, tokenizer: Tokenizer, chat: bool | None, system: str | None) -> TokenArray:
    if prompt.messages is not None:
        if chat is False:
            raise DataError("it is a list of messages, which cannot be sent raw; drop --raw, or give a string")
        if not tokenizer.has_template:
            hint = "use an instruct model, put a chat_template.jinja beside its tokenizer.json, or give a string"
            raise DataError(f"it is a list of messages, and the tokenizer has no chat template; {hint}")
        return tokenizer.chat(with_system(prompt.messages, system))
    text = prompt.text or ""
    if chat or (chat is None and tokenizer.has_template):
        messages = with_system([{"role": "user", "content": text}], system)
        return tokenizer.chat(place_media(messages, prompt.media, field="prompt"))
    if system:
        raise ConfigError("a system prompt needs a chat template: drop --system, or use --apply-chat-template")
    tokens = tokenizer.encode(text)
    if not tokens.size:
        raise DataError("it has no tokens; give it some text")
    return tokens
