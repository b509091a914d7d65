"""Tree of nodes -> frozen structs, each value checked against its shape.

In: the tree after overrides and references. Out: one struct, or a ConfigError that names file and line (or the variable), the
key, what was found and what is allowed. Pure; any thread.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from laya.config.node import Node, Path, nearest, path_text
from laya.config.shape import Entries, Fields, Items, Scalar, Shape, allowed, within
from laya.config.units import parse_bool, parse_float, parse_int, parse_size
from laya.errors import ConfigError


def build(node: Node, shape: Shape, path: Path = ()) -> Any:
    """The value of `node` as `shape` wants it."""
    if node.value is None or (node.text and node.value == "null" and shape.nullable):
        return _nothing(node, shape, path)
    if isinstance(shape, Scalar):
        return _scalar(node, shape, path)
    if node.text and _is_json(node, shape):
        node = parse_json(node, shape, path)
    if isinstance(shape, Items):
        return _items(node, shape, path)
    if isinstance(shape, Entries):
        return _entries(node, shape, path)
    assert isinstance(shape, Fields)
    return _fields(node, shape, path)


def _nothing(node: Node, shape: Shape, path: Path) -> Any:
    """A key with nothing after it: null where that is allowed, and an empty section, list or map."""
    if shape.nullable:
        return None
    if isinstance(shape, Items) and not shape.marks.get("one_or_many"):
        return ()
    if isinstance(shape, Entries):
        return {}
    if isinstance(shape, Fields) and not any(field.required for field in shape.fields.values()):
        return shape.cls()
    _refuse(node, shape, path)


def _items(node: Node, shape: Items, path: Path) -> tuple:
    items = node.value
    if not isinstance(items, list):
        if not shape.marks.get("one_or_many"):
            _refuse(node, shape, path)
        items = [node]
    if not items and shape.marks.get("one_or_many"):
        node.refuse(path, "an empty list", allowed(shape))
    return tuple(build(item, shape.item, (*path, index)) for index, item in enumerate(items))


def _entries(node: Node, shape: Entries, path: Path) -> dict[str, Any]:
    if not isinstance(node.value, dict):
        _refuse(node, shape, path)
    for name, item in node.value.items():
        build(Node(name, item.origin, item.line), shape.key, (*path, name))
    return {name: build(item, shape.value, (*path, name)) for name, item in node.value.items()}


def _fields(node: Node, shape: Fields, path: Path) -> Any:
    short = shape.marks.get("short")
    if short and isinstance(node.value, str):
        return shape.cls(**{short: build(node, shape.fields[short].shape, path)})
    if not isinstance(node.value, dict):
        _refuse(node, shape, path)
    for key, item in node.value.items():
        if key not in shape.fields:
            hint = nearest(key, list(shape.fields))
            raise ConfigError(
                f"{item.where}: {path_text((*path, key))}: unknown key{hint}; allowed: {', '.join(shape.fields)}"
            )
    for field in shape.fields.values():
        if field.required and field.name not in node.value:
            node.refuse(path, f"no key {field.name}", f"{field.name}: {allowed(field.shape)}")
    return shape.cls(**{key: build(item, shape.fields[key].shape, (*path, key)) for key, item in node.value.items()})


def _scalar(node: Node, shape: Scalar, path: Path) -> Any:
    value = node.value
    if isinstance(value, str) and value in shape.choices:
        return value
    reader = _READERS.get(shape.kind)
    result = reader(node, shape) if reader else None
    if result is None:
        _refuse(node, shape, path)
    if not isinstance(result, (str, bool)) and not within(shape, result):
        _refuse(node, shape, path)
    return result


def _read_bool(node: Node, shape: Scalar) -> bool | None:
    return parse_bool(node.value) if node.text else node.value if isinstance(node.value, bool) else None


def _read_int(node: Node, shape: Scalar) -> int | None:
    if node.text:
        return parse_int(node.value)
    return node.value if isinstance(node.value, int) and not isinstance(node.value, bool) else None


def _read_float(node: Node, shape: Scalar) -> float | None:
    if node.text:
        return parse_float(node.value)
    return float(node.value) if isinstance(node.value, (int, float)) and not isinstance(node.value, bool) else None


def _read_size(node: Node, shape: Scalar) -> int | None:
    value, plain = node.value, 1 << 30 if shape.marks.get("plain") == "GiB" else 1
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    return parse_size(value if isinstance(value, str) else repr(value), plain)


def _read_str(node: Node, shape: Scalar) -> str | None:
    """Text is never empty unless its pattern says so; no setting means anything by an empty string."""
    if not isinstance(node.value, str):
        return None
    return node.value if re.fullmatch(shape.marks.get("pattern", r"(?s)[^\x00]+"), node.value) else None


_READERS = {"bool": _read_bool, "int": _read_int, "float": _read_float, "size": _read_size, "str": _read_str}


def _refuse(node: Node, shape: Shape, path: Path) -> NoReturn:
    hint = ""
    if isinstance(shape, Scalar) and shape.kind == "str" and not isinstance(node.value, (str, list, dict, type(None))):
        hint = " (put it in quotes)"
    if isinstance(shape, Scalar) and shape.choices and isinstance(node.value, str) and not shape.kind:
        hint = nearest(node.value, list(shape.choices))
    node.refuse(path, node.found(bool(shape.marks.get("secret"))) + hint, allowed(shape))


def _is_json(node: Node, shape: Shape) -> bool:
    """Whether a string from the environment is JSON: always for lists and maps, unless a bare string may stand there."""
    bare = shape.marks.get("one_or_many") or shape.marks.get("short")
    return not bare or node.value.lstrip()[:1] in ("[", "{")


def parse_json(node: Node, shape: Shape, path: Path) -> Node:
    """The tree of a list or map that a variable holds as JSON; duplicate keys and NaN are refused."""
    try:
        value = json.loads(node.value, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as exc:
        kind = "a list" if isinstance(shape, Items) else "a map"
        node.refuse(path, f"text that is not JSON ({exc})", f"{kind} as JSON")
    return _tree(value, node)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} twice")
    return entries


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"the constant {text}")


def _tree(value: Any, origin: Node) -> Node:
    if isinstance(value, list):
        value = [_tree(item, origin) for item in value]
    elif isinstance(value, dict):
        value = {key: _tree(item, origin) for key, item in value.items()}
    return Node(value, origin.origin, origin.line)
