"""One file and the environment -> one `Config`.

In: a path or None, and a mapping of variables. Out: a frozen Config, or ConfigError with one line of text. Reads one file;
called at start and at a reload, on any thread but the loop's (a large file takes a second).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from laya.config.crosscheck import crosscheck
from laya.config.decode import build, parse_json
from laya.config.environ import apply_overrides, expand_references
from laya.config.node import Node
from laya.config.shape import Fields, config_shape
from laya.config.structs import Config, InferenceConfig
from laya.config.yaml_strict import MAX_BYTES, parse
from laya.errors import ConfigError

DEFAULT_PATH = "laya.yaml"


def load(path: str | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """Read `path`; without one ./laya.yaml if it is there, else the built-in defaults. `environ` defaults to the process's.

    A configuration with neither `inference` nor `backends` gets the embedded model.
    """
    environ = os.environ if environ is None else environ
    source = path if path is not None else DEFAULT_PATH if os.path.exists(DEFAULT_PATH) else None
    if source is None:
        root = Node({}, "built-in defaults")
    else:
        root = parse(_read(source), source)
    return _from_tree(root, environ, source)


def loads(text: str | bytes, environ: Mapping[str, str] | None = None, source: str = DEFAULT_PATH) -> Config:
    """The same from text; `source` is what errors call it and where relative paths start."""
    data = text.encode() if isinstance(text, str) else text
    return _from_tree(parse(data, source), environ or {}, source)


def _from_tree(root: Node, environ: Mapping[str, str], source: str | None) -> Config:
    shape = config_shape()
    apply_overrides(root, shape, environ)
    expand_references(root, environ)
    _add_keys(root, shape, environ, source)
    config: Config = build(root, shape)
    if config.inference is None and not config.backends:
        config = msgspec.structs.replace(config, inference=InferenceConfig())
    config = msgspec.structs.replace(config, source=source)
    crosscheck(config, root)
    return config


def _add_keys(root: Node, shape: Fields, environ: Mapping[str, str], source: str | None) -> None:
    """Put the keys of `auth.keys_file` behind those of the file itself; their errors name their own file and line."""
    auth = root.value.get("auth")
    named = auth.value.get("keys_file") if auth is not None and isinstance(auth.value, dict) else None
    if named is None or not isinstance(named.value, str) or named.value in ("", "null") or "\0" in named.value:
        return  # none, or nothing that is a path: the decoder says so
    path = os.path.join(os.path.dirname(os.path.abspath(source or "")), os.path.expanduser(named.value))
    tree = parse(_read(path, "auth.keys_file: a YAML file that can be read"), path)
    extra = next((key for key in tree.value if key != "keys"), None)
    if extra is not None:
        tree.value[extra].refuse((extra,), "a key of its own", "the key `keys` alone, a list")
    more = tree.value.get("keys")
    if more is None:
        return
    expand_references(more, environ, ("keys",))
    keys = auth.value.get("keys")
    if keys is not None and isinstance(keys.value, str):
        keys = parse_json(keys, shape.fields["auth"].shape.fields["keys"].shape, ("auth", "keys"))
    if not isinstance(more.value, list) or not (keys is None or keys.value is None or isinstance(keys.value, list)):
        more.refuse(("keys",), more.found(), "a list of maps, as in auth.keys")
    before = keys.value or [] if keys is not None else []
    auth.value["keys"] = Node([*before, *more.value], more.origin, more.line)


def _read(path: str, allowed: str = "a file given with --config") -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror or exc}; allowed: {allowed}") from None
