"""The model's name in forms with files."""

from __future__ import annotations

import pytest

from laya.errors import InvalidRequest
from laya.gateway.forms import boundary_of, read_form


def form(*parts: tuple[str, bytes], boundary: bytes = b"xyz") -> bytes:
    body = b"".join(b"--%b\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n" % (boundary, name.encode(), value) for name, value in parts)
    return body + b"--%b--\r\n" % boundary


FILE = ('name="file"; filename="a.wav"', bytes(range(256)) + b'\r\n--xy\r\nname="model"')


def test_the_model_is_found_beside_files_and_can_be_replaced():
    body = form(FILE, ('name="model"', b"whisper-1"), ("name=stream", b"true"))
    fields = read_form(body, b"xyz")
    assert fields.model == "whisper-1" and fields.stream is True
    assert b"".join(fields.renamed("wh")) == form(FILE, ('name="model"', b"wh"), ("name=stream", b"true"))


def test_system_ones_request_part_names_the_model():
    assert read_form(form(('name="request"', b'{"model": "jev-latest", "state": "x"}'), FILE), b"xyz").model == "jev-latest"


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        (b"multipart/form-data; boundary=abc", b"abc"), (b'Multipart/Form-Data; charset=utf-8; boundary="a b"', b"a b"),
        (b"multipart/form-data", None), (b"application/json; boundary=x", None), (b"multipart/mixed; boundary=x", None),
        (b"multipart/form-data; boundary=" + b"x" * 80, b"x" * 70),
    ],
)  # fmt: skip
def test_the_boundary_is_read(content_type, boundary):
    assert boundary_of(content_type) == boundary


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{}", b"--xyz", b"--xyz\r\n", form(FILE)[:-8], form(('name="model"', b"a"), ('name="model"', b"b")),
        form(('name="model"', b"\xff")), form(*[("name=x", b"")] * 200), b"--xyz\r\n" + b"a" * 10_000,
        form(('name="request"', b'{"model": 5}')),
    ],
)  # fmt: skip
def test_what_is_no_whole_form_is_refused(body):
    """(case 31)"""
    with pytest.raises(InvalidRequest):
        read_form(body, b"xyz")
