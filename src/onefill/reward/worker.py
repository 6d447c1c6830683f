"""A worker process: scores what comes on stdin, one reply a sample, until its parent is gone.

Invariants:
- Frames are a 4-byte length and a body: requests are pickles of (response, label, extra) lists from our own
  parent, replies JSON. Nothing that a library prints can get between them.
- It ends with its parent: on end of input, and on Linux also by a signal when it is stuck in native code.
- Its memory is bounded, so an absurd expression ends in an error here and not in the machine's memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import pickle
import queue
import signal
import struct
import sys
import threading
from typing import IO, Any

__all__ = ["MEMORY", "main"]

MEMORY = 4 << 30
_SET_PARENT_DEATH_SIGNAL = 1


def main(kind: str, parent: int) -> None:
    """Runs the scorer called `kind` for the process `parent`."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _end_with(parent)
    _bound_memory()
    logging.disable(logging.CRITICAL)
    requests: queue.SimpleQueue[list[tuple[str, Any, Any]]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(sys.stdin.buffer, requests), daemon=True).start()
    try:
        from onefill.reward.scorers import SCORERS  # noqa: PLC0415  slow, and told where it fails

        score = SCORERS[kind]()
    except Exception as error:  # noqa: BLE001  whatever an import raises is told to the parent
        _send(replies, {"error": f"{type(error).__name__}: {error}"})
        return
    _send(replies, {"ready": True})
    while True:
        for text, label, extra in requests.get():
            reply: dict[str, Any]
            try:
                reply = {"value": score(text, label, extra)}
            except ValueError as error:
                reply = {"error": str(error)}
            except Exception as error:  # noqa: BLE001  one sample's failure, told with its reason
                reply = {"error": f"{type(error).__name__}: {error}"}
            _send(replies, reply)


def _receive(stream: IO[bytes], requests: queue.SimpleQueue[list[tuple[str, Any, Any]]]) -> None:
    while True:
        head = stream.read(4)
        body = stream.read(struct.unpack("<I", head)[0]) if len(head) == 4 else b""
        if not body:
            os._exit(0)  # the parent closed the pipe, or is gone
        requests.put(pickle.loads(body))


def _send(replies: IO[bytes], reply: dict[str, Any]) -> None:
    body = json.dumps(reply).encode()
    replies.write(struct.pack("<I", len(body)) + body)
    replies.flush()


def _end_with(parent: int) -> None:
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(0)


def _bound_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource  # noqa: PLC0415  not on Windows

        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
