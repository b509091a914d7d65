"""Errors in Anthropic's form and in words that its clients act on. Pure; any thread."""

from __future__ import annotations

import re
from typing import Any

from laya.errors import LayaError

_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip
# The window and the prompt, in either order, in the words of the engine and of common servers.
_LENGTHS = re.compile(r"(\d+) tokens?\b.{0,80}?(\d+) tokens", re.DOTALL)
_INDEX = re.compile(r"\[(\d+)\]")


def error_body(error: LayaError) -> dict[str, Any]:
    kind = _TYPES.get(error.status) or ("invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": _message(error)}}


def _message(error: LayaError) -> str:
    """The member at fault comes first, as in `messages.1.role: ...`; clients mend their request by it."""
    if error.code == "context_length_exceeded":
        return _too_long(error.message)
    if error.param is None or error.status != 400:
        return error.message
    place = _INDEX.sub(r".\1", error.param)
    return f"{place}: {error.message}"


def _too_long(message: str) -> str:
    """The beginning that makes a client compact its conversation, with both numbers where they are known."""
    lengths = _LENGTHS.search(message)
    if lengths is None:
        return f"prompt is too long: {message}"
    window, prompt = sorted((int(lengths[1]), int(lengths[2])))
    return f"prompt is too long: {prompt} tokens > {window} maximum"
