"""`POST /v1/responses`: a request becomes a chat request; pieces of an answer become the API's own.

In: the body, and what the store has of the conversation that it goes on from. Out: a `Translation`. Pure; any thread, but for
`answer`, which belongs to the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from laya.errors import InvalidRequest, NotFound
from laya.gateway.api.responses_answer import ResponsesAnswer
from laya.gateway.api.responses_input import chat_form_of, items_of
from laya.schema.codec import encode_members
from laya.schema.responses import ResponsesRequest, decode_kept, decode_responses

decode = decode_responses
decode_count = decode_responses

MAX_REFERENCES = 1000  # each is a look into the store

NONE: Mapping[str, bytes | None] = {}

_decode_item = msgspec.json.Decoder(dict[str, Any]).decode


class ResponsesTranslation:
    """`kept` is the conversation that the request goes on from, `referenced` the stored items that it names."""

    def __init__(self, request: ResponsesRequest, kept: bytes | None, referenced: Mapping[str, bytes | None] = NONE) -> None:
        self.request = request
        self.stream = bool(request.stream)
        self._earlier = decode_kept(kept).items if kept is not None else []
        self._own = [_resolved(item, referenced) for item in items_of(request)]
        self.form = chat_form_of(request, self._own, [_decode_item(item) for item in self._earlier])

    def answer(self, model: str, keep: Callable[[str, Callable[[], bytes]], None] | None) -> ResponsesAnswer:
        """`keep(id, value)` stores a value, which is made when it is called, on any thread."""

        def keep_all(id: str, response: dict[str, Any]) -> None:
            keep(id, lambda: self._conversation(response))
            for item in response["output"]:
                keep(item_key(item["id"]), partial(encode_members, item))

        stored = keep is not None and self.request.store is not False
        return ResponsesAnswer(self.request, self.form.names, model, keep_all if stored else None)

    def _conversation(self, response: dict[str, Any]) -> bytes:
        """See `schema.responses.KeptConversation`."""
        output = response["output"]
        return encode_members({"response": response, "items": [*self._earlier, *self._own, *output], "own": len(output)})


def item_key(id: str) -> str:
    """An item's key in the store: a blank keeps it apart from responses, since no path holds one."""
    return f" {id}"


def previous_of(request: ResponsesRequest) -> str | None:
    return request.previous_response_id


def references_of(request: ResponsesRequest) -> list[str]:
    """Ids of stored items that the input names instead of holding them."""
    items = request.input if isinstance(request.input, list) else ()
    ids = [item["id"] for item in items if item.get("type") == "item_reference" and isinstance(item.get("id"), str)]
    if len(ids) > MAX_REFERENCES:
        raise InvalidRequest(f"`input` names more than {MAX_REFERENCES} stored items.", param="input")
    return ids


def _resolved(item: dict[str, Any], referenced: Mapping[str, bytes | None]) -> dict[str, Any]:
    """Raises NotFound for an item that is not stored under this key."""
    if item.get("type") != "item_reference":
        return item
    kept = referenced.get(item["id"]) if isinstance(item.get("id"), str) else None
    if kept is None:
        raise NotFound(f"Item with id {str(item.get('id'))[:100]!r} not found.", param="input")
    return _decode_item(kept)


translate = ResponsesTranslation
