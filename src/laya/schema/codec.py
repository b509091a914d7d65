"""JSON in and out, the codecs built once. Thread-safe."""

from __future__ import annotations

from typing import Any

import msgspec

_encoder = msgspec.json.Encoder()

encode_json = _encoder.encode


def decode_members(body: bytes) -> dict[str, msgspec.Raw]:
    """The members of a JSON object, values untouched. Raises msgspec.DecodeError (a ValueError) otherwise."""
    return _members.decode(body)


_members: Any = msgspec.json.Decoder(dict[str, msgspec.Raw])
