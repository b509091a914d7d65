"""Numbers, booleans and sizes as text, strictly: one reading for each, or none.

In: text from a variable, or a size from the file. Out: the value, or None when the text is no such thing. Pure; any thread.
"""

from __future__ import annotations

import re

# Decimal suffixes are allowed because disks and cards are sold in them; bare K, M, G are refused as ambiguous.
_UNITS = {
    "": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}

# At most 18 digits: every such number fits 64 bits.
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})", re.ASCII)
_FLOAT = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})(\.[0-9]{1,18})?", re.ASCII)
_SIZE = re.compile(r"((?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,6})?) ?([A-Za-z]*)", re.ASCII)


def parse_bool(text: str) -> bool | None:
    """true, yes, on, 1 and false, no, off, 0, in any case and without blanks around; only for variables."""
    return _BOOLEANS.get(text.lower())


def parse_int(text: str) -> int | None:
    """A decimal whole number without blanks, underscores, leading zeros or an exponent."""
    return int(text) if _INT.fullmatch(text) else None


def parse_float(text: str) -> float | None:
    """A decimal number written plainly: 3, 0.5."""
    return float(text) if _FLOAT.fullmatch(text) else None


def parse_size(text: str, plain: int = 1) -> int | None:
    """``16MiB`` in bytes; a number without a unit counts `plain` bytes. Parts of a byte are no size."""
    found = _SIZE.fullmatch(text)
    if not found or found[2] not in _UNITS:
        return None
    amount = float(found[1]) if "." in found[1] else int(found[1])
    count = amount * (_UNITS[found[2]] if found[2] else plain)
    return int(count) if count == int(count) or found[2] or plain > 1 else None


def format_size(count: int) -> str:
    """The shortest exact form with a binary unit: 16MiB, 1000B."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count and count % _UNITS[unit] == 0:
            return f"{count // _UNITS[unit]}{unit}"
    return f"{count}B" if count else "0"
