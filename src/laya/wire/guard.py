"""Policy for bodies: watches the framing of the raw bytes on their way to h11, and knows where the message ends.

In: the segments of a body whose head policy let through. Out: how many of the bytes belong to this body, or `Refused`.
h11 then reads exactly those bytes, and `authority` checks that both saw the same end. Loop thread.
"""

from __future__ import annotations

import re

from laya.wire.messages import Limits
from laya.wire.policy import Refused, check_bytes, field_lists

# One call admits so many chunk lines: h11 takes 8 to 16 us for each, so a call holds the loop for at most 0.5 ms.
CHUNKS_A_CALL = 32

# At least as strict as h11, or the guard, which runs ahead, would report a later fault than h11 reports byte by byte.
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[\t\x20-\x7e\x80-\xff]*|[ \t]*)")
_SIZE, _DATA, _DATA_END, _TRAILERS, _DONE = range(5)


class LengthGuard:
    """A body of declared length (0: none)."""

    __slots__ = ("_left",)

    def __init__(self, length: int) -> None:
        self._left = length

    def admit(self, data: bytes) -> int:
        taken = min(len(data), self._left)
        self._left -= taken
        return taken

    @property
    def done(self) -> bool:
        return self._left == 0


class OpenGuard:
    """A body that ends with the connection."""

    __slots__ = ()
    done = False

    def admit(self, data: bytes) -> int:
        return len(data)


class ChunkGuard:
    """A chunked body: bounds on chunk lines, extensions, trailers and (with `bounded`) the whole; no bare CR or LF."""

    __slots__ = ("_limits", "_bounded", "_state", "_held", "_scanned", "_left", "_total")

    def __init__(self, limits: Limits, bounded: bool) -> None:
        self._limits = limits
        self._bounded = bounded
        self._state = _SIZE
        self._held = b""  # bytes of an unfinished line or trailer section; h11 has had them too
        self._scanned = 0
        self._left = 0
        self._total = 0

    @property
    def done(self) -> bool:
        return self._state == _DONE

    def admit(self, data: bytes) -> int:
        """How many bytes of `data` h11 may have now; fewer than all at the end of the body or after many chunks."""
        position = lines = 0
        size = len(data)
        while position < size and self._state != _DONE:
            if self._state == _SIZE:
                if lines == CHUNKS_A_CALL:
                    break
                lines += 1
                position = self._size_line(data, position)
            elif self._state == _DATA:
                taken = min(size - position, self._left)
                position += taken
                self._left -= taken
                if not self._left:
                    self._state = _DATA_END
            elif self._state == _DATA_END:
                position = self._data_end(data, position)
            else:
                position = self._trailers(data, position)
        return position

    def _size_line(self, data: bytes, position: int) -> int:
        bound = self._limits.max_chunk_line_bytes
        held = len(self._held)
        line = self._held + data[position : position + bound + 2 - held]
        line_end = line.find(b"\r\n")
        if line_end < 0:
            if len(line) >= bound + 2:
                raise Refused(400, "a chunk line is too long")
            self._held = line
            return len(data)
        match = _SIZE_LINE.fullmatch(line, 0, line_end)
        if match is None:
            raise Refused(400, "malformed chunk line")
        self._held = b""
        self._left = int(match[1], 16)
        self._total += self._left
        if self._bounded and self._total > self._limits.max_body_bytes:
            raise Refused(413, f"the body is larger than {self._limits.max_body_bytes} bytes")
        self._state = _DATA if self._left else _TRAILERS
        return position + line_end + 2 - held

    def _data_end(self, data: bytes, position: int) -> int:
        wanted = b"\r\n"[len(self._held) :]
        found = data[position : position + len(wanted)]
        if not wanted.startswith(found):
            raise Refused(400, "a chunk does not end in CR LF")
        if found == wanted:
            self._held = b""
            self._state = _SIZE
        else:
            self._held += found
        return position + len(found)

    def _trailers(self, data: bytes, position: int) -> int:
        """Trailers are accepted within the bounds of a head, checked like one, and dropped."""
        bound = self._limits.max_head_bytes
        held = len(self._held)
        section = self._held + data[position : position + bound + 4 - held]
        if section.startswith(b"\r\n"):
            self._state = _DONE
            return position + 2 - held
        if section == b"\r":
            self._held = section
            return len(data)
        end = section.find(b"\r\n\r\n", max(0, self._scanned - 3), bound)
        stop = end + 2 if end >= 0 else min(len(section), bound)
        check_bytes(section, self._scanned, stop, None)
        if end < 0:
            if len(section) >= bound:
                raise Refused(431, "the trailers are too long")
            self._held = section
            self._scanned = len(section)
            return len(data)
        field_lists([b"", *section[:end].split(b"\r\n")], self._limits)
        self._state = _DONE
        return position + end + 4 - held
