"""Server-sent events: frames to write, a parser for the dialects that upstreams speak, and a watch on streams passed on.

In: bytes in any segmentation. Out: `frame` gives bytes; `EventStream.feed` gives (event, data, raw) for each frame, where
the `raw` parts joined are the input again, byte for byte, so that an untouched frame is forwarded as it came. No state is
shared between streams. Loop thread.

Line ends may be LF, CR LF or CR, mixed; a byte-order mark at the start is skipped (it stays in `raw`).
"""

from __future__ import annotations

import re

from laya.errors import BadUpstream

COMMENT = b":\n\n"  # keeps a connection from looking idle; between frames only
DONE = b"data: [DONE]\n\n"
MAX_EVENT_BYTES = 1024 * 1024  # the largest sane frame is a whole tool call or an image in one delta

_BOM = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"\r\n|\n|\r")
# A line end right behind a line end: the frame is over. A CR at the end of what has come counts at once (some upstreams
# end lines with CR alone); if its LF comes later, that is an empty frame, which passes as raw bytes.
_FRAME_END = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")
_FRAME_ENDINGS = (b"\n\n", b"\n\r\n", b"\n\r", b"\r\r", b"\r\r\n")
_DONE_LINE = re.compile(rb"[\r\n](?:\xef\xbb\xbf)?data:[ ]?\[DONE\][ \t]*(?:[\r\n]|\Z)")
WATCH_TAIL = 64  # longer than any form of `data: [DONE]` with blanks behind it that has been seen

Frame = tuple[bytes | None, bytes | None, bytes]


def frame(data: bytes, event: bytes | None = None) -> bytes:
    """One frame. Each line of `data` gets a `data:` of its own; `event` must be a single line."""
    if b"\n" in data or b"\r" in data:
        data = b"\ndata: ".join(_LINE_END.split(data))
    if event is None:
        return b"data: %b\n\n" % data
    if b"\n" in event or b"\r" in event:
        raise ValueError("an event name holds a line end")
    return b"event: %b\ndata: %b\n\n" % (event, data)


class EventStream:
    """Parser of one upstream's stream, bounded: a frame over `max_event_bytes` raises BadUpstream."""

    __slots__ = ("_held", "_searched", "_any_cr", "_begun", "_bound")

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._held = bytearray()
        self._searched = 0  # no frame ends before this offset of what is held
        self._any_cr = False  # only then are the slower searches needed
        self._begun = False  # the first frame is out: a mark from here on is text
        self._bound = max_event_bytes

    @property
    def at_boundary(self) -> bool:
        """No part of a frame is held."""
        return not self._held

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are whole now: (event or None, data or None if the frame has no data line, raw)."""
        if not self._any_cr and b"\r" in data:
            self._any_cr = True
        if not self._held:
            buffer: bytes | bytearray = data
        else:
            self._held += data
            buffer = self._held
        frames: list[Frame] = []
        start = 0
        while (end := self._frame_end(buffer, start)) > 0:
            raw = data if end - start == len(data) and buffer is data else bytes(buffer[start:end])
            frames.append(self._parsed(raw))
            start = end
            self._searched = 0
        self._hold(buffer, start)
        return frames

    def finish(self) -> Frame | None:
        """The stream has ended: what is left, read as a frame whose blank line never came (None: nothing is left)."""
        raw = bytes(self._held)
        self._held.clear()
        self._searched = 0
        return self._parsed(raw) if raw else None

    def _frame_end(self, buffer: bytes | bytearray, start: int) -> int:
        """Offset behind the blank line of the frame that begins at `start`; 0 when it has not come."""
        if start < len(buffer) and buffer[start] in b"\r\n":
            return start + (2 if buffer[start : start + 2] == b"\r\n" else 1)
        search_from = max(start, self._searched)
        if not self._any_cr:
            blank = buffer.find(b"\n\n", search_from)
            return blank + 2 if blank >= 0 else 0
        match = _FRAME_END.search(buffer, search_from)
        return match.end() if match else 0

    def _hold(self, buffer: bytes | bytearray, start: int) -> None:
        left = len(buffer) - start
        if left >= self._bound:
            raise BadUpstream(f"the upstream sent an event larger than {self._bound} bytes")
        if buffer is self._held:
            del self._held[:start]
        elif left:
            self._held = bytearray(buffer[start:])
        self._searched = max(0, left - 3)

    def _parsed(self, raw: bytes) -> Frame:
        if len(raw) > self._bound:
            raise BadUpstream(f"the upstream sent an event larger than {self._bound} bytes")
        text = raw
        if not self._begun:
            self._begun = True
            text = raw.removeprefix(_BOM)
        if text[:6] == b"data: " and not self._any_cr and text.find(b"\n") == len(text) - 2:
            return None, text[6:-2], raw  # one line, by far the most common
        event, data = _read_lines(text.split(b"\n") if not self._any_cr else _LINE_END.split(text))
        return event, data, raw


def _read_lines(lines: list[bytes]) -> tuple[bytes | None, bytes | None]:
    """(event, data) of a frame's lines; comments, `id`, `retry` and unknown fields do not matter here."""
    event = None
    data: list[bytes] = []
    for line in lines:
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif field == b"event":
            event = value.removeprefix(b" ")
    return event, b"\n".join(data) if data else None


class StreamWatch:
    """Follows a stream that is passed on untouched, without copying it: did it end where and how a stream should?"""

    __slots__ = ("_tail", "done")

    def __init__(self) -> None:
        self._tail = b"\n\n"  # the start of a stream is as good as the end of a frame
        self.done = False  # a `data: [DONE]` line went by

    @property
    def at_boundary(self) -> bool:
        """The last byte ended a frame (or none has come): a frame of ours may follow."""
        return self._tail.endswith(_FRAME_ENDINGS)

    def see(self, data: bytes) -> None:
        tail = self._tail
        if not self.done and (b"[DONE]" in data or b"[DONE]" in tail[-5:] + data[:5]):
            self.done = _DONE_LINE.search(tail + data) is not None
        self._tail = data[-WATCH_TAIL:] if len(data) >= WATCH_TAIL else (tail + data)[-WATCH_TAIL:]
