"""Chunked coding taken off a response, for the benchmark's own clients: proxies cut chunks where they like."""

from __future__ import annotations


class Dechunker:
    """Bytes of one response in, payload out. `status_ok` once the head has come; `done` after the last chunk."""

    __slots__ = ("status_ok", "done", "_buffer", "_left", "_last", "_in_body")

    def __init__(self) -> None:
        self.status_ok: bool | None = None
        self.done = False
        self._buffer = b""
        self._left = 0  # bytes of the chunk under way, its line end included
        self._last = False
        self._in_body = False

    def feed(self, data: bytes) -> bytes:
        """The payload that `data` completes. A status other than 200, or an answer without chunks, ends it."""
        buffer = self._buffer + data if self._buffer else data
        if not self._in_body:
            head, border, buffer = buffer.partition(b"\r\n\r\n")
            if not border:
                self._buffer = head
                return b""
            self._in_body = True
            self.status_ok = head.startswith(b"HTTP/1.1 200") and b"\r\ntransfer-encoding: chunked" in head.lower()
            if not self.status_ok:
                self.done = True
                return b""
        payload, self._buffer = self._take(buffer)
        return payload

    def _take(self, buffer: bytes) -> tuple[bytes, bytes]:
        """(payload, bytes that say nothing yet)."""
        parts = []
        at, size = 0, len(buffer)
        while at < size and not self.done:
            if self._left:
                piece = buffer[at : at + self._left]
                parts.append(piece[: max(0, self._left - 2)])
                at += len(piece)
                self._left -= len(piece)
                self.done = self._last and not self._left
                continue
            end = buffer.find(b"\r\n", at)
            if end < 0:
                break
            length = int(buffer[at:end].split(b";")[0], 16)
            at = end + 2
            self._last = length == 0
            self._left = length + 2
        return b"".join(parts), buffer[at:]
