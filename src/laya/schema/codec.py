"""JSON in and out, the codecs built once. Thread-safe."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

encode_json = orjson.dumps
"""Plain values of ours to JSON: twice as fast as msgspec on the small dicts of frames and errors. Not for what a client or a
backend sent: it refuses integers beyond 64 bits."""

encode_members = msgspec.json.Encoder().encode
"""Members with raw values (`decode_members`) and any other values that were read from JSON, back to JSON."""


def decode_members(body: bytes) -> dict[str, msgspec.Raw]:
    """The members of a JSON object, values untouched. Raises msgspec.DecodeError (a ValueError) otherwise."""
    return _members.decode(body)


_members: Any = msgspec.json.Decoder(dict[str, msgspec.Raw])
