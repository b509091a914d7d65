"""What the redaction tests share: requests, answers cut into pieces, and what a client reads of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from laya.config import RedactConfig
from laya.stages.redact import Redacted, Redactor
from laya.wire.sse import EventStream

REDACTOR = Redactor(RedactConfig())
PHONE, EMAIL, IDENTITY, CARD = "13800138000", "bob@example.com", "11010519491231002X", "4111 1111 1111 1111"
SECRET = "ghp_16C7e42F292c6912E7710c838347Ae178B4a"


def chat(*contents: Any, **members: Any) -> bytes:
    messages = [{"role": "user", "content": content} for content in contents]
    return json.dumps({"model": "m", "messages": messages, **members}, ensure_ascii=False).encode()


def redact(body: bytes | dict, api: str = "chat", redactor: Redactor = REDACTOR) -> Redacted:
    return redactor.redact(body if isinstance(body, bytes) else json.dumps(body).encode(), api)


def restorer(found: Redacted, api: str = "chat"):
    assert found.vault is not None
    return found.vault.restorer(api, EventStream())


def frames(*events: Any, names: bool = False) -> bytes:
    """A stream: each event as `data:`, with an `event:` line where `names`; a string as it is."""
    out = b""
    for event in events:
        if isinstance(event, str):
            out += b"data: " + event.encode() + b"\n\n"
        else:
            head = b"event: " + event["type"].encode() + b"\n" if names else b""
            out += head + b"data: " + json.dumps(event).encode() + b"\n\n"
    return out


def chunk(content: str = "", index: int = 0, finish: str | None = None, **delta: Any) -> dict:
    if content:
        delta["content"] = content
    return {
        "id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m",
        "choices": [{"index": index, "delta": delta, "finish_reason": finish}],
    }  # fmt: skip


def through(machine, stream: bytes, cuts: Iterable[int] | None = None) -> bytes:
    """The stream restored, fed one byte at a time or cut at the given offsets."""
    marks = range(len(stream) + 1) if cuts is None else sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    marks = list(marks)
    return b"".join(machine.feed(stream[a:b]) for a, b in zip(marks, marks[1:], strict=False)) + machine.finish()


def events_of(stream: bytes) -> list[Any]:
    """The decoded events; `[DONE]` as a string."""
    source = EventStream()
    found = [data for _, data, _ in source.feed(stream) if data is not None]
    assert source.finish() is None, "the stream ends inside a frame"
    return [json.loads(data) if data[:1] == b"{" else data.decode() for data in found]


def content_of(stream: bytes, index: int = 0, member: str = "content") -> str:
    choices = [choice for event in events_of(stream) if isinstance(event, dict) for choice in event["choices"]]
    return "".join(choice["delta"].get(member, "") for choice in choices if choice["index"] == index)
