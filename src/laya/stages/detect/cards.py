"""Payment cards. Digits in, true or false out. Pure, any thread."""

from __future__ import annotations

import re

from laya.stages.detect import checksums

# The first digits that issuers use, by the length of the number. 13 digits (long out of use) are left out: milliseconds since
# 1970 have as many.
_ISSUERS = {
    14: re.compile(rb"3(?:0[0-5]|[68]\d)"),
    15: re.compile(rb"3[47]"),
    16: re.compile(
        rb"4|5[1-5]|2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)|6(?:011|4[4-9]|5|2)|35(?:2[89]|[3-8]\d)|220[0-4]|9792"
    ),
    17: re.compile(rb"62"),
    18: re.compile(rb"62"),
    19: re.compile(rb"62|6(?:011|4[4-9]|5)|4"),
}  # fmt: skip


def is_card(digits: bytes) -> bool:
    """An issuer's first digits, their length, and Luhn."""
    issuer = _ISSUERS.get(len(digits))
    return issuer is not None and issuer.match(digits) is not None and checksums.luhn(digits) and len(set(digits)) > 1
