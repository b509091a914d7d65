"""What the gateway makes of a request head, once for each distinct head.

In: a head whose bytes were seen before or not. Out: a `HeadPlan`, kept beside the parser's memo of that head: clients send the
same head again and again, and every decision here depends on nothing else. Loop thread only.
"""

from __future__ import annotations

from laya.errors import LayaError, MethodNotAllowed, NotFound, UpgradeRequired
from laya.gateway.access import Access
from laya.gateway.forms import boundary_of
from laya.gateway.pages import Pages
from laya.gateway.stored_responses import PREFIX as STORED_PREFIX
from laya.gateway.stored_responses import check_method

# The APIs with a `model` in their body, by path.
APIS = {
    b"/v1/chat/completions": "chat",
    b"/v1/completions": "completions",
    b"/v1/responses": "responses",
    b"/v1/responses/input_tokens": "responses",
    b"/v1/messages": "messages",
    b"/v1/messages/count_tokens": "messages",
    b"/v1/embeddings": "embeddings",
    b"/v1/rerank": "rerank",
    b"/v1/score": "score",
    b"/v1/moderations": "moderations",
    b"/v1/systemone": "systemone",
    b"/tokenize": "tokenize",
    b"/detokenize": "tokenize",
    b"/v1/audio/transcriptions": "audio",
    b"/v1/audio/translations": "audio",
    b"/v1/audio/speech": "audio",
    b"/v1/images/generations": "images",
    b"/v1/images/edits": "images",
    b"/v1/images/variations": "images",
}
ID_BYTES = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:")
MAX_ID_BYTES = 128


class HeadPlan:
    """`error` is set when the head alone shows that the request cannot be served; `api` is None for a page."""

    __slots__ = (
        "owner", "error", "api", "path", "key", "coded", "asks", "request_id", "target", "session", "upstream_heads",
        "boundary", "client", "cap", "lanes",
    )  # fmt: skip

    def __init__(self, owner: object, request, access: Access, pages: Pages) -> None:
        fields = request.fields
        self.owner = owner  # the route table it was made under: after a reload it is made anew
        self.path = request.path
        self.api: str | None = None
        self.key = None
        self.coded = b"content-encoding" in fields
        content_type = fields.get(b"content-type", b"")
        self.boundary = boundary_of(content_type) if content_type[:10].lower() == b"multipart/" else None
        self.asks = b"x-laya-timing" in fields or b"origin" in fields
        self.request_id = _sane_id(fields.get(b"x-request-id"))
        named = fields.get(b"x-laya-target")
        self.target = None if named is None else named.decode("latin-1")
        self.session = fields.get(b"x-laya-session") or None
        # Whose request a router of ours passes on, and the cap on its prompt: taken where only such routers call.
        self.client = fields.get(b"x-laya-client", b"").decode("latin-1")[:MAX_ID_BYTES] if access.relayed else ""
        cap = fields.get(b"x-laya-max-prompt-tokens", b"") if access.relayed else b""
        self.cap = int(cap) if cap.isdigit() and len(cap) < 10 else None
        self.upstream_heads: dict = {}  # target -> the head sent there, but for the lines that change
        self.lanes: dict = {}  # model name -> the fast lane of its requests (`net.lane`)
        self.error: LayaError | None = access.check_place(fields)
        if self.error is None:
            try:
                self._find(request, pages)
                if self.api is not None or (self.path not in pages.open and request.method != b"OPTIONS"):
                    self.key = access.person(fields) if pages.for_people(self.path) else access.key_of(fields)
                    if self.key is not None and (self.key.rpm or self.key.tpm):
                        self.asks = True  # it is told where it stands
            except LayaError as refused:
                self.error = refused.with_traceback(None)  # it is kept: its frames must not be

    def _find(self, request, pages: Pages) -> None:
        """Which API or page the path means: as it stands, else with slashes tidied."""
        for path in (request.path, _tidy(request.path)):
            method = request.method
            if path in APIS:
                self.path = path
                if method == b"POST":
                    self.api = APIS[path]
                elif method != b"OPTIONS":
                    if b"upgrade" in request.fields:  # a client that gets this comes back with POST at once
                        raise UpgradeRequired("This path has no websocket; send a POST.")
                    raise MethodNotAllowed("This path answers POST.")
                return
            if path.startswith(STORED_PREFIX) and path != STORED_PREFIX:
                self.path = path
                check_method(path, method)
                return
            if pages.has(path):
                self.path = path
                if method not in (b"GET", b"HEAD", b"OPTIONS"):
                    raise MethodNotAllowed("This path answers GET.")
                return
        if request.method != b"OPTIONS":
            raise NotFound(f"There is nothing at {request.path[:100].decode('latin-1')}.{_meant(request.path)}")


def _meant(path: bytes) -> str:
    """A client's base URL without /v1, or with /v1 where the client adds its own, is the commonest wrong path."""
    return next((f" Did you mean {other.decode()}?" for other in (b"/v1" + path, path[3:]) if other in APIS), "")


def _sane_id(given: bytes | None) -> bytes | None:
    return given if given and len(given) <= MAX_ID_BYTES and ID_BYTES.issuperset(given) else None


def _tidy(path: bytes) -> bytes:
    """Repeated and trailing slashes taken off: `//v1//models/` is /v1/models."""
    while b"//" in path:
        path = path.replace(b"//", b"/")
    return path.rstrip(b"/") or b"/"
