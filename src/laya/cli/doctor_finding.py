"""One thing that `laya doctor` found. Data only."""

from __future__ import annotations

import msgspec

OK, WARN, FAIL, SKIP = "ok", "warn", "fail", "skip"


class Finding(msgspec.Struct, frozen=True):
    """`mend` is the line that mends it, where there is something to mend; `seconds` what looking took."""

    name: str
    state: str
    text: str
    mend: str = ""
    seconds: float = 0.0
