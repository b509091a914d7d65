"""The model name in an answer: what the client asked for, where a target has another name for it.

In: JSON bodies and SSE streams of a backend, as they come. Out: the same with the name exchanged and nothing else: other
members keep their bytes. The name stands at the top, in `response` (Responses) or in `message` (Messages). `ModelRename` any
thread, one stream each; the exchange loop thread only.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from laya.errors import BadUpstream, LayaError
from laya.gateway.exchange import DONE, STREAMING
from laya.gateway.moving import MovingExchange
from laya.schema.codec import decode_members, encode_json, encode_members
from laya.schema.fields import READ_ON_LOOP
from laya.wire.sse import EventStream, frame

# A JSON answer is kept until it is whole, to be renamed; a longer one passes with the backend's name.
MAX_COLLECTED = 16 * 1024 * 1024
_INNER = ("response", "message")
_NAMED = (b"application/json", b"text/event-stream")  # answers that hold the name


class ModelRename:
    def __init__(self, name: str) -> None:
        self._name = msgspec.Raw(encode_json(name))
        self._stream = EventStream()

    def body(self, data: bytes) -> bytes:
        """A whole JSON body, or the data of one event; what is no JSON object comes back as it is."""
        if b'"model"' not in data:
            return data
        try:
            members = decode_members(data)
        except (msgspec.DecodeError, RecursionError):
            return data
        changed = False
        if bytes(members.get("model", b""))[:1] == b'"':
            members["model"] = self._name
            changed = True
        for key in _INNER:
            inner = bytes(members.get(key, b""))
            if inner[:1] == b"{" and (renamed := self.body(inner)) is not inner:
                members[key] = msgspec.Raw(renamed)
                changed = True
        return encode_members(members) if changed else data

    def feed(self, data: bytes) -> bytes:
        """A piece of a stream: the events that are whole now. Raises BadUpstream for one larger than any sane one."""
        return b"".join([self._event(*found) for found in self._stream.feed(data)])

    def rest(self) -> bytes:
        """What is left when the stream has ended."""
        found = self._stream.finish()
        return b"" if found is None else self._event(*found)

    def _event(self, event: bytes | None, data: bytes | None, raw: bytes) -> bytes:
        if data is None or data[:1] != b"{":
            return raw
        renamed = self.body(data)
        return raw if renamed is data else frame(renamed, event)


class RenamingExchange(MovingExchange):
    """What an exchange with a backend does where the target has its own name for the model: a stream is renamed as it passes, a
    JSON body when it is whole."""

    call: Any = None
    target: Any = None
    _sse = False
    _rename: ModelRename | None = None  # the target calls the model by another name than the client
    _collected: list[bytes] | None = None  # of a JSON answer that is to be renamed
    _lines = b""
    _collected_size = 0
    _backlog: Any = ()  # what was collected in vain, on its way to the client
    _paused = False

    def _renames(self, response, lines: bytes) -> bool:
        """Prepare to put the client's name for the model into the answer. True: the head waits for the body."""
        named = response.fields.get(b"content-type", b"").lower().startswith(_NAMED)
        if self.target.model == self.model or self.status >= 400 or not named:
            return False
        if response.fields.get(b"content-encoding", b"identity") != b"identity":
            self.call.cancel()
            self._give_up(BadUpstream(f"Backend {self.backend} answered in a coding that it was asked not to use."))
            return True
        self._rename = ModelRename(self.model)
        if self._sse or (response.content_length or 0) > MAX_COLLECTED:
            return False
        self._lines, self._collected = lines, []
        if response.body is not None:
            self._collected.append(response.body)
            self._collected_size = len(response.body)
            self.on_upstream_end()
        return True

    def _collect(self, data: bytes) -> None:
        if self._collected is None:  # it closed when it was paused: the rest comes behind the backlog
            self._backlog.append(data)
            return
        self._collected.append(data)
        self._collected_size += len(data)
        if self._collected_size > MAX_COLLECTED:
            self._backlog, self._collected = deque(self._collected), None
            self.move(STREAMING)
            self.connection.start(self.status, self._lines + self.own_lines())
            self._paused = True
            self.call.pause()
            self.on_writable()

    def _pass_backlog(self) -> bool:
        """Write what was collected as fast as it is read. True: it has all gone out."""
        connection, backlog = self.connection, self._backlog
        while backlog and not connection.paused:
            if not connection.write(backlog.popleft()):
                backlog.clear()  # the reader was cut off, and this exchange cancelled with it
        return not backlog

    def _answer_renamed(self) -> None:
        pieces, self._collected = self._collected, None
        if self._collected_size > READ_ON_LOOP:
            self.gateway.offload(lambda: self._rename.body(b"".join(pieces)), self._renamed)
        else:
            self._renamed(self._rename.body(b"".join(pieces)))

    def _renamed(self, body: bytes | LayaError) -> None:
        if self.state is DONE:
            return  # the client left while it was renamed
        if isinstance(body, LayaError):
            self.fail(body)
        else:
            self.answer(self.status, self._lines, body, "ok")
