"""Request bodies with a Content-Encoding: gzip, deflate or zstd, unpacked within a bound. For the preparation worker."""

from __future__ import annotations

import zlib

from laya.errors import InvalidRequest, PayloadTooLarge, UnsupportedMediaType


def unpack(body: bytes, encoding: bytes, limit: int) -> bytes:
    """The plain body, at most `limit` bytes. Raises InvalidRequest, PayloadTooLarge or UnsupportedMediaType."""
    coding = encoding.strip().lower()
    if coding in (b"", b"identity"):
        return body
    if coding in (b"gzip", b"x-gzip"):
        return _inflate(body, zlib.MAX_WBITS | 16, limit)
    if coding == b"deflate":
        return _inflate(body, zlib.MAX_WBITS, limit)
    if coding == b"zstd":
        return _unzstd(body, limit)
    raise UnsupportedMediaType("The body's Content-Encoding is not understood; gzip, deflate and zstd are.")


def _inflate(body: bytes, window: int, limit: int) -> bytes:
    inflater = zlib.decompressobj(window)
    try:
        plain = inflater.decompress(body, limit + 1)
    except zlib.error:
        raise InvalidRequest("The body is not what its Content-Encoding says.") from None
    return _whole(plain, limit, inflater.eof and not inflater.unused_data)


def _unzstd(body: bytes, limit: int) -> bytes:
    import zstandard

    inflater = zstandard.ZstdDecompressor(max_window_size=128 * 1024 * 1024)
    try:
        size = zstandard.frame_content_size(body)
        if size < 0:  # not said: look, no further than is allowed
            size = len(inflater.stream_reader(body).read(limit + 1))
        if size > limit:
            raise _too_large(limit)
        # A buffer of just that size: a frame that is cut, or holds more than it says, does not fit.
        return inflater.decompress(body, max_output_size=max(size, 1), allow_extra_data=False)
    except zstandard.ZstdError:
        raise InvalidRequest("The body is not what its Content-Encoding says.") from None


def _whole(plain: bytes, limit: int, ended: bool) -> bytes:
    if len(plain) > limit:
        raise _too_large(limit)
    if not ended:
        raise InvalidRequest("The packed body is cut or has something behind its end.")
    return plain


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The unpacked body is larger than {limit} bytes.")
