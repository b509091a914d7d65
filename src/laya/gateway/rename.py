"""The model name in an answer: what the client asked for, where a target has another name for it.

In: JSON bodies and SSE streams of a backend, as they come. Out: the same with the name exchanged and nothing else: other
members keep their bytes. The name stands at the top, in `response` (Responses) or in `message` (Messages). Any thread; one
stream each.
"""

from __future__ import annotations

import msgspec

from laya.schema.codec import decode_members, encode_json, encode_members
from laya.wire.sse import EventStream, frame

_INNER = ("response", "message")


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
