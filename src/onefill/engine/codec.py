"""The codec of SGLang's native protocol: `encode` (from `encoding`) one way, `decode` the other.

Invariants:
- One path turns an engine's items into completions, whatever the strategy: an object for n = 1, a list for
  n > 1, the last items of a stream.
- A reply is checked whole before the first completion is handed out. The first violation raises
  `ProtocolError`, which names engine, request and field; there is no partial result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import orjson

from onefill.engine.encoding import as_given, encode, headers
from onefill.engine.item import Frame, Outline, completion, kind, outline
from onefill.engine.placeholders import Placeholders
from onefill.engine.retry import AttemptError, classify
from onefill.engine.values import FieldError, values
from onefill.plan.request import Request
from onefill.types import Completion, LogprobArray, Timing, TokenArray

__all__ = ["Frame", "as_given", "decode", "decode_reply", "encode", "error_object", "headers", "parse"]

T = TypeVar("T")
R = TypeVar("R")


def decode(
    body: bytes,
    request: Request,
    *,
    engine: str,
    timing: Timing,
    placeholders: Placeholders | None = None,
    vocab_size: int | None = None,
) -> list[Completion]:
    """Turns the body of a 200 reply into exactly `request.n` completions, in order.

    Raises:
        ProtocolError: the body is not what the protocol promises; nothing of it may be used.
        AttemptError: the engine reports a failure of its own inside the reply (an error object, or an item aborted
            with an HTTP status): it counts as that status would have.
    """
    frame = Frame(request=request, engine=engine, timing=timing, placeholders=placeholders, vocab_size=vocab_size)
    return decode_reply(parse(body, frame), frame)


def parse(body: bytes | bytearray, frame: Frame) -> Any:
    """JSON or ProtocolError. orjson takes no NaN and no Infinity, so neither gets further than this."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        start = bytes(body[:60]).decode(errors="replace")
        raise frame.error("body", f"reply is not JSON ({error}); it begins {start!r}") from error


def decode_reply(reply: Any, frame: Frame) -> list[Completion]:
    """`decode` for a reply that is parsed: an object, or a list of items."""
    items = _items(reply, frame)
    outlines = _each(outline, items, frame)
    _check_ids_differ(items, frame)
    tokens, logprobs = _values(outlines, frame)
    completions: list[Completion] = []
    start = 0
    for item in outlines:
        end = start + len(item.ids)
        completions.append(completion(item, tokens[start:end], logprobs[start:end], frame))
        start = end
    return completions


def _values(outlines: Sequence[Outline], frame: Frame) -> tuple[TokenArray, LogprobArray]:
    """Ids and logprobs of all items, one after the other: one pass, and one more that finds a wrong item."""
    if len(outlines) == 1:
        ids, triples = outlines[0].ids, outlines[0].triples
    else:
        ids, triples = [], []
        for item in outlines:
            ids += item.ids
            triples += item.triples
    try:
        return values(ids, triples, frame.vocab_size)
    except FieldError:
        _each(lambda item, _: values(item.ids, item.triples, frame.vocab_size), outlines, frame)
        raise


def _each(do: Callable[[T, Frame], R], things: Sequence[T], frame: Frame) -> list[R]:
    """`do` with each item, a FieldError made a ProtocolError that names the item."""
    done: list[R] = []
    for index, thing in enumerate(things):
        try:
            done.append(do(thing, frame))
        except FieldError as wrong:
            where = f"[{index}].{wrong.field}" if len(things) > 1 else wrong.field
            raise frame.error(where.rstrip("."), str(wrong)) from None
    return done


def _items(reply: Any, frame: Frame) -> Sequence[Any]:
    """The reply's items. A list of one is taken for n = 1 too: it can mean only one thing."""
    n = frame.request.n
    if isinstance(reply, dict):
        if "error" in reply and "output_ids" not in reply:
            raise error_object(reply["error"], frame)
        if n > 1:
            raise frame.error("reply", f"asked for {n} samples, got one object instead of a list")
        return [reply]
    if not isinstance(reply, list):
        raise frame.error("reply", f"must be an object or a list, got {kind(reply)}")
    if len(reply) != n:
        raise frame.error("reply", f"asked for {n} samples, got {len(reply)}")
    return reply


def error_object(error: Any, frame: Frame) -> Exception:
    """An error in a 200 reply, as SGLang 0.5.23 sends it in a stream: {"error": {"message", "code"}}."""
    message = error.get("message", error) if isinstance(error, dict) else error
    code = error.get("code") if isinstance(error, dict) else None
    if type(code) is int and 400 <= code < 600:
        return AttemptError(f"engine says: {str(message)[:500]}", verdict=classify(code))
    return frame.error("error", f"engine answered 200 with an error: {str(message)[:500]}")


def _check_ids_differ(items: Sequence[Any], frame: Frame) -> None:
    """The children of one request have an id each; one that comes twice is one sample delivered twice."""
    if len(items) < 2:
        return
    seen: set[str] = set()
    for index, item in enumerate(items):
        child = item["meta_info"].get("id")
        if child is None:
            continue
        if type(child) is not str or child in seen:
            raise frame.error(f"[{index}].meta_info.id", f"{child!r} is no string, or came before")
        seen.add(child)
