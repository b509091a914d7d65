"""`/v1/responses/{id}`: a stored answer read, its input listed, deleted. Loop thread only.

In: an exchange for such a path. Out: its answer, at once or when the store has answered; or that of the backend which has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from laya.errors import InvalidRequest, LayaError, MethodNotAllowed, NotFound
from laya.gateway.api.responses import item_key
from laya.gateway.backends import Candidate
from laya.gateway.exchange import DONE, JSON_LINE, Exchange
from laya.gateway.proxy import ProxyExchange
from laya.routing.table import Route
from laya.schema.codec import encode_json, encode_members
from laya.schema.responses import KeptConversation, decode_kept


class _Id(msgspec.Struct):
    id: str


_decode_id = msgspec.json.Decoder(_Id).decode
PREFIX = b"/v1/responses/"
INPUT_ITEMS = b"/input_items"


def check_method(path: bytes, method: bytes) -> None:
    """Raises MethodNotAllowed or NotFound."""
    tail = path[len(PREFIX) :]
    if b"/" in tail and not (tail.endswith(INPUT_ITEMS) and tail.count(b"/") == 1):
        raise NotFound("There is nothing at this path; a stored response has an id and, under it, input_items.")
    allowed = (b"GET", b"HEAD", b"OPTIONS") if b"/" in tail else (b"GET", b"HEAD", b"DELETE", b"OPTIONS")
    if method not in allowed:
        raise MethodNotAllowed(f"This path answers {b', '.join(allowed).decode()}.")


def answer_stored(exchange: Exchange) -> None:
    plan, store = exchange.plan, exchange.gateway.store
    tail = plan.path[len(PREFIX) :].decode("latin-1")
    id, _, part = tail.partition("/")
    scope = plan.key.name if plan.key is not None else ""
    if store is None:
        raise _unknown(id)
    store.get(id, scope, lambda kept: _guarded(exchange, _found, exchange, id, scope, part, kept))


def _guarded(exchange: Exchange, step: Callable[..., None], *arguments: Any) -> None:
    if exchange.state is DONE:
        return  # the client left while the store was read
    try:
        step(*arguments)
    except LayaError as error:
        exchange.fail(error)


def _found(exchange: Exchange, id: str, scope: str, part: str, kept: bytes | None) -> None:
    if kept is None:
        raise _unknown(id)
    conversation = decode_kept(kept)
    deletes = exchange.request.method == b"DELETE"
    if deletes:
        store = exchange.gateway.store
        if conversation.backend is None:
            for item in conversation.items[len(conversation.items) - conversation.own :]:
                store.delete(item_key(_decode_id(item).id), scope, lambda had: None)
            store.delete(id, scope, lambda had: _guarded(exchange, _answer, exchange, _deleted(id)))
            return
        store.delete(id, scope, lambda had: None)
    if conversation.backend is not None:
        _pass_on(exchange, id, conversation.backend)
    elif part:
        _answer(exchange, _input_items(conversation, exchange.request.query))
    else:
        _answer(exchange, bytes(conversation.response))


def _answer(exchange: Exchange, body: bytes) -> None:
    exchange.answer(200, JSON_LINE, body, "ok")


class StoredElsewhere(ProxyExchange):
    """The same request at the backend that has the answer."""

    def _body_for(self, target) -> bytes:
        return b""


def _pass_on(exchange: Exchange, id: str, name: str) -> None:
    gateway, connection = exchange.gateway, exchange.connection
    backend = gateway.backends.get(name)
    if backend is None:
        raise _unknown(id)  # it went with a reload
    route = Route("", (), redact=False, cache=False)
    target = Candidate(route.name, backend, None, None)
    passed = StoredElsewhere(gateway, connection, exchange.request, b"", exchange.plan, None, route, [target])
    passed.request_id, passed.began = exchange.request_id, exchange.began
    exchange.state = DONE  # its place is taken: it ends without an answer and is not counted
    connection.exchange = passed
    passed.start()


def _unknown(id: str) -> NotFound:
    return NotFound(f"Response with id {id[:100]!r} not found.")


def _deleted(id: str) -> bytes:
    return encode_json({"id": id, "object": "response.deleted", "deleted": True})


def _input_items(conversation: KeptConversation, query: bytes) -> bytes:
    """All items up to the answer's own output, newest first as OpenAI lists them; `order=asc` turns them round."""
    items: list[Any] = list(conversation.items[: len(conversation.items) - conversation.own])
    options = dict(part.partition(b"=")[::2] for part in query.split(b"&"))
    if options.get(b"order") != b"asc":
        items.reverse()
    given = options.get(b"limit", b"20")
    if not given.isdigit() or not 1 <= int(given[:9]) <= 100:  # OpenAI's bounds and default
        raise InvalidRequest("`limit` must be from 1 to 100.", param="limit")
    shown = items[: int(given)]
    more = len(items) > len(shown)
    return encode_members({"object": "list", "data": shown, "first_id": None, "last_id": None, "has_more": more})
