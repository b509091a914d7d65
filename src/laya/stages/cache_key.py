"""What a request asks, apart from who asks and in which form: the key under which its answer is kept.

In: a request after redaction, and where it goes. Out: a `Question`, or None for one that the cache passes by. Pure; any thread.

The key is the whole body, so that a member nobody here knows (`num_ctx`, `reasoning_effort`) keeps answers apart, less a short
list of members that never change an answer. White space and the order of the top level's members do not matter; the order
within members does, because models see it (the properties of a schema, the tools).
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from laya.errors import InvalidRequest
from laya.schema.pieces import member_spans

# Members that say who asks, or in which form the answer is to come.
PASSED_OVER = frozenset({"stream", "stream_options", "user", "metadata", "safety_identifier", "prompt_cache_key"})
# These answer alike every time; of a model's text that is so without sampling, or with a seed.
SAMPLED = frozenset({"chat", "completions"})
FIXED = frozenset({"embeddings", "rerank", "score", "moderations", "systemone"})
FOREVER = float("inf")

# Bodies above this many bytes are read in pieces: to decode and encode the densest JSON takes 60 ns a byte.
LARGE = 32 * 1024
_READ = ("temperature", "seed", "stream", "stream_options", "max_completion_tokens", "max_tokens")

_name = msgspec.json.Decoder(str).decode
_any = msgspec.json.Decoder().decode
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode


class Question(msgspec.Struct, frozen=True, gc=False):
    """`body` is what must be sent to a model for the key to hold: no member twice. `max_age` in seconds: 0 asks for a new
    answer, infinity takes any."""

    key: bytes
    body: bytes
    stream: bool
    wants_count: bool  # the answer must have the numbers of tokens
    limit: int | None  # of the answer's tokens
    max_age: float = FOREVER


def read_question(
    body: bytes, api: str | None, scope: tuple[str | None, ...], control: bytes | None, any_temperature: bool
) -> Question | None:
    """`scope` is what else tells questions apart: the key's name, the path, the target and the model's name there. `control`
    is the request's Cache-Control."""
    if api not in SAMPLED and api not in FIXED:
        return None
    max_age = FOREVER if control is None else read_control(control)
    if max_age is None:
        return None
    if len(body) > LARGE:
        return _read_large(body, api, scope, max_age, any_temperature)
    try:
        members = _decode(body)
        if api in SAMPLED and not (any_temperature or _deterministic(members)):
            return None
        asked = [pair for pair in sorted(members.items()) if pair[0] not in PASSED_OVER]
        canonical, sent = _encode((scope, asked)), _encode(members)
    except (ValueError, RecursionError, OverflowError):  # not our JSON: whoever answers will say so
        return None
    return _question(hashlib.blake2b(canonical, digest_size=20).digest(), sent, api, members, max_age)


def _read_large(
    body: bytes, api: str, scope: tuple[str | None, ...], max_age: float, any_temperature: bool
) -> Question | None:  # fmt: skip
    """As `read_question`, without decoding megabytes in one step: white space within a member counts, and a body that has a
    member twice is passed by."""
    text = memoryview(body)
    try:
        pairs = member_spans(body)
        spans = {_name(text[start:end]): value for (start, end), value in pairs}
        few = {name: _any(text[spans[name][0] : spans[name][1]]) for name in _READ if name in spans}
        scoped = _encode(scope)
    except (ValueError, RecursionError, InvalidRequest):
        return None
    if len(spans) < len(pairs) or (api in SAMPLED and not (any_temperature or _deterministic(few))):
        return None
    digest = hashlib.blake2b(scoped, digest_size=20)
    for name in sorted(spans.keys() - PASSED_OVER):
        start, end = spans[name]
        digest.update(_encode((name, end - start)))  # with its length, so that no two bodies are told by the same bytes
        digest.update(text[start:end])
    return _question(digest.digest(), body, api, few, max_age)


def _question(key: bytes, body: bytes, api: str, members: dict[str, Any], max_age: float) -> Question | None:
    stream = members.get("stream") is True
    if stream and api not in SAMPLED:
        return None
    return Question(
        key=key, body=body, stream=stream, wants_count=api in SAMPLED and (not stream or _wants_usage(members)),
        limit=_limit(members), max_age=max_age,
    )  # fmt: skip


def read_control(value: bytes) -> float | None:
    """The greatest age in seconds that a Cache-Control takes; None: the cache must not be used at all."""
    age = FOREVER
    for part in value.lower().split(b","):
        name, _, number = part.strip().partition(b"=")
        if name == b"no-store":
            return None
        if name == b"no-cache":
            age = 0.0
        elif name == b"max-age" and number.isdigit() and len(number) < 12:
            age = min(age, float(number))
    return age


def _deterministic(members: dict[str, Any]) -> bool:
    temperature, seed = members.get("temperature"), members.get("seed")
    return (type(temperature) in (int, float) and temperature == 0) or type(seed) is int


def _wants_usage(members: dict[str, Any]) -> bool:
    options = members.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def _limit(members: dict[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        if type(members.get(name)) is int:
            return members[name]
    return None
