"""Who may call: the API key, the Host on loopback, the browser origin. Pure; loop thread.

In: a request head. Out: the key's configuration (None when there are no keys), or a LayaError.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
from urllib.parse import urlsplit

from laya.errors import Forbidden, LayaError, Misdirected, SignIn, Unauthorized

MAX_KNOWN_HOSTS = 256  # Host values remembered as good; a flood of others only costs the check


class Access:
    """Built from configuration; `loopback` tells that the server listens on loopback only, `relayed` that only routers of ours
    call, which name the client of each request."""

    def __init__(self, auth, cors_origins: tuple[str, ...], *, loopback: bool, relayed: bool = False) -> None:
        self.relayed = relayed
        self._keys = {key.digest: key for key in auth.keys}
        self._origins = frozenset(origin.encode() for origin in cors_origins)
        self._any_origin = b"*" in self._origins
        self._loopback = loopback
        self._good_hosts: set[bytes] = set()

    def check_place(self, fields: dict[bytes, bytes]) -> LayaError | None:
        """Host and Origin: what keeps a web page the user happens to visit away from a server on loopback."""
        host = fields.get(b"host", b"")
        if host not in self._good_hosts:
            if self._loopback and not is_local_host(host):
                return Misdirected("This server answers to localhost only; the Host header names another.")
            if len(self._good_hosts) < MAX_KNOWN_HOSTS:
                self._good_hosts.add(host)
        origin = fields.get(b"origin")
        if origin is not None and not self.origin_allowed(origin, host):
            return Forbidden("Pages of this origin may not call; see server.cors_origins.")
        return None

    def origin_allowed(self, origin: bytes, host: bytes) -> bool:
        return self._any_origin or origin in self._origins or origin.partition(b"://")[2] == host

    def cors_headers(self, origin: bytes | None) -> list[tuple[bytes, bytes]]:
        """Headers that let the page read the answer; none where no origin was configured."""
        if origin is None or not (self._any_origin or origin in self._origins):
            return []
        return [(b"access-control-allow-origin", origin), (b"vary", b"origin")]

    def key_of(self, fields: dict[bytes, bytes]):
        """The key's configuration. Raises Unauthorized."""
        if not self._keys:
            return None
        given = fields.get(b"authorization", b"")
        scheme, _, token = given.partition(b" ")
        if scheme.lower() != b"bearer":
            token = fields.get(b"x-api-key", b"")
        token = token.strip()
        if not token:
            raise Unauthorized("An API key is needed: send `Authorization: Bearer KEY` or `x-api-key: KEY`.")
        digest = hashlib.sha256(token).digest()
        for known, key in self._keys.items():
            if hmac.compare_digest(known, digest):
                return key
        raise Unauthorized("The API key is not known here.")

    def person(self, fields: dict[bytes, bytes]):
        """The same for a page: a browser gives the key as the password of basic authentication. Only pages take it, because a
        browser sends it along by itself, from wherever it was led here. Raises SignIn."""
        scheme, _, token = fields.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"basic":
            fields = {**fields, b"authorization": b"Bearer " + _password(token)}
        try:
            return self.key_of(fields)
        except Unauthorized as refused:
            raise SignIn(refused.message) from None


def _password(token: bytes) -> bytes:
    try:
        return base64.b64decode(token.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return b""


def is_local_host(host: bytes) -> bool:
    """localhost, *.localhost (RFC 6761) or a loopback address, with any port."""
    try:
        name = urlsplit(b"//" + host).hostname
    except ValueError:
        return False
    if name is None:
        return False
    text = name.decode("latin-1").rstrip(".")
    if text == "localhost" or text.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False
