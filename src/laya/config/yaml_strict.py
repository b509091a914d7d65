"""YAML, the part of it that has one meaning: bytes -> a tree of `Node`s with line numbers.

In: the bytes of a file. Out: nodes holding None, booleans, numbers, text, lists and maps. Refused with file and line: duplicate
keys, keys that are no text, values that YAML 1.1 and 1.2 read differently (no, 0123, 12:30:45, 1e3, dates), tags, merge keys,
several documents, tabs as indentation, what is not UTF-8, and more nesting or aliases than a configuration can need. Pure.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from laya.config.node import Node, Path, path_text, quoted
from laya.errors import ConfigError

# The deepest setting lies seven levels down; the rest is room for the user's own maps.
MAX_DEPTH = 32
# 10,000 rules are about 1 MB; what is larger is no configuration written for Laya.
MAX_BYTES = 8 << 20
# Nodes that aliases may add: far above any use, far below what a bomb makes of ten lines.
MAX_ALIASED = 20_000

_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})", re.ASCII)
_FLOAT = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})\.[0-9]{1,18}", re.ASCII)
_TRAPS = tuple(
    (re.compile(pattern, re.ASCII | re.IGNORECASE), what)
    for pattern, what in (
        (r"yes|no|on|off", "a boolean to some YAML readers, text to others: write true or false, or put it in quotes"),
        (r"[-+]?0[0-9_]+", "octal to some YAML readers: write a decimal number, or put it in quotes"),
        (r"[-+]?0[xob][0-9a-f_]+", "a number in another base: write it in decimal, or put it in quotes"),
        (r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?", "a base-60 number to some YAML readers: put it in quotes"),
        (r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)e[-+]?[0-9]+",
         "a number to some YAML readers and text to others: write it out, or put it in quotes"),
        (r"[-+]?[0-9][0-9_]*_[0-9_]*(\.[0-9_]*)?", "a number to some YAML readers: leave out the underscores, or quote it"),
        (r"[-+]?(\.[0-9_]+|[0-9]+\.|0[0-9]+\.[0-9]*|\.inf|\.nan)", "an unclear number: write it as 0.5, or put it in quotes"),
        (r"[-+]?[0-9]{19,}(\.[0-9]*)?|[-+]?[0-9]+\.[0-9]{19,}", "a number with too many digits: quote it if it is text"),
        (r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([t ].*)?", "a date to some YAML readers: put it in quotes"),
        (r"=|<<", "a YAML operator: put it in quotes"),
    )
)  # fmt: skip


def parse(data: bytes, origin: str) -> Node:
    """The tree of one file. An empty one is an empty map. `origin` is the name that errors show."""
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{origin}: the file has {len(data)} bytes; allowed: at most {MAX_BYTES}")
    text = _decode(data, origin)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        node = _Composer(yaml.parse(text, Loader=loader), origin).document()
    except yaml.MarkedYAMLError as exc:
        raise ConfigError(_syntax(exc, origin, text)) from None
    except yaml.YAMLError as exc:  # a character that YAML has no place for
        raise ConfigError(f"{origin}: not YAML: {' '.join(str(exc).split())}") from None
    if node.value is None:
        node.value = {}
    if not isinstance(node.value, dict):
        node.refuse((), node.found(), "a map of sections")
    return node


def _decode(data: bytes, origin: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        raise ConfigError(f"{origin}:{line}: found bytes that are not UTF-8; allowed: a UTF-8 text file") from None


def _syntax(exc: yaml.MarkedYAMLError, origin: str, text: str) -> str:
    mark = exc.problem_mark or exc.context_mark
    line = mark.line + 1 if mark else 1
    lines = text.splitlines()
    written = lines[line - 1] if line <= len(lines) else ""
    if "\t" in written:
        return f"{origin}:{line}: found a tab; allowed: spaces for indentation"
    problem = " ".join((exc.problem or str(exc)).split())
    return f"{origin}:{line}: not YAML: {problem}; a value with : # {{ }} [ ] , & * % @ ` in it needs quotes"


class _Composer:
    """Builds the tree from parser events. `path` is kept for errors."""

    def __init__(self, events: Any, origin: str) -> None:
        self._events = iter(events)
        self._origin = origin
        self._anchors: dict[str, Node] = {}
        self._aliased = 0

    def document(self) -> Node:
        root = Node(None, self._origin, 1)
        seen = False
        for event in self._events:
            if isinstance(event, (yaml.StreamStartEvent, yaml.StreamEndEvent, yaml.DocumentEndEvent)):
                continue
            if isinstance(event, yaml.DocumentStartEvent):
                if seen:
                    raise ConfigError(f"{self._line(event)}: found a second document (---); allowed: one")
                seen = True
                continue
            root = self._node(event, (), None)
        return root

    def _node(self, event: Any, path: Path, line: int | None) -> Node:
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise ConfigError(f"{self._line(event)}: {path_text(path)}: *{event.anchor} refers to no anchor above it")
            return self._copy(self._anchors[event.anchor], event)
        if len(path) > MAX_DEPTH:
            raise ConfigError(f"{self._line(event)}: found more than {MAX_DEPTH} levels; allowed: fewer")
        if event.tag is not None:
            raise ConfigError(f"{self._line(event)}: {path_text(path)}: found the tag {event.tag}; allowed: no tags")
        node = Node(None, self._origin, line or event.start_mark.line + 1)
        if isinstance(event, yaml.ScalarEvent):
            node.value = self._scalar(event, path)
        elif isinstance(event, yaml.SequenceStartEvent):
            node.value = self._sequence(path)
        else:
            node.value = self._mapping(path)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _sequence(self, path: Path) -> list[Node]:
        items: list[Node] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self._node(event, (*path, len(items)), None))
        return items

    def _mapping(self, path: Path) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._key(event, path)
            line = event.start_mark.line + 1
            if key in entries:
                raise ConfigError(
                    f"{self._origin}:{line}: {path_text((*path, key))}: found the key twice, first on line "
                    f"{entries[key].line}; allowed: once"
                )
            entries[key] = self._node(next(self._events), (*path, key), line)
        return entries

    def _key(self, event: Any, path: Path) -> str:
        if not isinstance(event, yaml.ScalarEvent) or event.tag is not None:
            raise ConfigError(f"{self._line(event)}: {path_text(path)}: found a key that is no plain text; allowed: text")
        if event.implicit[0] and event.value == "<<":
            raise ConfigError(f"{self._line(event)}: {path_text(path)}: found a merge key (<<); allowed: keys written out")
        key = self._scalar(event, path)
        if not isinstance(key, str):
            shown = event.value or "nothing"
            raise ConfigError(f"{self._line(event)}: {path_text(path)}: found the key {shown}, which is no text; allowed: "
                              "text (put it in quotes)")  # fmt: skip
        return key

    def _scalar(self, event: Any, path: Path) -> Any:
        """Only a plain scalar (no quotes, no block) can be anything but text."""
        value = event.value
        if not event.implicit[0]:
            return value
        if value in _NULL:
            return None
        if value in _BOOL:
            return _BOOL[value]
        if _INT.fullmatch(value):
            return int(value)
        if _FLOAT.fullmatch(value):
            return float(value)
        for pattern, what in _TRAPS:
            if pattern.fullmatch(value):
                raise ConfigError(f"{self._line(event)}: {path_text(path)}: found {quoted(value)} without quotes, {what}")
        return value

    def _copy(self, node: Node, event: Any) -> Node:
        """Aliases are copied, so that an override of one place never changes another; their number is bounded."""
        self._aliased += 1
        if self._aliased > MAX_ALIASED:
            raise ConfigError(f"{self._line(event)}: found aliases for more than {MAX_ALIASED} values; allowed: fewer")
        value = node.value
        if isinstance(value, list):
            value = [self._copy(item, event) for item in value]
        elif isinstance(value, dict):
            value = {key: self._copy(item, event) for key, item in value.items()}
        return Node(value, self._origin, event.start_mark.line + 1)

    def _line(self, event: Any) -> str:
        return f"{self._origin}:{event.start_mark.line + 1}"
