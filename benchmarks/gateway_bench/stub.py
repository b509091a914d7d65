"""The backend of the gateway benchmark: answers every chat completion at once, or streams frames at a steady pace.

`python stub.py --port N`. A plain answer is always the same 336 bytes. A streamed one has `max_tokens` frames, one each
`--interval-ms`, or without a pause when its message begins with "dense"; each frame's text is the CLOCK_MONOTONIC time (ns)
at which it was written, so that a client on the same machine can tell how long the frame was on its way. One thread, uvloop,
no HTTP library: it must not be the bottleneck.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time

import uvloop

BODY = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"gpt-4o-mini","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"Paris is the capital of France. It has been so for a long time.","refusal":null},'
    b'"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":20,"completion_tokens":8,"total_tokens":28}}'
)
MODELS = b'{"object":"list","data":[{"id":"gpt-4o-mini","object":"model","created":1,"owned_by":"stub"}]}'
# What the Rust routers ask a worker before they use it.
INFO = b'{"model_path":"gpt-4o-mini","tokenizer_path":"","is_generation":true,"served_model_name":"gpt-4o-mini"}'


def answer(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nserver: stub\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    return head + body


COMPLETION = answer(BODY)
# The last line tells nginx not to collect frames; the others pass it on as they would any header.
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: stub\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
    b"x-accel-buffering: no\r\n\r\n"
)
FRAME = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"gpt-4o-mini","choices":[{"index":0,'
    b'"delta":{"content":"%d"},"logprobs":null,"finish_reason":null}]}\n\n'
)
LAST = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"gpt-4o-mini","choices":[{"index":0,'
    b'"delta":{},"logprobs":null,"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
)
STREAMED = re.compile(rb'"stream" ?: ?true')
FRAMES = re.compile(rb'"max_(?:completion_)?tokens" ?: ?(\d+)')
DENSE = re.compile(rb'"content" ?: ?"dense ')
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Stub(asyncio.Protocol):
    """One connection. Requests are answered as they come; a stream keeps its connection until it is done."""

    def __init__(self, interval_s: float) -> None:
        self.pace = interval_s
        self.interval = interval_s
        self.buffer = b""
        self.timer: asyncio.Handle | None = None
        self.left = 0

    def connection_made(self, transport) -> None:
        self.transport = transport

    def connection_lost(self, exc) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def data_received(self, data: bytes) -> None:
        buffer = self.buffer + data if self.buffer else data
        while (end := buffer.find(b"\r\n\r\n")) >= 0:
            head = buffer[: end + 2]
            length = LENGTH.search(head)
            stop = end + 4 + (int(length[1]) if length else 0)
            if len(buffer) < stop:
                break
            self.reply(head, buffer[end + 4 : stop])
            buffer = buffer[stop:]
        self.buffer = buffer

    def reply(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"GET"):
            path = head.split(b" ", 2)[1]
            known = MODELS if path.endswith(b"/models") else INFO if b"info" in path else b"{}"
            self.transport.write(answer(known))
        elif STREAMED.search(body):
            count = FRAMES.search(body)
            self.left = int(count[1]) if count else 1
            self.interval = 0.0 if DENSE.search(body) else self.pace
            self.transport.write(STREAM_HEAD)
            self.frame()
        else:
            self.transport.write(COMPLETION)

    def frame(self) -> None:
        self.left -= 1
        data = chunk(FRAME % time.monotonic_ns())
        if self.left:
            loop = asyncio.get_running_loop()
            self.timer = loop.call_later(self.interval, self.frame) if self.interval else loop.call_soon(self.frame)
        else:
            self.timer = None
            data += chunk(LAST) + b"0\r\n\r\n"
        self.transport.write(data)


async def serve(port: int, interval_s: float) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Stub(interval_s), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--interval-ms", type=float, default=5.0, help="between two frames of a stream")
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.port, arguments.interval_ms / 1000))


if __name__ == "__main__":
    main()
