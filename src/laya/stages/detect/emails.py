"""E-mail addresses, also with `%40` for the at sign; and passwords inside URLs, which have one too.

In: a window. Out: spans. Pure, any thread. The at sign is the candidate; both sides are read over a bounded length.
"""

from __future__ import annotations

import re

from laya.stages.detect.window import DIGITS, LETTERS, Span, Window

_LOCAL_BYTES = DIGITS + LETTERS + b".!#$%&'*+-=?^_`{|}~"
_LOCAL = frozenset(_LOCAL_BYTES)
_MAX_LOCAL = 64  # RFC 5321
# Labels of 63 at most, eight of them; the last has letters only (or is punycode).
_DOMAIN = re.compile(
    rb"(?:[A-Za-z0-9](?:[A-Za-z0-9\-]{0,62})\.){1,8}(?:xn--[A-Za-z0-9\-]{2,59}|[A-Za-z]{2,24})(?![A-Za-z0-9_])"
).match
# What a file behind an at sign ends with (`icon@2x.png`, `app@1.2.js`): none of them is a top-level domain.
_FILES = frozenset(
    b"png jpg jpeg gif svg webp bmp ico css js ts tsx jsx mjs json html htm xml yaml yml txt gz tgz tar zip exe dll so whl jar"
    b" lock toml cfg conf ini log csv go rb php java kt cpp hpp c h cs swift".split()
)
_ACCOUNTS = frozenset({b"git", b"hg", b"svn"})  # `git@host:path` names a repository, not a person
_CREDENTIALS = re.compile(rb"://[^\s/@:\"'\x00-\x20]{0,128}:([^\s/@\"'\x00-\x20]{3,128})\Z").search
_SYNTAX = (b"=", b"?", b"&", b"`", b"'", b"|", b"{", b"}")  # legal there, but rather somebody's syntax
_SIGNS = b"".join(_SYNTAX)
_ESCAPED = b"nrtbf"
_IRISH = re.compile(rb"[oOdD]'[A-Za-z.]+\Z").match


def find_emails(window: Window, out: list[Span]) -> None:
    text = window.text
    signs = (b"@", b"%40") if text.find(b"%", window.start, window.end) >= 0 else (b"@",)
    for sign in signs:
        at = text.find(sign, window.start, window.end)
        while at >= 0:
            span = _read(text, at, at + len(sign))
            if span is not None:
                out.append(span)
            at = text.find(sign, at + len(sign), window.end)


def find_credentials(window: Window, out: list[Span]) -> None:
    """The password of `scheme://user:password@host`."""
    text = window.text
    at = text.find(b"@", window.start, window.end)
    while at >= 0:
        if text.rfind(b"://", max(0, at - 260), at) >= 0:
            found = _CREDENTIALS(text, max(0, at - 260), at)
            if found is not None and not found[1].startswith((b"$", b"<", b"{", b"*")):
                out.append((found.start(1), found.end(1), "secret"))
        at = text.find(b"@", at + 1, window.end)


def _read(text: bytes, at: int, behind: int) -> Span | None:
    domain = _DOMAIN(text, behind)
    if domain is None or at == 0:
        return None
    last = domain[0].rpartition(b".")[2].lower()
    if last in _FILES:
        return None
    start = _local_start(text, at)
    if start == at or text[start:at] in _ACCOUNTS or _in_url(text, start):
        return None
    return start, domain.end(), "email"


def _in_url(text: bytes, start: int) -> bool:
    """The local part is the user of a URL: nothing between `://` and it but a name and a colon."""
    scheme = text.rfind(b"://", max(0, start - 64), start)
    if scheme < 0:
        return False
    between = text[scheme + 3 : start]
    return not (b"/" in between or b"?" in between or b" " in between)


def _local_start(text: bytes, at: int) -> int:
    """Where the part before the at sign begins; `at` when there is none."""
    least = max(0, at - _MAX_LOCAL)
    start = least + len(text[least:at].rstrip(_LOCAL_BYTES))
    if start == at and text[at - 1] >= 128:  # letters beyond ASCII, up to the next blank or sign
        while start > least and (text[start - 1] >= 128 or text[start - 1] in _LOCAL):
            start -= 1
        while text[start] & 0xC0 == 0x80:  # not in the middle of a character
            start += 1
        return start
    if start and text[start - 1] == 92 and text[start] in _ESCAPED:
        start += 1
    local = text[start:at]
    for syntax in _SYNTAX if len(local.translate(None, _SIGNS)) < len(local) else ():
        if syntax in local and not (syntax == b"'" and _IRISH(local)):
            start += local.rindex(syntax) + 1
            local = text[start:at]
    while start < at and text[start] in b".!#$%&'*+-=?^`{|}~":
        start += 1
    return start
