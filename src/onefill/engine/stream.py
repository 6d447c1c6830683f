"""Server-sent events of a streamed `/generate`, put together again.

Invariants:
- Only a stream that ended with `[DONE]` has a result, and only its last cumulative item of each child counts;
  `codec.decode_reply` checks those like any other reply. A stream that ends early has no result at all.
- Each child's items may only grow: an item with fewer ids than the one before, or one after its finish, is a
  mixed stream. (Items are cumulative by default in SGLang 0.5.23; with `--incremental-streaming-output` they
  are not, and the counts then disagree.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onefill.engine.codec import error_object, parse
from onefill.engine.item import Frame, kind

__all__ = ["Collector", "Events"]

_DONE = b"[DONE]"


class Events:
    """Cuts a byte stream into the data of its events, however the network cut it."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[bytes] = []
        self._seen = 0  # of `_rest`, searched for a line end already

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yields the data of every event that `chunk` completes."""
        self._rest += chunk
        start = 0
        while (end := self._rest.find(b"\n", max(start, self._seen))) >= 0:
            line = bytes(self._rest[start:end]).rstrip(b"\r")
            start = end + 1
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            elif not line and self._data:
                data, self._data = b"\n".join(self._data), []
                yield data
        del self._rest[:start]
        self._seen = len(self._rest)


class Collector:
    """Collects the events of one request and says when the first token and the end are there.

    Args:
        frame: what the stream is held against.
    """

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._last: dict[int, Any] = {}
        self._pending = b""
        self.started = False
        self.done = False

    def add(self, data: bytes) -> None:
        """Takes the data of one event.

        With one sample only the first and the last item are parsed: each repeats all tokens so far, so parsing
        every one would cost the square of the length.

        Raises:
            ProtocolError: it is not an item, or does not fit those before.
            AttemptError: the engine reports a failure.
        """
        if self.done:
            return
        if data == _DONE:
            self._settle()
            self.done = True
        elif self.started and self._frame.request.n == 1 and not data.startswith(b'{"error"'):
            self._pending = data
        else:
            self._settle()
            self._take(data)
            self.started = True

    def _settle(self) -> None:
        if self._pending:
            data, self._pending = self._pending, b""
            self._take(data)

    def _take(self, data: bytes) -> None:
        item = parse(data, self._frame)
        if type(item) is not dict:
            raise self._frame.error("stream", f"an event must hold an object, got {kind(item)}")
        if "output_ids" not in item and "error" in item:
            raise error_object(item["error"], self._frame)
        index = item.get("index", 0)
        if type(index) is not int or not 0 <= index < self._frame.request.n:
            raise self._frame.error("stream.index", f"is {index!r} with n = {self._frame.request.n}")
        before = self._last.get(index)
        if before is not None and (_finished(before) or _length(item) < _length(before)):
            raise self._frame.error("stream", f"mixed: item {index} shrank, or went on after its finish")
        self._last[index] = item

    def reply(self) -> Any:
        """The reply in the form of an unstreamed one: the object for n = 1, else the list in order."""
        items = [self._last[index] for index in sorted(self._last)]
        return items[0] if self._frame.request.n == 1 and items else items


def _finished(item: dict[str, Any]) -> bool:
    meta = item.get("meta_info")
    return isinstance(meta, dict) and meta.get("finish_reason") is not None


def _length(item: dict[str, Any]) -> int:
    ids = item.get("output_ids")
    return len(ids) if isinstance(ids, list) else 0
