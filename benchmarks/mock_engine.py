"""An engine that answers at once: SGLang's protocol with canned replies, so that only the client costs anything.

    python benchmarks/mock_engine.py --port 0 --response-tokens 64

Prints its URL when it listens. It speaks just enough HTTP/1.1 on a bare asyncio protocol that serving a request
costs less than sending one: /generate (n, stream), /server_info, /model_info, /health, /v1/loads.
"""

from __future__ import annotations

import argparse
import asyncio
from functools import lru_cache

import orjson

RESPONSE_TOKENS = 64
COUNTS = {"/generate": 0}


def item(index: int, prompt_tokens: int, n: int) -> dict[str, object]:
    ids = [(index * 7919 + i * 31) % 1000 for i in range(RESPONSE_TOKENS)]
    return {
        "text": "lorem ipsum " * (RESPONSE_TOKENS // 2),
        "output_ids": ids,
        "meta_info": {
            "id": f"child-{index}",
            "finish_reason": {"type": "length", "length": RESPONSE_TOKENS},
            "prompt_tokens": prompt_tokens,
            "completion_tokens": RESPONSE_TOKENS,
            "cached_tokens": prompt_tokens - 1 if n > 1 else 0,
            "weight_version": "default",
            "output_token_logprobs": [[-0.5 - i / 1000, token, None] for i, token in enumerate(ids)],
            "e2e_latency": 0.001,
        },
    }


@lru_cache(maxsize=64)
def reply(n: int, prompt_tokens: int, stream: bool) -> bytes:
    items = [item(i, prompt_tokens, n) for i in range(n)]
    if stream:
        chunks = b"".join(
            b"data: " + orjson.dumps({**(it if n == 1 else {**it, "index": i})}) + b"\n\n"
            for i, it in enumerate(items)
        )
        body = chunks + b"data: [DONE]\n\n"
        return head("text/event-stream", len(body)) + body
    body = orjson.dumps(items[0] if n == 1 else items)
    return head("application/json", len(body)) + body


def head(kind: str, length: int) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n".encode()


def answer(path: str, body: bytes) -> bytes:
    if path == "/generate":
        COUNTS["/generate"] += 1
        request = orjson.loads(body)
        n = request["sampling_params"].get("n", 1)
        return reply(n, len(request["input_ids"]), bool(request.get("stream")))
    info = {
        "/model_info": {"model_path": "mock", "tokenizer_path": "mock", "is_generation": True, "vocab_size": 50_000},
        "/server_info": {"version": "mock", "context_length": 32_768, "vocab_size": 50_000},
        "/counts": COUNTS,
    }.get(path, {})
    data = orjson.dumps(info)
    return head("application/json", len(data)) + data


class Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            header = bytes(self.buffer[:end]).decode("latin-1")
            length = next(
                (int(line[15:]) for line in header.split("\r\n") if line.lower().startswith("content-length:")), 0
            )
            if len(self.buffer) < end + 4 + length:
                return
            body = bytes(self.buffer[end + 4 : end + 4 + length])
            del self.buffer[: end + 4 + length]
            self.transport.write(answer(header.split(" ", 2)[1].split("?")[0], body))  # type: ignore[attr-defined]


async def main(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", port, backlog=8192)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--response-tokens", type=int, default=RESPONSE_TOKENS)
    options = parser.parse_args()
    RESPONSE_TOKENS = options.response_tokens
    asyncio.run(main(options.port))
