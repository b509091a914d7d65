"""The environment's part: `LAYA_<SECTION>__<KEY>` overrides, and `${NAME}` references in any string.

In: the tree of the file and a mapping of variables. Out: the same tree, changed in place, each new value carrying the
variable's name for errors. Variables without two underscores are not ours, but for those in `TOP_LEVEL`. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from laya.config.decode import parse_json
from laya.config.node import Node, Path, nearest, path_text
from laya.config.shape import Entries, Fields, Items, Scalar, Shape
from laya.errors import ConfigError

PREFIX = "LAYA_"
TOP_LEVEL = {"LAYA_ROUTES": "routes", "LAYA_BACKENDS": "backends"}

# $${ is a literal ${; the rest is ${NAME} or ${NAME:-default}, and a ${ that is neither is refused.
_REFERENCE = re.compile(r"\$\$\{|\$\{(?:([A-Za-z_][A-Za-z0-9_]*)(?::-([^{}]*))?\})?")
_ORDINARY = re.compile(r"[^A-Z0-9]")


def apply_overrides(root: Node, shape: Fields, environ: Mapping[str, str]) -> None:
    """Put every override into the tree; shallow ones first, so that LAYA_X__A__B wins over LAYA_X__A."""
    ours = [name for name in environ if name in TOP_LEVEL or (name.startswith(PREFIX) and "__" in name)]
    for name in sorted(ours, key=lambda n: (n.count("__"), n)):
        words = [TOP_LEVEL[name]] if name in TOP_LEVEL else name[len(PREFIX):].split("__")
        path, target = _resolve(name, words, shape, root)
        _place(root, path, _value(name, environ[name], target, path))


def _resolve(variable: str, words: list[str], shape: Shape, root: Node) -> tuple[Path, Shape]:
    """The path that a variable's words mean; names of backends and engines are taken from the file."""
    path: Path = ()
    for word in words:
        if isinstance(shape, Fields) and word.lower() in shape.fields:
            key = word.lower()
            shape = shape.fields[key].shape
        elif isinstance(shape, Entries):
            key, shape = _entry(variable, word, path, root), shape.value
        else:
            known = variable_names(shape, PREFIX + "".join(f"{w}__" for w in words[: len(path)]))
            everything = sorted(set(known) | set(TOP_LEVEL)) if not path else known
            hint = nearest(variable, everything)
            raise ConfigError(f"{variable}: no such setting{hint}; allowed: LAYA_<SECTION>__<KEY> as in laya.yaml")
        path = (*path, key)
    return path, shape


def _entry(variable: str, word: str, path: Path, root: Node) -> str:
    """The name in a map that people fill: the same letters and digits, any case, whatever stands between them."""
    existing = root.at(path).value
    names = list(existing) if isinstance(existing, dict) else []
    same = [name for name in names if name == word]
    same = same or [name for name in names if _ORDINARY.sub("_", name.upper()) == word.upper()]
    if len(same) == 1:
        return same[0]
    whole = PREFIX + "__".join(str(p).upper() for p in path)
    found = f"{word} means {' and '.join(same)}" if same else f"no {word} in {path_text(path)}"
    raise ConfigError(f"{variable}: {found}; allowed: {', '.join(names) or 'none yet'}, or the whole map as JSON in {whole}")


def _value(variable: str, text: str, shape: Shape, path: Path) -> Node:
    node = Node(text, variable, text=True)
    if isinstance(shape, Scalar) or (text == "null" and shape.nullable):
        return node
    if shape.marks.get("one_or_many") and text.lstrip()[:1] not in ("[", "{"):
        return node
    return parse_json(node, shape, path)


def _place(root: Node, path: Path, value: Node) -> None:
    node = root
    for step in path[:-1]:
        if not isinstance(node.value, dict):
            return  # the decoder refuses what stands there, with its own line
        inner = node.value.get(step)
        if inner is None or inner.value is None:
            inner = node.value[step] = Node({}, value.origin)
        node = inner
    if isinstance(node.value, dict):
        node.value[path[-1]] = value


def variable_names(shape: Shape, prefix: str = PREFIX) -> list[str]:
    """Every variable that a shape allows under a prefix, maps that people fill apart."""
    if not isinstance(shape, Fields):
        return []
    names = []
    for name, field in shape.fields.items():
        variable = prefix + name.upper()
        if isinstance(field.shape, (Scalar, Items)) and prefix != PREFIX:
            names.append(variable)
        names += variable_names(field.shape, variable + "__")
    return names


def expand_references(node: Node, environ: Mapping[str, str], path: Path = ()) -> None:
    """Replace `${NAME}` and `${NAME:-default}` in every string below `node`; values put in are not looked at again."""
    value = node.value
    if isinstance(value, dict):
        for key, item in value.items():
            if "${" in key:
                item.refuse((*path, key), "a reference in a key", "references in values only")
            expand_references(item, environ, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            expand_references(item, environ, (*path, index))
    elif isinstance(value, str) and "${" in value:
        node.value = _REFERENCE.sub(lambda found: _replacement(found, node, environ, path), value)
        node.text = True


def _replacement(found: re.Match[str], node: Node, environ: Mapping[str, str], path: Path) -> str:
    if found[0] == "$${":
        return "${"
    name, default = found[1], found[2]
    if name is None:
        node.refuse(path, "a ${ that is no reference", "${NAME}, ${NAME:-default}, or $${ for a plain ${")
    if name in environ and not (default is not None and environ[name] == ""):
        return environ[name]
    if default is None:
        node.refuse(path, f"${{{name}}}, but the variable {name} is not set", "a variable that is set, or ${NAME:-default}")
    return default
