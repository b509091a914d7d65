"""The page: its parts put together into one document that asks for nothing from elsewhere.

In: the files beside this one. Out: `Page`, made once. Reads the disk: the preparation worker's thread, or a test's.
"""

from __future__ import annotations

import base64
import hashlib
from functools import lru_cache
from pathlib import Path

import msgspec

SCRIPTS = ("format.js", "panels.js", "live.js", "chat.js")  # in the order in which they run


class Page(msgspec.Struct, frozen=True):
    """`lines` are the rendered header lines."""

    lines: bytes
    body: bytes


@lru_cache(1)
def page() -> Page:
    """The whole document and its headers. The policy names the one script and the one style by their hashes: whatever a
    client's name might smuggle into the page, nothing else runs."""
    here = Path(__file__).parent
    style = (here / "style.css").read_text("utf-8")
    script = "\n".join((here / name).read_text("utf-8") for name in SCRIPTS)
    body = (here / "index.html").read_text("utf-8").replace("/*STYLE*/", style).replace("/*SCRIPT*/", script).encode()
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    lines = (
        f"content-type: text/html; charset=utf-8\r\ncontent-security-policy: {policy}\r\ncache-control: no-cache\r\n"
        "x-content-type-options: nosniff\r\nreferrer-policy: no-referrer\r\n"
    )
    return Page(lines.encode(), body)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
