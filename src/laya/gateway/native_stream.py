"""A Responses or Messages answer that is passed on untouched: whose is it, did it end as it should, how is it told if not?

In: the bytes that pass by. Out: the answer's id; whether the event that ends a stream went by; frames that end one with an
error. Loop thread.
"""

from __future__ import annotations

import re

from laya.errors import LayaError
from laya.gateway.api.anthropic_errors import error_body
from laya.gateway.api.responses_answer import FAILURE_CODES
from laya.schema.codec import encode_json
from laya.wire.sse import COMMENT, frame

# As `event: NAME` or as the `type` of the data: quotes inside JSON strings are escaped, so no text can look like it.
_LAST = {
    "responses": re.compile(rb'(?:^event: ?|"type": ?")response\.(?:completed|incomplete|failed)\b', re.MULTILINE),
    "messages": re.compile(rb'(?:^event: ?|"type": ?")(?:message_stop|error)\b', re.MULTILINE),
}
_ID = re.compile(rb'"id": ?"(resp[A-Za-z0-9_-]*)"')
_NUMBER = re.compile(rb'"sequence_number": ?(\d+)')
_OVERLAP = 64  # longer than any of these marks
PING = frame(b'{"type":"ping"}', b"ping")


class NativeStream:
    def __init__(self, api: str) -> None:
        self.whole = False
        self._api = api
        self._last = _LAST[api]
        self._tail = b""
        self.id: bytes | None = None  # of the answer, once it went by
        self._number = 0

    def see(self, data: bytes) -> None:
        seen = self._tail + data
        self._tail = seen[-_OVERLAP:]
        if self._last.search(seen):
            self.whole = True
        if self._api == "responses":
            if self.id is None and (found := _ID.search(seen)):
                self.id = found[1]
            for number in _NUMBER.findall(seen):
                self._number = int(number[:18])

    def sign_of_life(self) -> bytes:
        """An event that clients take for progress. Of a response without an id yet nothing can be told but a comment."""
        if self._api == "messages":
            return PING
        if self.id is None:
            return COMMENT
        response = {"id": self.id.decode("latin-1"), "object": "response", "status": "in_progress", "output": []}
        event = {"type": "response.in_progress", "sequence_number": self._number, "response": response}
        return frame(encode_json(event), b"response.in_progress")

    def error(self, error: LayaError) -> bytes:
        if self._api == "messages":
            return frame(encode_json(error_body(error)), b"error")
        code = error.code if error.code in FAILURE_CODES else "server_error"
        response = {
            "id": (self.id or b"resp_unknown").decode("latin-1"), "object": "response", "status": "failed", "output": [],
            "error": {"code": code, "message": error.message},
        }  # fmt: skip
        event = {"type": "response.failed", "sequence_number": self._number + 1, "response": response}
        return frame(encode_json(event), b"response.failed")
