"""The form of an error's body, by path: most APIs have OpenAI's, some have their own. Pure; loop thread.

In: the path of the request (b"" when there was none) and the error. Out: the body.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laya.errors import LayaError
from laya.gateway.api import anthropic_errors, systemone_errors
from laya.schema.codec import encode_json

# Paths whose clients know another form than OpenAI's.
FORMS: dict[bytes, Callable[[LayaError], dict[str, Any]]] = {
    b"/v1/messages": anthropic_errors.error_body,
    b"/v1/messages/count_tokens": anthropic_errors.error_body,
    b"/v1/systemone": systemone_errors.error_body,
}


def error_status(path: bytes, error: LayaError) -> int:
    return systemone_errors.error_status(error) if path == b"/v1/systemone" else error.status


def error_bytes(path: bytes, error: LayaError) -> bytes:
    form = FORMS.get(path) or (anthropic_errors.error_body if path.startswith(b"/v1/messages/") else None)
    return encode_json(error.body() if form is None else form(error))
