"""A backend that does what a script says: answer, stall, split bytes, reset, die in the middle of a stream.

For tests and demonstrations. Each request is answered by `script(request)`, which returns steps: bytes to write, or one of the
steps below. It runs on a thread of its own, on loopback, and records what it was asked and when a peer closed.

By hand: `python tools/scripted_upstream.py --port 9000` answers chat completions, streamed or not, in a fixed way.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Sleep:
    seconds: float


@dataclass
class Split:
    """Write the bytes one at a time (or `size` at a time), each in a segment of its own."""

    data: bytes
    size: int = 1


class Reset:
    """Close with RST."""


class Close:
    """Close with FIN."""


class Hold:
    """Do nothing until the peer closes."""


@dataclass
class Asked:
    """One request as it came; `closed_at` is set when the peer closed before the script was done."""

    method: str
    target: str
    headers: dict[str, str]
    head: bytes
    body: bytes
    connection: int
    at: float = field(default_factory=time.monotonic)
    closed_at: float | None = None

    def json(self):
        return json.loads(self.body)


Script = Callable[[Asked], list]


def answer(body: bytes | dict, status: str = "200 OK", headers: str = "content-type: application/json\r\n") -> bytes:
    """A whole response with a length."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    return f"HTTP/1.1 {status}\r\n{headers}content-length: {len(data)}\r\n\r\n".encode() + data


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def completion(text: str, model: str = "scripted") -> dict:
    return {
        "id": "chatcmpl-scripted", "object": "chat.completion", "created": 1, "model": model,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": None,
                     "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }  # fmt: skip


def delta(text: str | None, finish: str | None = None, model: str = "scripted") -> bytes:
    """One SSE frame of a chat stream, without chunk framing."""
    chunk = {
        "id": "chatcmpl-scripted", "object": "chat.completion.chunk", "created": 1, "model": model,
        "choices": [
            {"index": 0, "delta": {} if text is None else {"content": text}, "logprobs": None, "finish_reason": finish}
        ],
    }  # fmt: skip
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


def stream(*texts: str) -> list[bytes]:
    """A whole chat stream in the shape of a common server."""
    return [SSE_HEAD, *(chunked(delta(text)) for text in texts), chunked(delta(None, "stop")), DONE]


def polite(asked: Asked) -> list:
    """What `--port` serves: the last message's text back."""
    if not asked.body:
        return [answer(b"{}")]
    request = asked.json()
    text = str(request.get("messages", [{}])[-1].get("content", ""))
    return stream(*text.split(" ")) if request.get("stream") else [answer(completion(text, request.get("model", "")))]


class ScriptedUpstream:
    """`with ScriptedUpstream(script) as upstream: upstream.url ...`; `script` may be replaced at any time."""

    def __init__(self, script: Script = polite, port: int = 0, path: str | None = None, host: str = "127.0.0.1") -> None:
        self.script = script
        self.asked: list[Asked] = []
        self.connections = 0
        self._port = port
        self._path = path
        self._host = host
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    @property
    def url(self) -> str:
        return f"unix:{self._path}" if self._path else f"http://{self._host}:{self.port}/v1"

    def __enter__(self) -> ScriptedUpstream:
        self._thread.start()
        if not self._ready.wait(10):
            raise RuntimeError("the scripted upstream did not start")
        return self

    def __exit__(self, *_) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def wait_for(self, condition: Callable[[], bool], seconds: float = 5.0) -> bool:
        """Poll until `condition()`; False when it did not come true in time."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if condition():
                return True
            time.sleep(0.01)
        return condition()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        if self._path:
            server = await asyncio.start_unix_server(self._serve, self._path)
        else:
            server = await asyncio.start_server(self._serve, self._host, self._port)
            self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1) if not self._path else None
        try:
            while True:
                asked = await self._read(reader, number)
                if asked is None or not await self._perform(asked, reader, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, number: int) -> Asked | None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        lines = head.decode("latin-1").split("\r\n")
        method, target, _ = lines[0].split(" ", 2)
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        asked = Asked(method, target, headers, head, body, number)
        self.asked.append(asked)
        return asked

    async def _perform(self, asked: Asked, reader, writer) -> bool:
        """False when the connection is to be closed."""
        steps = asyncio.ensure_future(self._steps(asked, writer))
        gone = asyncio.ensure_future(reader.read(1))
        done, _ = await asyncio.wait({steps, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone in done:
            gone.exception()  # looked at: a reset is one of the ways to leave
        if steps not in done:
            asked.closed_at = time.monotonic()
            steps.cancel()
            return False
        if not gone.done():
            gone.cancel()
            try:
                await gone
            except asyncio.CancelledError:
                pass
            return steps.result()
        return False

    async def _steps(self, asked: Asked, writer) -> bool:
        for step in self.script(asked):
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
            elif isinstance(step, Sleep):
                await asyncio.sleep(step.seconds)
            elif isinstance(step, Split):
                for start in range(0, len(step.data), step.size):
                    writer.write(step.data[start : start + step.size])
                    await writer.drain()
                    await asyncio.sleep(0)
            elif step is Reset or isinstance(step, Reset):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
                return False
            elif step is Close or isinstance(step, Close):
                return False
            elif step is Hold or isinstance(step, Hold):
                await asyncio.sleep(3600)
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=9000)
    with ScriptedUpstream(polite, parser.parse_args().port) as upstream:
        print(f"listening on {upstream.url}", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
