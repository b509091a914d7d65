"""The few members of a body that decide where it goes, read without decoding the rest.

In: a body of any API. Out: its members (values still raw) with `model` and `stream` read, or InvalidRequest. What is read
here and what a backend reads must be the same value, so a body whose top level names `model` twice, in another case or
with escaped letters is refused: parsers disagree on those.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from laya.errors import InvalidRequest
from laya.schema.codec import decode_members, encode_json, encode_members
from laya.schema.pieces import member_spans

# Above this many bytes reading belongs in a worker, where it is done in pieces. The loop may stall for 2 ms at most: msgspec
# reads text at 1 to 2 GB/s, but a top level full of tiny members, the worst there is, at 31 ms a MiB.
READ_ON_LOOP = 48 * 1024

# Up to this many bytes one lower-case copy is cheaper than looking at the top level's keys one by one.
SMALL = 2048

MISSING = "Object missing required field `"  # msgspec's words; the field's name and a backtick follow
# Of the model's name in a large body: nobody has one of a kilobyte, and to decode it takes time on the loop.
MAX_NAME_BYTES = 4096

_key = msgspec.json.Decoder(str).decode
_optional_str = msgspec.json.Decoder(str | None).decode
_optional_bool = msgspec.json.Decoder(bool | None).decode


scan: Callable[[bytes], tuple[str, bool | None] | None]
try:
    from laya.schema.native_routing import scan
except ImportError:  # installed without a C compiler

    def scan(body: bytes) -> None:
        return None


class _Few(msgspec.Struct, gc=False):
    model: str | None = None
    stream: bool | None = None


_decode_few = msgspec.json.Decoder(_Few).decode


class RoutingFields:
    """What routing needs of a body; the other members are decoded when somebody asks."""

    __slots__ = ("model", "stream", "span", "_body", "_members")

    def __init__(
        self, model: str | None, stream: bool | None, body: bytes, members: dict[str, msgspec.Raw] | None,
        span: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.stream = stream
        self.span = span  # where the model's value stands in a large body
        self._body = body
        self._members = members

    @property
    def members(self) -> dict[str, msgspec.Raw]:
        """Each top-level key with its raw value. Raises InvalidRequest where a key is no text."""
        if self._members is None:
            try:
                self._members = decode_members(self._body)
            except msgspec.DecodeError as exc:
                raise invalid_body(exc) from None
        return self._members

    def renamed(self, model: str) -> bytes | tuple[bytes | memoryview, ...]:
        """The body with another model name; of a large one in pieces, so that nothing is copied on the loop."""
        if self.span is None:
            return encode_members({**self.members, "model": model})
        view = memoryview(self._body)
        return view[: self.span[0]], encode_json(model), view[self.span[1] :]

    def text(self, key: str) -> str | None:
        """A member that must be a string where it is present."""
        raw = self.members.get(key)
        return None if raw is None else _value(_optional_str, raw, key)


def read_routing(body: bytes) -> RoutingFields:
    """Raises InvalidRequest for anything that is not one JSON object with sane routing members. Sleeps now and then over a body
    larger than READ_ON_LOOP."""
    found = scan(body) if len(body) <= READ_ON_LOOP else None
    return RoutingFields(found[0], found[1], body, None) if found is not None else read_in_python(body)


def read_in_python(body: bytes) -> RoutingFields:
    """The same without C, and for what `scan` does not judge."""
    if len(body) <= SMALL and body.lower().count(b'"model"') == 1 and b"\\u00" not in body:
        try:  # one key of that name at the most, in whatever case, and none spelled with escapes
            few = _decode_few(body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
            raise invalid_body(exc) from None
        if few.model is not None:
            return RoutingFields(few.model, few.stream, body, None)
    return _read_members(body)


def _read_members(body: bytes) -> RoutingFields:
    large = len(body) > READ_ON_LOOP
    try:
        members, span = _members_in_pieces(body) if large else (decode_members(body), None)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        raise invalid_body(exc) from None
    for key in members:
        if len(key) == 5 and key != "model" and key.lower() == "model":
            raise InvalidRequest("The key `model` must be written in lower case.", param="model")
    model = stream = None
    raw = members.get("model")
    if raw is not None:
        if not large and not _plain(body, members):
            _refuse_ambiguous(body, members)
        model = _value(_optional_str, raw, "model")
    raw = members.get("stream")
    if raw is not None:
        stream = _value(_optional_bool, raw, "stream")
    return RoutingFields(model, stream, body, members, span)


def _members_in_pieces(body: bytes) -> tuple[dict[str, msgspec.Raw], tuple[int, int] | None]:
    """As `decode_members` and `_refuse_ambiguous` together, for a worker and a large body, whose values are not copied; and
    where the model's value stands."""
    members: dict[str, msgspec.Raw] = {}
    span = None
    view = memoryview(body)
    escaped = False
    for (key_begin, key_end), (begin, end) in member_spans(body):
        spelled = body[key_begin:key_end]
        key = _key(spelled)
        escaped = escaped or b"\\u006" in spelled
        if key == "model":
            if key in members:
                raise InvalidRequest("The key `model` must be given once, in plain letters.", param="model")
            if end - begin > MAX_NAME_BYTES:
                raise InvalidRequest("The model's name is too long.", param="model")
            span = (begin, end)
        members[key] = msgspec.Raw(view[begin:end])
    if escaped and "model" in members:
        raise InvalidRequest("Keys must not be spelled with escaped letters.", param="model")
    return members, span


def _value(decode, raw: msgspec.Raw, key: str):
    try:
        return decode(raw)
    except msgspec.DecodeError as exc:
        error = invalid_body(exc)
        raise InvalidRequest(f"{error.message} (at `{key}`)", param=key) from None


def _plain(body: bytes, members: dict[str, msgspec.Raw]) -> bool:
    """The body is exactly these members, written as common encoders do: compactly, or with one blank behind each colon and
    comma. Then nothing was repeated and no key is spelled with escapes. A copy and a comparison, cheaper than any search."""
    first = next(iter(members))
    spaced = body[len(first) + 4 : len(first) + 5] == b" "
    line, comma = (b'"%b": %b', b", ") if spaced else (b'"%b":%b', b",")
    return b"{" + comma.join([line % (key.encode(), raw) for key, raw in members.items()]) + b"}" == body


def _refuse_ambiguous(body: bytes, members: dict[str, msgspec.Raw]) -> None:
    """Occurrences outside the kept values are the top level's own keys (and what a repeated key threw away)."""
    if body.count(b'"model"') == 1 and b"\\u006" not in body:
        return
    values = [bytes(raw) for raw in members.values()]
    if body.count(b'"model"') - sum(value.count(b'"model"') for value in values) != 1:
        raise InvalidRequest("The key `model` must be given once, in plain letters.", param="model")
    if body.count(b"\\u006") != sum(value.count(b"\\u006") for value in values):
        raise InvalidRequest("Keys must not be spelled with escaped letters.", param="model")


def invalid_body(exc: Exception) -> InvalidRequest:
    """A decode error in words a client's author can use, with the member at fault as `param`."""
    if isinstance(exc, RecursionError):
        return InvalidRequest("The body is nested too deeply.")
    text = str(exc)
    if isinstance(exc, msgspec.ValidationError):
        text, _, path = text.partition(" - at `")
        param = path.rstrip("`").removeprefix("$").lstrip(".") or None
        if text.startswith(MISSING):
            param = f"{param}.{text[len(MISSING) : -1]}" if param else text[len(MISSING) : -1]
            return InvalidRequest(f"`{param}` is required.", param=param)
        return InvalidRequest(f"{text}{f' (at `{param}`)' if param else ''}", param=param)
    return InvalidRequest(f"The body is not valid JSON: {text}")
