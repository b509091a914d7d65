"""`/v1/responses/{id}`: a stored answer read, its input listed, deleted. Loop thread only.

In: an exchange for such a path. Out: its answer, at once or when the store has answered; or that of the backend which has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec

from laya.errors import InvalidRequest, LayaError, MethodNotAllowed, NotFound
from laya.gateway.api.responses import item_key
from laya.gateway.backends import Candidate
from laya.gateway.exchange import DONE, JSON_LINE, Exchange
from laya.gateway.proxy import ProxyExchange
from laya.gateway.translation import WORK_ON_LOOP
from laya.routing.table import Route
from laya.schema.codec import decode_members, encode_json, encode_members
from laya.schema.responses import KeptConversation, decode_kept


class _Id(msgspec.Struct):
    id: str


class _GivenId(msgspec.Struct):
    id: Any = None


_decode_given_id = msgspec.json.Decoder(_GivenId).decode
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
    store.find(id, scope, lambda kept: _guarded(exchange, _found, exchange, id, scope, part, kept))


def _guarded(exchange: Exchange, step: Callable[..., None], *arguments: Any) -> None:
    if exchange.state is DONE:
        return  # the client left while the store was read
    try:
        step(*arguments)
    except LayaError as error:
        exchange.fail(error)
    except Exception as fault:
        exchange.on_fault(fault)


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
        _list(exchange, id, conversation, len(kept))
    elif b"stream=true" in exchange.request.query.split(b"&"):
        raise InvalidRequest("A stored response is read whole here, not as a stream.", param="stream")
    else:
        _answer(exchange, bytes(conversation.response))


def _answer(exchange: Exchange, body: bytes) -> None:
    exchange.answer(200, JSON_LINE, body, "ok")


def _list(exchange: Exchange, id: str, conversation: KeptConversation, size: int) -> None:
    """Here, or in a worker: every item is looked at."""

    def work() -> bytes:
        return _input_items(id, conversation, exchange.request.query)

    def done(made: Any) -> None:
        if isinstance(made, LayaError):
            raise made
        _answer(exchange, made)

    if size <= WORK_ON_LOOP:
        done(work())
    else:
        exchange.gateway.offload(work, lambda made: _guarded(exchange, done, made))


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


def _input_items(id: str, conversation: KeptConversation, query: bytes) -> bytes:
    """A page of the items up to the answer's own output, newest first as OpenAI lists them; `order=asc` turns them round, and
    `after` names the last item of the page before."""
    items = list(zip(_ids_of(id, conversation), conversation.items, strict=False))
    options = dict(part.partition(b"=")[::2] for part in query.split(b"&"))
    if options.get(b"order") != b"asc":
        items.reverse()
    given = options.get(b"limit", b"20")
    if not given.isdigit() or len(given) > 3 or not 1 <= int(given) <= 100:  # OpenAI's bounds and default
        raise InvalidRequest("`limit` must be from 1 to 100.", param="limit")
    if b"after" in options:
        items = _behind(items, unquote_to_bytes(options[b"after"]).decode("utf-8", "replace"))
    shown = items[: int(given)]
    first, last = (shown[0][0], shown[-1][0]) if shown else (None, None)
    data = [{**decode_members(item), "id": name} for name, item in shown]
    return encode_members({
        "object": "list", "data": data, "first_id": first, "last_id": last, "has_more": len(items) > len(shown),
    })  # fmt: skip


def _ids_of(id: str, conversation: KeptConversation) -> list[str]:
    """Of each input item the id that it came with, if no earlier one had it; else one by its place."""
    names: list[str] = []
    seen: set[str] = set()
    for place in range(len(conversation.items) - conversation.own):
        own = _decode_given_id(conversation.items[place]).id
        names.append(own if isinstance(own, str) and own and own not in seen else f"{id}-{place}")
        seen.add(names[-1])
    return names


def _behind(items: list[tuple[str, Any]], name: str) -> list[tuple[str, Any]]:
    for place, (known, _) in enumerate(items, 1):
        if known == name:
            return items[place:]
    raise InvalidRequest(f"No item has the id {name[:100]!r}.", param="after")
