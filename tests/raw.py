"""Raw HTTP over a socket, for tests that care about bytes."""

from __future__ import annotations

import socket
import time


def read_all(sock: socket.socket, seconds: float = 10.0) -> bytes:
    """Everything until the peer closes, or what came within `seconds`."""
    sock.settimeout(0.2)
    data, until = b"", time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            piece = sock.recv(65536)
        except TimeoutError:
            continue
        except ConnectionResetError:
            return data
        if not piece:
            return data
        data += piece
    return data


def read_until(sock: socket.socket, mark: bytes, seconds: float = 10.0) -> bytes:
    """Bytes up to and with `mark`; fails when it does not come."""
    sock.settimeout(0.2)
    data, until = b"", time.monotonic() + seconds
    while mark not in data:
        assert time.monotonic() < until, f"{mark!r} did not come: {data!r}"
        try:
            piece = sock.recv(65536)
        except TimeoutError:
            continue
        assert piece, f"closed before {mark!r}: {data!r}"
        data += piece
    return data


def read_response(sock: socket.socket) -> tuple[int, dict[bytes, bytes], bytes]:
    """(status, headers, body) of one response with a Content-Length."""
    data = read_until(sock, b"\r\n\r\n")
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])}
    length = int(headers.get(b"content-length", b"0"))
    while len(body) < length:
        body += sock.recv(65536)
    return int(lines[0].split(b" ")[1]), headers, body


def post(body: bytes, path: bytes = b"/v1/chat/completions", extra: bytes = b"", version: bytes = b"1.1") -> bytes:
    return (
        b"POST %b HTTP/%b\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b\r\n%b"
        % (path, version, len(body), extra, body)
    )


def unchunk(data: bytes) -> tuple[bytes, bool]:
    """(payload, whether the last chunk came)."""
    out = b""
    while data:
        size, _, rest = data.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            return out, True
        out += rest[:length]
        data = rest[length + 2 :]
    return out, False


def read_stream(sock: socket.socket, seconds: float = 10.0) -> bytes:
    """The payload of one chunked answer; fails when its last chunk does not come."""
    data = read_until(sock, b"\r\n\r\n", seconds).partition(b"\r\n\r\n")[2]
    until = time.monotonic() + seconds
    while not data.endswith(b"0\r\n\r\n") or not unchunk(data)[1]:
        assert time.monotonic() < until, f"no last chunk: {data[-200:]!r}"
        try:
            piece = sock.recv(1 << 20)
        except TimeoutError:
            continue
        assert piece, f"closed before the last chunk: {data[-200:]!r}"
        data += piece
    return unchunk(data)[0]
