"""The user's own patterns, from `stages.redact.patterns`.

In: name -> pattern, once. Out: `OwnPatterns.find`. Any thread.

They run in RE2 (PyPI: google-re2), which takes linear time whatever the pattern: Python's `re` can be made to run for hours by
a few bytes of a request. RE2 has no back-references and no look-around; a pattern that needs them is refused at start.
"""

from __future__ import annotations

from typing import Any

from laya.stages.detect.window import Span, Window

# Bytes that one match may have behind the window in which it begins. Longer ones are taken in pieces.
MAX_MATCH = 4096
# Memory for one pattern's automaton; a pattern that needs more is refused (RE2's own default is eight times that).
_MAX_MEMORY = 1024 * 1024


class OwnPatterns:
    def __init__(self, patterns: dict[str, str]) -> None:
        """Raises ValueError naming the pattern at fault."""
        self._compiled = [(name, _compile(name, pattern)) for name, pattern in patterns.items()]

    def find(self, window: Window, out: list[Span]) -> None:
        stop = min(len(window.text), window.end + MAX_MATCH)
        text = window.text[window.base : stop]
        for name, pattern in self._compiled:
            for found in pattern.finditer(text, window.start - window.base):
                start, end = found.span()
                if window.base + start >= window.end:
                    break
                if end > start:
                    out.append((window.base + start, window.base + end, name))


def _compile(name: str, pattern: str) -> Any:
    where = f"stages.redact.patterns.{name}"
    try:
        import re2
    except ImportError:
        raise ValueError(f"{where}: own patterns need the package google-re2: pip install 'laya-server[redact]'") from None
    options = re2.Options()
    options.max_mem = _MAX_MEMORY
    options.log_errors = False
    options.never_capture = True
    try:
        compiled = re2.compile(pattern, options=options)
    except re2.error as error:
        text = error.args[0] if error.args else ""
        reason = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
        raise ValueError(f"{where}: not a pattern that can run in linear time: {reason}") from None
    if compiled.search(b"") is not None:
        raise ValueError(f"{where}: the pattern matches the empty text")
    return compiled
