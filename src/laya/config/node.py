"""A value as it was written: with the file and line, or the variable, that it came from.

In: built by `yaml_strict.py` and `environ.py`. Out: read by the decoder and the cross checks, whose errors point at it. One
tree lives while a configuration is loaded; one thread.
"""

from __future__ import annotations

from typing import Any, NoReturn

from laya.errors import ConfigError

Path = tuple[str | int, ...]

# Longer values are cut in errors, so that one stays one line.
_SHOWN_CHARS = 60


class Node:
    """`value` is None, bool, int, float, str, list[Node] or dict[str, Node].

    `line` is 1-based, that of the key for a map's entry; None in a variable. `text` marks a string that came from the
    environment, so that the wanted type decides how it is read.
    """

    __slots__ = ("value", "origin", "line", "text")

    def __init__(self, value: Any, origin: str, line: int | None = None, text: bool = False) -> None:
        self.value = value
        self.origin = origin
        self.line = line
        self.text = text

    @property
    def where(self) -> str:
        return self.origin if self.line is None else f"{self.origin}:{self.line}"

    def found(self, secret: bool = False) -> str:
        """What was written, in words; a secret only by its kind."""
        value = self.value
        if value is None:
            return "nothing (null)"
        if isinstance(value, dict):
            return "a map"
        if isinstance(value, list):
            return "a list"
        if isinstance(value, bool):
            return "true" if value else "false"
        if secret:
            return "an empty string" if value == "" else "a value that is not shown"
        if isinstance(value, str):
            shown = value if len(value) <= _SHOWN_CHARS else value[:_SHOWN_CHARS] + "..."
            return quoted(shown)
        return str(value)

    def refuse(self, path: Path, found: str, allowed: str) -> NoReturn:
        """Raise the ConfigError of this place."""
        raise ConfigError(f"{self.where}: {path_text(path)}: found {found}; allowed: {allowed}")

    def at(self, path: Path) -> Node:
        """The node at a path, or the nearest one above it that was written."""
        node = self
        for step in path:
            value = node.value
            if isinstance(value, dict) and step in value:
                node = value[step]
            elif isinstance(value, list) and isinstance(step, int) and step < len(value):
                node = value[step]
            elif not (isinstance(value, (dict, str)) and step == 0):  # a single item may stand for a list
                return node
        return node


def quoted(text: str) -> str:
    """Text in double quotes with control characters escaped, so that an error stays one line."""
    return '"' + "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text) + '"'


def path_text(path: Path) -> str:
    """``routes[1].to``; the whole file is ``(top)``."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.lstrip(".") or "(top)"


def nearest(word: str, words: list[str]) -> str:
    """`` (did you mean X?)`` when one of the words is close, else nothing."""
    import difflib  # only for errors: it would cost every start

    close = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""
