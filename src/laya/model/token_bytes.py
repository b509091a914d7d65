"""From a vocabulary's words to the bytes they stand for, for both ways in which vocabularies write bytes as text.

In: a word. Out: bytes, possibly part of a character. Any thread.
"""

from __future__ import annotations

import re

_BYTE_WORD = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "\u2581"  # sentencepiece's visible space


def _byte_characters() -> dict[str, int]:
    """GPT-2's table: bytes that print stand for themselves, the others for characters from U+0100 on, in order."""
    printing = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printing}
    hidden = [byte for byte in range(256) if byte not in set(printing)]
    return table | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF = _byte_characters()


def byte_level_bytes(word: str) -> bytes:
    """A word of a byte-level vocabulary; one with characters outside the table stands for its own text."""
    try:
        return bytes([_BYTE_OF[character] for character in word])
    except KeyError:
        return word.encode()


def sentencepiece_bytes(word: str) -> bytes:
    """A word of a sentencepiece vocabulary: single bytes as <0xAB>, spaces as U+2581."""
    byte = _BYTE_WORD.fullmatch(word)
    return bytes([int(byte[1], 16)]) if byte else word.replace(SPACE, " ").encode()
