"""What `classify` asks of a request: its last user message, and an estimate of the prompt's length.

In: the members of a body of any API, values raw. Out: `RequestFacts` and a text. Shapes that an API does not know are passed
over: refusing them is the business of whoever answers. Any thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from laya.routing.classify import RequestFacts
from laya.schema.fields import RoutingFields

_decode = msgspec.json.Decoder().decode
# Where each API keeps its prompt, in the order in which a model reads it.
PROMPT_MEMBERS = ("system", "instructions", "tools", "messages", "prompt", "input", "state")
LIMIT_MEMBERS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_IMAGES = frozenset({"image", "image_url", "input_image"})
# English text has about four characters a token; of scripts without spaces a character is about one.
CHARS_PER_TOKEN = 4


def read_facts(fields: RoutingFields) -> tuple[RequestFacts, str]:
    """The facts, and the last user message as one text ("" where there is none)."""
    members = fields.members
    prompt = {key: _value(members[key]) for key in PROMPT_MEMBERS if key in members}
    texts = [text for key, value in prompt.items() if key != "tools" for text in _texts(value)]
    tools = prompt.get("tools")
    tokens = sum(map(estimate_tokens, texts)) + (len(bytes(members["tools"])) // CHARS_PER_TOKEN if tools else 0)
    limits = [value for key in LIMIT_MEMBERS if type(value := _value(members.get(key))) is int]
    facts = RequestFacts(
        prompt_tokens=tokens, max_tokens=limits[0] if limits else None, has_tools=bool(tools),
        has_images=any(_has_image(value) for key, value in prompt.items() if key != "tools"),
    )  # fmt: skip
    return facts, _last_user_text(prompt)


def estimate_tokens(text: str) -> int:
    """Tokens of a text, without a tokenizer: good enough to tell a note from a document."""
    if text.isascii():
        return -(-len(text) // CHARS_PER_TOKEN)
    wide = (len(text.encode("utf-8", "replace")) - len(text)) // 2  # three bytes each
    return wide + -(-max(0, len(text) - wide) // CHARS_PER_TOKEN)


def prompt_bytes(fields: RoutingFields) -> bytes:
    """The prompt as the client wrote it, for finding requests that begin alike."""
    members = fields.members
    return b"".join(bytes(members[key]) for key in PROMPT_MEMBERS if key in members)


def _value(raw: msgspec.Raw | None) -> Any:
    try:
        return None if raw is None else _decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None


def _texts(value: Any) -> Iterator[str]:
    """Every text in messages, parts and plain strings, at most three levels down: message, part, and a tool's result."""
    stack = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, list) and depth < 6:
            stack.extend((part, depth + 1) for part in reversed(item))
        elif isinstance(item, dict) and depth < 6:
            stack.extend((item[key], depth + 1) for key in ("text", "content", "output") if key in item)


def _has_image(value: Any, depth: int = 0) -> bool:
    if isinstance(value, list) and depth < 6:
        return any(_has_image(part, depth + 1) for part in value)
    if isinstance(value, dict):
        return value.get("type") in _IMAGES or _has_image(value.get("content"), depth + 1)
    return False


def _last_user_text(prompt: dict[str, Any]) -> str:
    for key in ("messages", "input", "prompt", "state"):
        value = prompt.get(key)
        if isinstance(value, list) and any(isinstance(item, dict) and "role" in item for item in value):
            users = [item for item in value if isinstance(item, dict) and item.get("role") == "user"]
            return "\n".join(_texts(users[-1].get("content"))) if users else ""
        if value is not None:
            return "\n".join(_texts(value))
    return ""
