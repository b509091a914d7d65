"""The running server that a command talks to, found as its clients would: from the configuration, or by --url and --key.

In: the command line. Out: `Running`, which opens connections; CommandFailed in one line when nothing answers. It blocks;
main thread.
"""

from __future__ import annotations

import argparse
import http.client
import json
import ssl
from typing import Any
from urllib.parse import urlsplit

import msgspec

from laya.cli.exits import FAILED, NO_NETWORK, USAGE, CommandFailed
from laya.config import Config, load

TIMEOUT_S = 10.0  # for what a server answers from memory


class Running(msgspec.Struct, frozen=True):
    """`context` is None for plain HTTP."""

    host: str
    port: int
    key: str | None
    context: ssl.SSLContext | None = None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.context else 'http'}://{host}:{self.port}"

    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    def connection(self, timeout_s: float = TIMEOUT_S) -> http.client.HTTPConnection:
        if self.context is not None:
            return http.client.HTTPSConnection(self.host, self.port, timeout=timeout_s, context=self.context)
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)

    def get(self, path: str, timeout_s: float = TIMEOUT_S) -> http.client.HTTPResponse:
        """An answer of status 200 with its body unread. Raises CommandFailed for everything else."""
        try:
            connection = self.connection(timeout_s)
            connection.request("GET", path, headers=self.headers())
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as exc:
            raise self.unreachable(exc) from None
        if response.status != 200:
            text = reason_of(response.read(65536))
            raise CommandFailed(f"{self.url}{path} answers {response.status}: {text}", FAILED)
        return response

    def unreachable(self, exc: Exception) -> CommandFailed:
        reason = getattr(exc, "strerror", None) or str(exc) or type(exc).__name__
        return CommandFailed(f"nothing answers at {self.url}: {reason}; start it with: laya", NO_NETWORK)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", help="the server (default: where the configuration says that it listens)")
    parser.add_argument("--key", metavar="KEY", help="API key (default: the first of the configuration)")


def find(arguments: argparse.Namespace) -> Running:
    if arguments.url is not None:
        return _from_url(arguments.url, arguments.key)
    return of_config(load(arguments.config), arguments.key)


def of_config(config: Config, key: str | None = None) -> Running:
    server = config.server
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(server.host, server.host)
    if key is None:  # those that are known by their hash only cannot be sent
        key = next((known.key for known in config.auth.keys if known.key is not None), None)
    context = None
    if server.tls.certificate:  # our own server: known by its certificate, whatever name stands in it
        context = ssl.create_default_context()
        context.check_hostname = False
        try:
            context.load_verify_locations(server.tls.certificate)
        except (OSError, ssl.SSLError) as exc:
            raise CommandFailed(f"server.tls: cannot use {server.tls.certificate}: {exc.strerror or exc}") from None
    return Running(host, server.port, key, context)


def _from_url(text: str, key: str | None) -> Running:
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        parts, port = None, 0
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise CommandFailed(f"--url: found {text!r}; allowed: http://HOST:PORT or https://HOST:PORT", USAGE)
    return Running(parts.hostname, port, key, ssl.create_default_context() if parts.scheme == "https" else None)


def reason_of(body: bytes) -> str:
    """What the body of an error says, as one printable line."""
    try:
        told: Any = json.loads(body)
        text = " ".join(str(told["error"]["message"]).split())[:300]
        return "".join(char if char.isprintable() else "·" for char in text)  # no terminal obeys it
    except (ValueError, KeyError, TypeError):
        return "no reason given"
