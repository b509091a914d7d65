"""`/v1/responses/{id}`: a stored answer read, its input listed, deleted. Loop thread only.

In: an exchange for such a path. Out: its answer, at once or when the store has answered.
"""

from __future__ import annotations

from typing import Any

from laya.errors import InvalidRequest, LayaError, MethodNotAllowed, NotFound
from laya.gateway.exchange import DONE, JSON_LINE, Exchange
from laya.schema.codec import encode_json, encode_members
from laya.schema.responses import decode_kept

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
    if exchange.request.method == b"DELETE":
        store.delete(id, scope, lambda had: _finish(exchange, lambda: _deleted(id, had)))
    elif part:
        store.get(id, scope, lambda kept: _finish(exchange, lambda: _input_items(id, kept, exchange.request.query)))
    else:
        store.get(id, scope, lambda kept: _finish(exchange, lambda: _response(id, kept)))


def _finish(exchange: Exchange, make) -> None:
    if exchange.state is DONE:
        return  # the client left while the store was read
    try:
        body = make()
    except LayaError as error:
        exchange.fail(error)
        return
    exchange.answer(200, JSON_LINE, body, "ok")


def _unknown(id: str) -> NotFound:
    return NotFound(f"Response with id {id[:100]!r} not found.")


def _deleted(id: str, had: bool) -> bytes:
    if not had:
        raise _unknown(id)
    return encode_json({"id": id, "object": "response.deleted", "deleted": True})


def _response(id: str, kept: bytes | None) -> bytes:
    if kept is None:
        raise _unknown(id)
    return bytes(decode_kept(kept).response)


def _input_items(id: str, kept: bytes | None, query: bytes) -> bytes:
    """All items up to the answer's own output, newest first as OpenAI lists them; `order=asc` turns them round."""
    if kept is None:
        raise _unknown(id)
    conversation = decode_kept(kept)
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
