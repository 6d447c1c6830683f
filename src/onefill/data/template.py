"""Chat templates, rendered as transformers renders them, without importing transformers (4 s).

Invariants:
- The text equals `apply_chat_template(messages, tokenize=False, add_generation_prompt=True)` of transformers
  5.24: same sandbox, same block trimming, same filters and globals.
- A template comes with the model and is not trusted: it runs in jinja's immutable sandbox and sees plain data.
- Rendering shares nothing between calls, so threads may render at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from onefill.errors import ConfigError, DataError

__all__ = ["ChatTemplate"]

_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the jinja source.
        variables: what the template sees beside the messages (`bos_token` and the like).
        origin: where the source was found, for messages.

    Raises:
        ConfigError: the source does not compile.
    """

    def __init__(self, source: str, *, variables: Mapping[str, str], origin: str) -> None:
        self._variables = dict(variables)
        self._origin = origin
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"{origin}: the chat template does not compile, line {error.lineno}: {error.message}; "
                "repair it, or send prompts raw with --raw"
            ) from error

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The conversation as the model reads it, up to where its answer begins.

        Raises:
            DataError: the template refuses the messages (roles that do not alternate, no system message, ...).
        """
        plain = [_message(message) for message in messages]
        try:
            return self._template.render(
                messages=plain, tools=None, documents=None, add_generation_prompt=True, **self._variables
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise DataError(
                f"the chat template of {self._origin} refuses the messages: {error}; "
                "check their roles and contents against what the model was trained on"
            ) from error


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant said; for us its content simply stands."""

    tags = {"generation"}  # noqa: RUF012  jinja declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)  # what is set inside stays inside, as in transformers


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = _now
    return env


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as plain data: keys with null dropped, reasoning under all the names that templates read."""
    if all(type(value) is str for value in message.values()) and not any(key in message for key in _REASONING):
        return dict(message)
    plain = {key: _plain(value) for key, value in message.items() if value is not None}
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _plain(value: Any) -> Any:
    if value is None or type(value) in {str, int, float, bool}:
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    return f"<{type(value).__name__}>"
