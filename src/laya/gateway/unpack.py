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
        if zstandard.frame_content_size(body) > limit:
            raise _too_large(limit)
        # The buffer is as large as allowed and no larger: a bomb finds no room, whatever its frame says.
        return inflater.decompress(body, max_output_size=limit, allow_extra_data=False)
    except zstandard.ZstdError as exc:
        if "too small" in str(exc):
            raise _too_large(limit) from None
        raise InvalidRequest("The body is not what its Content-Encoding says.") from None


def _whole(plain: bytes, limit: int, ended: bool) -> bytes:
    if len(plain) > limit:
        raise _too_large(limit)
    if not ended:
        raise InvalidRequest("The packed body is cut or has something behind its end.")
    return plain


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The unpacked body is larger than {limit} bytes.")
