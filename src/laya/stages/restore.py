"""An answer with the values of its request put back.

In: a whole JSON body, or the bytes of an event stream in any segmentation. Out: the same with the request's own placeholders
replaced by their values; what holds none passes byte for byte. One restorer serves one answer; any thread, one at a time.

In a stream each text is a channel of its own (a choice's content, a tool call's arguments, a content block). What could be the
beginning of a placeholder waits in its channel, which are at most `vault.MAX_PLACEHOLDER` characters, and goes out as soon as
it cannot become one, or when the channel ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from laya.schema.codec import encode_members
from laya.stages.redact_json import Edited, decode_string, encode_string, first_byte, firsts, locate, parts_of, plain_view
from laya.stages.restore_events import EVENTS, Channel, Events

if TYPE_CHECKING:
    from laya.stages.vault import Vault

# Members whose text is JSON: a value put into it must be escaped for the string that it stands in.
JSON_MEMBERS = frozenset({b"arguments", b"partial_json"})

# Bytes of the beginning of a placeholder in a view: brackets, blanks, and a label of 24 with four bytes for each of its signs.
MAX_TRIGGER = 128

_decode = msgspec.json.Decoder(dict[str, Any]).decode


class EventSource(Protocol):
    """See `wire.sse.EventStream`."""

    def feed(self, data: bytes) -> list[tuple[bytes | None, bytes | None, bytes]]: ...

    def finish(self) -> tuple[bytes | None, bytes | None, bytes] | None: ...


class Restorer:
    def __init__(self, vault: Vault, api: str | None, source: EventSource) -> None:
        self._vault = vault
        self._source = source
        self._events: Events = EVENTS.get(api or "", Events)(vault)

    def whole(self, body: bytes) -> bytes:
        """A whole answer. A body that is no JSON is taken for text."""
        view = plain_view(body)
        places = ((at, at, "") for at in firsts(view, self._vault.labels.trigger, MAX_TRIGGER))
        found = next(places, None)
        if found is None:
            return body
        edited = Edited(body)
        if first_byte(body) not in (b"{", b"["):
            self._put_back(edited, body, parts_of(view, 0, len(body)), False, _decode_text, _encode_text)
            return edited.whole()
        for place in locate(view, chain((found,), places)):
            if place.key is not None:
                json_text = place.key in JSON_MEMBERS or None
                parts = parts_of(view, place.start, place.end)
                self._put_back(edited, body, parts, json_text, decode_string, encode_string)
        return edited.whole()

    def _put_back(
        self, edited: Edited, body: bytes, parts: Iterable[tuple[int, int]], json_text: bool | None,
        decode: Callable[[bytes], str], encode: Callable[[str], bytes],
    ) -> None:  # fmt: skip
        """One text, which comes in parts as one of a stream does: it may have megabytes."""
        channel = Channel(self._vault, json_text)
        start = end = 0
        for start, end in parts:
            waited, text = bool(channel.held), decode(body[start:end])
            ready = channel.feed(text)
            if waited or ready != text:
                edited.put(start, end, encode(ready))
        if channel.held:
            edited.put(end, end, encode(channel.end()))

    def feed(self, data: bytes) -> bytes:
        """More of a stream. Raises what its source raises for an event beyond every bound."""
        return b"".join([self._event(*found) for found in self._source.feed(data)])

    def finish(self) -> bytes:
        """What is held back, when the stream has ended, whole or cut."""
        found = self._source.finish()
        last = b"" if found is None else self._event(*found)
        held = self._events.flush()
        if held and last and not last.endswith((b"\n\n", b"\n\r\n", b"\r\r")):
            last += b"\n\n"
        return last + held

    def _event(self, event: bytes | None, data: bytes | None, raw: bytes) -> bytes:
        if data is None:
            return raw  # a comment
        if data[:1] != b"{":
            return self._events.flush() + raw  # `[DONE]`
        try:
            decoded = _decode(data)
        except (ValueError, RecursionError):
            return self._events.flush() + raw
        before = self._events.take(decoded)
        new = encode_members(decoded) if self._events.changed else data
        if not self._events.is_delta:
            new = self.whole(new)
        return before + (raw if new is data else put(raw, data, new, event))


def put(raw: bytes, data: bytes, new: bytes, event: bytes | None) -> bytes:
    """The frame with other data; its other lines stay."""
    before, found, behind = raw.partition(data)
    if found:
        return before + new + behind
    return b"data: %b\n\n" % new if event is None else b"event: %b\ndata: %b\n\n" % (event, new)


def _decode_text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _encode_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
