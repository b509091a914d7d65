"""Secrets: keys with a provider's prefix, web tokens, bearer tokens, private-key blocks, and values given to a name such as
`password` or `api_key`.

In: a window. Out: spans. Pure, any thread.

Candidates are runs of 16 and more bytes of a token's alphabet; short passwords by the words in front of them; key blocks by
their first line. Each is then read by bounded patterns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from laya.stages.detect import checksums
from laya.stages.detect.runs import ALPHABET, LEAST, runs_of
from laya.stages.detect.window import Span, Window

# Of a longer run only so much is searched for prefixes: a token is shorter, and an image is not one.
_SEARCHED = 512
_TOKENS = re.compile(
    rb"eyJ[A-Za-z0-9_\-]{10,4096}\.eyJ[A-Za-z0-9_\-]{6,8192}\.[A-Za-z0-9_\-]{0,1024}"
    rb"|/services/T[A-Z0-9]{6,12}/B[A-Z0-9]{6,12}/[A-Za-z0-9]{20,32}"
    rb"|sk-(?:ant-|proj-|svcacct-|admin-|or-v1-|lf-)?[A-Za-z0-9_\-]{16,256}"
    rb"|sk_(?:live|test)_[A-Za-z0-9]{16,128}|[rp]k_(?:live|test)_[A-Za-z0-9]{16,128}|whsec_[A-Za-z0-9+/]{24,64}"
    rb"|gh[pousr]_[A-Za-z0-9]{30,255}|github_pat_[A-Za-z0-9_]{30,255}|gl(?:pat|dt|rt|cbt|ptt)-[A-Za-z0-9_\-]{16,64}"
    rb"|(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}(?![A-Za-z0-9])|xox[abeoprs]-[A-Za-z0-9\-]{10,250}|xapp-[A-Za-z0-9\-]{10,250}"
    rb"|AIza[A-Za-z0-9_\-]{35}(?![A-Za-z0-9])|ya29\.[A-Za-z0-9_\-]{20,512}|GOCSPX-[A-Za-z0-9_\-]{20,64}"
    rb"|hf_[A-Za-z0-9]{20,128}|npm_[A-Za-z0-9]{30,64}|pypi-[A-Za-z0-9_\-]{32,512}|gsk_[A-Za-z0-9]{20,128}"
    rb"|xai-[A-Za-z0-9]{20,128}|r8_[A-Za-z0-9]{30,64}|pplx-[A-Za-z0-9]{32,64}|nvapi-[A-Za-z0-9_\-]{32,128}"
    rb"|dop_v1_[a-f0-9]{64}|shp(?:at|ss|ca|pa)_[a-fA-F0-9]{32}|SK[a-f0-9]{32}(?![A-Za-z0-9])|dckr_pat_[A-Za-z0-9_\-]{20,64}"
    rb"|lin_api_[A-Za-z0-9]{20,64}|secret_[A-Za-z0-9]{40,64}|ntn_[A-Za-z0-9]{40,64}|AGE-SECRET-KEY-1[A-Z0-9]{50,64}"
    rb"|SG\.[A-Za-z0-9_\-]{20,24}\.[A-Za-z0-9_\-]{39,50}|LTAI[A-Za-z0-9]{12,30}(?![A-Za-z0-9])|AKID[A-Za-z0-9]{13,40}(?![A-Za-z0-9])"
).match
# The first two bytes of all of these.
_BEGINNINGS = frozenset(
    b"ey /s sk rk pk wh gh gi gl AK AS AB AC xo xa AI ya GO hf np py gs r8 pp nv do sh SK SG dc li se nt AG LT".split()
)
# The last two letters of the names for secrets: most values have another name, and need no further look.
_SIGNS = b" \t:=>\"'`]([\x00\x01\\"
_ENDINGS = frozenset(b"et en ey th al rd wd se er ic ue 64 ng v1 v2 v3 v4 v5 -1 -2".split())
_AHEAD = frozenset(b" =:\"'`>\\\x01\xaf\xba\x9a")  # the byte before a value that was given to a name
_BEFORE_BLANK = frozenset(b"=:>rRcCnNtTyY\"'`\x01") | frozenset(range(128, 256))  # and the byte before a blank there
# The ends of bearer, basic, token, secret and key, with a blank behind them.
_BEARER = frozenset([b"r ", b"R ", b"c ", b"C ", b"n ", b"N ", b"t ", b"T ", b"y ", b"Y "])
_CHINESE_IS = (b"\x98\xaf", b"\xb8\xba", b"\xbc\x9a")  # the ends of three characters that mean "is"
# What stands between a name and its value. A name may go on (`token_value`), but not to a count or a kind of it.
_ASSIGN = re.compile(
    rb"(?:[_\-](?:key|value|base64|string|header|v[0-9]))?[\"'`\]\x00\x01\\]{0,6}[ \t]{0,8}"
    rb"(?:=>|:=|==?|:|\xef\xbc\x9a|\xe6\x98\xaf|\xe4\xb8\xba)[ \t\\]{0,8}[\"'`\x00\x01(\\]{0,6}(?:bearer |basic |token )?"
).fullmatch
_AFTER_BEARER = re.compile(rb"[ :=\"'\x00\x01]{1,4}").fullmatch
_VALUE = re.compile(rb"[^\s\"'`<>(){}\[\],;\\\x00\x01\x80-\xff]{6,512}").match
_SHORT = re.compile(
    rb"(?:\xe5\xaf\x86\xe7\xa0\x81|\xe5\x8f\xa3\xe4\xbb\xa4) ?(?=[!-~]{6})|"
    rb"(?:pass(?:word|wd|phrase|code)?|pwd|\xe5\xaf\x86\xe7\xa0\x81|\xe5\x8f\xa3\xe4\xbb\xa4)[\"'`\x00\x01\\\]]{0,6}[ \t]{0,8}"
    rb"(?:=>|:=|=|:|\xef\xbc\x9a|\xe6\x98\xaf(?:\xef\xbc\x9a)?|\xe4\xb8\xba|is:? )[ \t\\]{0,8}[\"'`\x00\x01\\]{0,6}",
    re.I,
).match
_digit = re.compile(rb"[0-9]").search
_word_of_p = re.compile(rb"p(?:ass|wd|rivate-key)").finditer  # in a shape, where a blank is -
_chinese_password = re.compile(rb"\xe5(?:\xaf\x86\xe7\xa0\x81|\x8f\xa3\xe4\xbb\xa4)").finditer
# Not a value but a hole to put one in, or the way to one.
_BLANKED = re.compile(
    rb"(?i)your|xxxx|\*\*\*|\.\.\.|example[_\-]|placeholder|changeme|redacted|\$|%[sd]|process\.env|environ|getenv"
).search
_CODE = re.compile(
    rb"[A-Za-z_]\w*[.:][A-Za-z_][\w.]*\Z|[a-z]+(?:_[a-z]+)+\Z|[a-z]+(?:-[a-z]+)+\Z|[A-Z]+(?:_[A-Z]+)*\Z"
).match
_FISCAL = re.compile(rb"(?i)[A-Z]{6}\d\d[A-EHLMPRST]\d\d[A-Z]\d{3}[A-Z]").fullmatch
_CURP = re.compile(rb"(?i)[A-Z]{4}\d{6}[HMX][A-Z]{5}[A-Z0-9]\d").fullmatch
_BEGIN = b"-----BEGIN "
_MAX_TYPE = len(_BEGIN) + 3 * 13  # before `PRIVATE KEY`
_KEY_BLOCK = re.compile(rb"-----BEGIN (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----").match
_KEY_END = re.compile(rb"-----END (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----").search
_MAX_BLOCK = 16 * 1024  # an RSA key of 16,384 bits with room
_BODY = re.compile(rb"(?:[A-Za-z0-9+/=:,\- \r\n\t\x00\x01]|\\[nrt]|\\\\)+").match  # of a block whose end is missing
_MIN_ENTROPY = 3.0  # bits a character: a hexadecimal key has 3.5 to 4, words of prose 2.5 to 3 at these lengths


def find_secrets(window: Window, out: list[Span]) -> None:
    _runs(window, out)
    _passwords(window, out)


def find_lettered(window: Window, out: list[Span]) -> None:
    """Identity numbers of 16 and 18 letters and digits: Italian and Mexican."""
    text = window.text
    for start, end in runs_of(window):
        length = end - start
        if (length == 16 or length == 18) and text[start] > 57:  # it begins with a letter
            if length == 16 and _FISCAL(text, start, end) and checksums.italian(text[start:end]):
                out.append((start, end, "id"))
            elif length == 18 and _CURP(text, start, end) and checksums.mexican(text[start:end]):
                out.append((start, end, "id"))


def _runs(window: Window, out: list[Span]) -> None:
    text, slash = window.text, -1
    for start, end in runs_of(window):
        if text[start - 1] == 46 and start > 1:
            start = _head(text, start - 1)
        if text[start : start + 2] in _BEGINNINGS and (token := _TOKENS(text, start)) is not None:
            if _keylike(token[0]):
                out.append((start, token.end(), "secret"))
                continue
        if slash < start:
            slash = text.find(b"/", start, window.end + _SEARCHED)
            if slash < 0:
                slash = len(text)
        if slash < end and slash < start + _SEARCHED and _in_path(text, slash, min(end, start + _SEARCHED), out):
            continue
        before = text[start - 1] if start > 1 else 0
        if before in _AHEAD and (before != 32 or text[start - 2] in _BEFORE_BLANK):
            ahead = text[max(0, start - 5) : start]
            assigned = b"=" in ahead or b":" in ahead or ahead.rstrip(b" ")[-2:] in _CHINESE_IS
            if assigned or (ahead[-2:] in _BEARER and _digit(text, start, end)):
                name = text[max(0, start - 12) : start].rstrip(_SIGNS)
                if name[-2:].lower() in _ENDINGS or name[-1:] >= b"\x80":
                    _given(window, start, out)


def _head(text: bytes, dot: int) -> int:
    """Where the short part before a run's dot begins (`ya29.`); behind the dot where there is none."""
    part = text[max(0, dot - LEAST) : dot]
    size = len(part) - len(part.rstrip(ALPHABET))
    return dot - size if 0 < size < LEAST else dot + 1


def _in_path(text: bytes, slash: int, end: int, out: list[Span]) -> bool:
    """Tokens behind the slashes of a path."""
    while slash >= 0:
        start = slash + 1
        if text[start : start + 2] in _BEGINNINGS and (token := _TOKENS(text, start)) is not None and _keylike(token[0]):
            out.append((start, token.end(), "secret"))
            return True
        slash = text.find(b"/", start, end)
    return False


def _given(window: Window, start: int, out: list[Span]) -> None:
    """A long value behind a name for secrets, or behind `Bearer`."""
    text = window.text
    for tag, gap, word in window.before(start, ("secret", "bearer")):
        bare = gap == b" "  # `token X`, with no sign between: X must look like nothing else
        if not bare and (_ASSIGN(gap) if tag == "secret" else _AFTER_BEARER(gap)) is None:
            continue
        value = _VALUE(text, start)
        if value is None or text[word - 5 : word].lower() in (b"page_", b"next_", b"page-", b"next-"):
            return
        given = value[0].rstrip(b".,:;!?&")
        given = given.split(b"&", 1)[0]
        if is_random(given) and not (bare and tag == "secret" and (given.islower() or given.isupper() or b"/" in given)):
            out.append((start, start + len(given), "secret"))
        return


def _keylike(token: bytes) -> bool:
    """Behind a prefix: letters and digits mixed, and no words (`sk-learn-contrib-packages`)."""
    return any(48 <= byte <= 57 for byte in token[4:]) and len(set(token)) >= 8 and not _BLANKED(token)


def is_random(value: bytes) -> bool:
    """16 bytes and more that look drawn by chance: letters and digits, much entropy, no words of code."""
    if len(value) < 16 or _BLANKED(value):
        return False
    if value.replace(b".", b"").isdigit() or value.isalpha() and len(value) < 24 or _CODE(value):
        return False
    digits = sum(48 <= byte <= 57 for byte in value)
    return (digits >= 2 or len(value) >= 32) and entropy(value) >= _MIN_ENTROPY


def entropy(value: bytes) -> float:
    """Shannon's, in bits a byte."""
    counts: dict[int, int] = {}
    for byte in value:
        counts[byte] = counts.get(byte, 0) + 1
    size = len(value)
    return -sum(count / size * math.log2(count / size) for count in counts.values())


def _passwords(window: Window, out: list[Span]) -> None:
    """Behind words for them, and private keys, whose name begins with the same letter."""
    shape, begin = window.shape, window.start - window.base
    _values_behind(window, _word_of_p(shape, begin), out)
    if not shape.isascii():
        _values_behind(window, _chinese_password(shape, begin), out)


def _values_behind(window: Window, words: Iterator[re.Match[bytes]], out: list[Span]) -> None:
    """`words` are found in the shape."""
    text, base, at = window.text, window.base, 0
    for word in words:
        start = base + word.start()
        if start >= window.end:
            return
        if start < at:
            continue  # a value is not searched itself
        if text[start + 1] == 82:  # of `PRIVATE KEY`
            at = _block(text, start, out)
        elif (found := _SHORT(text, start)) is not None and (value := _VALUE(text, found.end())) is not None:
            if _is_password(given := value[0].rstrip(b".,:;?")):
                at = found.end() + len(given)
                out.append((found.end(), at, "secret"))


def _is_password(value: bytes) -> bool:
    """A value of six and more with letters and digits or signs: neither a word, nor a type, nor a reference to a secret."""
    if not 6 <= len(value) <= 256 or _BLANKED(value) or _CODE(value) or value.startswith((b"//", b"http")):
        return False
    letters = any(65 <= byte <= 90 or 97 <= byte <= 122 for byte in value)
    digits = any(48 <= byte <= 57 for byte in value)
    signs = any(byte in b"!@#%^&*+?~=" for byte in value)
    return (letters and (digits or signs)) or (digits and (signs or len(value) >= 6))


def _block(text: bytes, name: int, out: list[Span]) -> int:
    """The key block in whose first line the name stands; its end, 0 where there is none."""
    begin = text.rfind(_BEGIN, max(0, name - _MAX_TYPE), name)
    head = _KEY_BLOCK(text, begin) if begin >= 0 else None
    if head is None:
        return 0
    stop = min(len(text), begin + _MAX_BLOCK)
    found = _KEY_END(text, head.end(), stop) or _BODY(text, head.end(), stop) or head
    out.append((begin, found.end(), "secret"))
    return found.end()
