"""The common chunked body of an upstream, decoded fast: sizes of plain hex digits, no extensions, no trailers.

In: the segments of a body. Out: their payloads, one piece a segment. A chunk line outside that subset goes to h11: a
chunk's border carries no state but the framing, so h11 is given the response's head again and reads on from there.
Called by `outbound`, on the loop thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from laya.wire.policy import Refused

HEX_DIGITS = b"0123456789abcdefABCDEF"
MAX_SIZE_DIGITS = 8  # 4 GiB in one chunk; longer sizes are odd
# One call handles so many chunks: at about 0.4 us each a segment full of one-byte chunks holds the loop for 0.2 ms.
# The caller lets other work in between calls.
CHUNKS_A_CALL = 128
ODD = -2


class Body(Protocol):
    """Reads one message's body from its segments."""

    def feed(self, data: bytes) -> tuple[bytes, bytes, bool]:
        """(payload, bytes not used, whether the body is whole). Unused bytes of an unfinished body are fed again."""

    def ends_at_eof(self) -> bool:
        """Whether end of input here is the proper end of the body."""


def chunk_size(line: bytes) -> int | None:
    """The size in a chunk line (CR LF taken off), or None when the line is odd."""
    if not line or len(line) > MAX_SIZE_DIGITS or line.translate(None, HEX_DIGITS):
        return None
    return int(line, 16)


def _may_become_plain(line: bytes) -> bool:
    """Whether a chunk line that has not all come may still turn out plain."""
    return len(line) <= MAX_SIZE_DIGITS + 1 and not line.removesuffix(b"\r").translate(None, HEX_DIGITS)


class ChunkedBody:
    """A decoder for one body. `hand_over()` is called once, at the first odd line, and returns h11's reader."""

    __slots__ = ("_hand_over", "_authority", "_held", "_left")

    def __init__(self, hand_over: Callable[[], Body]) -> None:
        self._hand_over = hand_over
        self._authority: Any = None  # a Body, when h11 has taken over
        self._held = b""  # a chunk line or the end of a chunk that has not all come: 12 bytes at most
        self._left = 0  # bytes of the current chunk still to come, its CR LF included

    def feed(self, data: bytes) -> tuple[bytes, bytes, bool]:
        if self._authority is not None:
            return self._authority.feed(data)
        if self._held:
            data = self._held + data
            self._held = b""
        pieces: list[bytes] = []
        position = 0
        done = False
        for _ in range(CHUNKS_A_CALL):
            if self._left:
                position, complete = self._take_data(data, position, pieces)
                if not complete:
                    break
            position, size = self._take_line(data, position)
            if size == ODD:
                return self._rest_to_authority(pieces, data[position:])
            if size < 0:
                break
            if size == 0:
                done = True
                break
            self._left = size + 2
        payload = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return payload, data[position:] if position < len(data) else b"", done

    def one(self, data: bytes) -> bytes | None:
        """The payload when `data` is exactly one chunk, as a streamed frame mostly is; None: call `feed`."""
        if self._left or self._held or self._authority is not None:
            return None
        line_end = data.find(b"\r\n", 0, MAX_SIZE_DIGITS + 2)
        size = chunk_size(data[:line_end]) if line_end > 0 else None
        if size and line_end + size + 4 == len(data) and data.endswith(b"\r\n"):
            return data[line_end + 2 : -2]
        return None

    def ends_at_eof(self) -> bool:
        return False

    def _take_data(self, data: bytes, position: int, pieces: list[bytes]) -> tuple[int, bool]:
        """Move what `data` has of the current chunk to `pieces`: (new position, whether the chunk is finished)."""
        stop = position + self._left
        if stop <= len(data):
            if data[stop - 2 : stop] != b"\r\n":
                raise Refused(400, "a chunk does not end in CR LF")
            if self._left > 2:
                pieces.append(data[position : stop - 2])
            self._left = 0
            return stop, True
        payload_stop = min(stop - 2, len(data))
        if payload_stop > position:
            pieces.append(data[position:payload_stop])
            self._left -= payload_stop - position
        self._held = data[payload_stop:]
        if self._held and self._held != b"\r":
            raise Refused(400, "a chunk does not end in CR LF")
        return len(data), False

    def _take_line(self, data: bytes, position: int) -> tuple[int, int]:
        """(new position, chunk size), or instead of a size: -1, the line has not all come; ODD, the authority was called."""
        line_end = data.find(b"\r\n", position, position + MAX_SIZE_DIGITS + 2)
        if line_end < 0:
            if _may_become_plain(data[position : position + MAX_SIZE_DIGITS + 2]):
                self._held = data[position:]
                return len(data), -1
            return self._call_authority(position)
        size = chunk_size(data[position:line_end])
        if size is None:
            return self._call_authority(position)
        if size:
            return line_end + 2, size
        ending = data[line_end + 2 : line_end + 4]
        if ending == b"\r\n":
            return line_end + 4, 0
        if ending in (b"", b"\r"):
            self._held = data[position:]
            return len(data), -1
        return self._call_authority(position)  # trailers

    def _call_authority(self, position: int) -> tuple[int, int]:
        self._authority = self._hand_over()
        return position, ODD

    def _rest_to_authority(self, pieces: list[bytes], rest: bytes) -> tuple[bytes, bytes, bool]:
        payload, unused, done = self._authority.feed(rest)
        pieces.append(payload)
        return b"".join(pieces), unused, done
