"""The model name in a form with files (multipart/form-data), which audio, images and System One's assets come in.

In: the body and its boundary. Out: `FormFields`, which stand where JSON bodies have `RoutingFields`; files are passed over, not
copied. Only the names of parts are read. For the preparation worker.
"""

from __future__ import annotations

import re

from laya.errors import InvalidRequest
from laya.schema.fields import RoutingFields, read_routing

MAX_PARTS = 128  # forms of these APIs have a dozen
MAX_PART_HEAD = 8192  # as much as a whole request head of a careful client
_BOUNDARY = re.compile(rb';\s*boundary=(?:"([^"\r\n]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_NAME = re.compile(rb'^content-disposition:[^\r\n]*?[;\s]name=(?:"([^"\r\n]*)"|([^\s;"]+))', re.IGNORECASE | re.MULTILINE)


def boundary_of(content_type: bytes) -> bytes | None:
    """The boundary of a form with files; None for any other type."""
    found = _BOUNDARY.search(content_type)
    if found is None or not content_type.lower().startswith(b"multipart/form-data"):
        return None
    return found.group(1) or found.group(2)


class FormFields(RoutingFields):
    """What routing needs of a form. `span` is where the model's name stands in the body."""

    __slots__ = ()

    def __init__(self, model: str | None, stream: bool | None, body: bytes, span: tuple[int, int] | None) -> None:
        super().__init__(model, stream, body, {}, span)

    def renamed(self, model: str) -> bytes | tuple[bytes | memoryview, ...]:
        """The form with another model name. Raises InvalidRequest where it has none to replace."""
        if self.span is None:
            raise InvalidRequest("The form must name its `model` for this route.", param="model")
        view = memoryview(self._body)
        return view[: self.span[0]], model.encode(), view[self.span[1] :]


def read_form(body: bytes, boundary: bytes) -> FormFields:
    """Raises InvalidRequest for what is no whole form, and for one that names `model` twice."""
    model: str | None = None
    stream = None
    span = None
    seen: set[bytes] = set()
    for name, start, end in _parts(body, boundary):
        if name in seen and name in (b"model", b"request"):
            raise InvalidRequest(f"The form has two parts `{name.decode()}`.", param="model")
        seen.add(name)
        if name == b"model":
            span = (start, end)
            model = _text(body[start:end])
        elif name == b"stream":
            stream = body[start:end].strip().lower() in (b"true", b"1")
        elif name == b"request" and model is None:  # System One keeps its JSON in this part
            model = read_routing(body[start:end]).model
    return FormFields(model, stream, body, span)


def _parts(body: bytes, boundary: bytes):
    """(name, start, end) of each part's contents."""
    mark = b"--" + boundary
    if not body.startswith(mark):
        raise InvalidRequest("The form does not begin with its boundary.")
    at = len(mark)
    for _ in range(MAX_PARTS):
        if body.startswith(b"--", at):
            return
        head_end = body.find(b"\r\n\r\n", at, at + MAX_PART_HEAD)
        if not body.startswith(b"\r\n", at) or head_end < 0:
            raise InvalidRequest("A part of the form has no proper head.")
        start = head_end + 4
        end = body.find(b"\r\n" + mark, start)
        if end < 0:
            raise InvalidRequest("The form is cut: its last boundary is missing.")
        named = _NAME.search(body, at + 2, head_end)
        yield (b"" if named is None else named.group(1) or named.group(2) or b""), start, end
        at = end + 2 + len(mark)
    raise InvalidRequest(f"The form has more than {MAX_PARTS} parts.")


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise InvalidRequest("The form's model name is not UTF-8.", param="model") from None
