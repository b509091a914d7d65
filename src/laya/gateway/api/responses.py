"""`POST /v1/responses`: a request becomes a chat request; pieces of an answer become the API's own.

In: the body, and what the store has of the conversation that it goes on from. Out: a `Translation`. Pure; any thread, but for
`answer`, which belongs to the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from laya.gateway.api.responses_answer import ResponsesAnswer
from laya.gateway.api.responses_input import chat_form_of, items_of
from laya.schema.codec import encode_members
from laya.schema.responses import ResponsesRequest, decode_kept, decode_responses

decode = decode_responses
decode_count = decode_responses

_decode_item = msgspec.json.Decoder(dict[str, Any]).decode


class ResponsesTranslation:
    """`earlier`: the items that the stored conversation ends with."""

    def __init__(self, request: ResponsesRequest, kept: bytes | None) -> None:
        self.request = request
        self.stream = bool(request.stream)
        self._earlier = decode_kept(kept).items if kept is not None else []
        self.form = chat_form_of(request, [_decode_item(item) for item in self._earlier])

    def answer(self, model: str, keep: Callable[[str, Callable[[], bytes]], None] | None) -> ResponsesAnswer:
        """`keep(id, value)` stores the conversation; the value is made when it is called, on any thread."""
        if keep is None or self.request.store is False:
            return ResponsesAnswer(self.request, self.form.names, model, None)
        return ResponsesAnswer(
            self.request, self.form.names, model, lambda id, response: keep(id, lambda: self._conversation(response))
        )

    def _conversation(self, response: dict[str, Any]) -> bytes:
        """See `schema.responses.KeptConversation`."""
        output = response["output"]
        items = [*self._earlier, *items_of(self.request), *output]
        return encode_members({"response": response, "items": items, "own": len(output)})


def previous_of(request: ResponsesRequest) -> str | None:
    return request.previous_response_id


translate = ResponsesTranslation
