"""The sockets that the server binds, where the system is not as one would like it."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from laya.net import server


async def localhost(host: str, port: int, *, type: int) -> list[tuple]:
    return [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
    ]


LOOP: Any = SimpleNamespace(getaddrinfo=localhost)


class KernelWithout(socket.socket):
    missing: tuple[int, ...] = (socket.AF_INET6,)

    def __init__(self, family: int = -1, *rest: Any) -> None:
        if family in self.missing:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        super().__init__(family, *rest)


def test_an_address_of_a_family_that_the_kernel_has_not_is_left_out(monkeypatch):
    monkeypatch.setattr(server.socket, "socket", KernelWithout)
    (sock,) = asyncio.run(server._bound(LOOP, "localhost", 0))
    assert sock.getsockname()[0] == "127.0.0.1"
    sock.close()


def test_a_name_without_any_address_that_the_kernel_has_is_an_error(monkeypatch):
    monkeypatch.setattr(server.socket, "socket", KernelWithout)
    monkeypatch.setattr(KernelWithout, "missing", (socket.AF_INET6, socket.AF_INET))
    with pytest.raises(OSError, match=os.strerror(errno.EAFNOSUPPORT)):
        asyncio.run(server._bound(LOOP, "localhost", 0))


def test_an_address_that_this_machine_has_not_is_left_out_beside_others():
    other = "192.0.2.1"  # as ::1 where IPv6 is switched off

    async def name(host: str, port: int, *, type: int) -> list[tuple]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    loop: Any = SimpleNamespace(getaddrinfo=name)
    addresses = [other, "127.0.0.1"]
    (sock,) = asyncio.run(server._bound(loop, "localhost", 0))
    assert sock.getsockname()[0] == "127.0.0.1"
    sock.close()
    addresses = [other]
    with pytest.raises(OSError, match=os.strerror(errno.EADDRNOTAVAIL)):
        asyncio.run(server._bound(loop, "localhost", 0))
