"""What no single key can tell: names that must exist, settings that exclude each other.

In: the decoded `Config` and the tree it came from. Out: nothing, or a ConfigError that points at the line. The rules' own
conflicts (two patterns for one name) are found by `routing/table.py`. Pure.
"""

from __future__ import annotations

import shlex

from laya.config.node import Node, Path, nearest
from laya.config.structs import LOCAL, BackendConfig, Config, EngineConfig, RouteConfig, TargetConfig

# A command is run without a shell: these would be given to the program as arguments.
_SHELL_WORDS = frozenset({"|", "||", "&", "&&", ";", ">", ">>", "<", "2>", "2>&1"})


def crosscheck(config: Config, root: Node) -> None:
    """Raise ConfigError for the first contradiction."""
    _engines(config, root)
    _server(config, root)
    _backends(config, root)
    _keys(config, root)
    _routes(config, root)


def _refuse(root: Node, path: Path, found: str, allowed: str) -> None:
    root.at(path).refuse(path, found, allowed)


def _engines(config: Config, root: Node) -> None:
    several = config.inference.engines if config.inference else {}
    beside = [key for key in root.at(("inference",)).value or () if key != "engines"] if several else []
    if beside:
        allowed = "engines alone, each with its own keys; or one model"
        _refuse(root, ("inference", beside[0]), f"{beside[0]} beside engines", allowed)
    for name in several:
        if name in config.backends:
            _refuse(root, ("backends", name), f"a backend of the same name as the engine {name}", "a name of its own")
    if LOCAL in config.backends:
        _refuse(root, ("backends", LOCAL), "a backend called local", "another name: local is the in-process engine")
    for name, engine in config.engines_by_name().items():
        _engine(engine, ("inference", "engines", name) if several else ("inference",), root)


def _engine(engine: EngineConfig, path: Path, root: Node) -> None:
    mark = engine.watchdog
    if mark.soft >= mark.hard:
        _refuse(root, (*path, "watchdog", "soft"), f"{mark.soft}, not below hard", f"a number below {mark.hard}")
    if engine.max_concurrent_prefills > engine.max_num_seqs:
        _refuse(root, (*path, "max_concurrent_prefills"), f"{engine.max_concurrent_prefills}, above max_num_seqs",
                f"at most {engine.max_num_seqs}")  # fmt: skip


def _server(config: Config, root: Node) -> None:
    server = config.server
    if (server.tls.certificate is None) != (server.tls.key is None):
        _refuse(root, ("server", "tls"), "only one of certificate and key", "both, or neither")
    if server.max_body_bytes > server.max_buffered_bytes:
        _refuse(root, ("server", "max_body_bytes"), f"{server.max_body_bytes} bytes, more than max_buffered_bytes",
                f"at most {server.max_buffered_bytes}")  # fmt: skip
    if not server.host and server.unix_socket is None:
        _refuse(root, ("server", "host"), "no address and no unix_socket", "one of them")
    if config.router.mode == "shared" and config.router.redis is None:
        _refuse(root, ("router", "mode"), "shared without router.redis", "router.redis: the URL of the common table")


def _backends(config: Config, root: Node) -> None:
    for name, backend in config.backends.items():
        _backend(backend, ("backends", name), root)


def _backend(backend: BackendConfig, path: Path, root: Node) -> None:
    if (backend.url is None) == (backend.command is None):
        found = "both url and command" if backend.url else "neither url nor command"
        _refuse(root, path, found, "one of them: url of a running server, or command to start one")
    if backend.command is not None:
        _command(backend.command, (*path, "command"), root)
    if backend.url is not None and not _port_is_valid(backend.url):
        _refuse(root, (*path, "url"), "a port that is none", "a port from 1 to 65535")


def _command(command: str, path: Path, root: Node) -> None:
    try:
        words = shlex.split(command)
    except ValueError as exc:
        _refuse(root, path, f"a command that cannot be split into words ({exc})", "one as a shell takes it")
    if not any("{port}" in word for word in words):
        _refuse(root, path, "a command without {port}", "one with {port}, which Laya fills in")
    if any(word in _SHELL_WORDS for word in words):
        found = next(word for word in words if word in _SHELL_WORDS)
        _refuse(root, path, f"the shell's {found} in a command", "one program and its arguments, or: sh -c '...'")


def _port_is_valid(url: str) -> bool:
    if url.startswith("unix:"):
        return True
    from urllib.parse import urlsplit  # costs a millisecond: only where a backend is configured

    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _keys(config: Config, root: Node) -> None:
    names: set[str] = set()
    secrets: set[bytes] = set()
    known = _route_names(config) | set(config.engines_by_name())
    for index, key in enumerate(config.auth.keys):
        path: Path = ("auth", "keys", index)
        if key.name in names:
            _refuse(root, (*path, "name"), f"the name {key.name} twice", "a name of its own for each key")
        if (key.key is None) == (key.sha256 is None):
            found = "both key and sha256" if key.key else "neither key nor sha256"
            _refuse(root, path, found, "one of them: the secret, or its SHA-256")
        if key.digest in secrets:
            _refuse(root, (*path, "key"), "a key that another name has", "a key of its own for each name")
        names.add(key.name)
        secrets.add(key.digest)
        for place, route in enumerate(key.routes or ()):
            if route not in known:
                _unknown(root, (*path, "routes", place), "route", route, known)


def _routes(config: Config, root: Node) -> None:
    names = _route_names(config) | set(config.engines_by_name())
    seen: set[str] = set()
    targets = set(config.backends) | set(config.engines_by_name())
    targets |= {LOCAL} if config.engine_target(LOCAL) else set()
    if not config.routes and not config.engines_by_name():
        _refuse(root, ("routes",), "no routes and no engine", "routes that send to a backend, or inference with a model")
    for index, route in enumerate(config.routes):
        path: Path = ("routes", index)
        if route.name in seen:
            _refuse(root, (*path, "name"), f"the name {route.name} twice", "a name of its own for each route")
        if route.name is not None:
            seen.add(route.name)
        _route(config, route, path, root, targets, names)


def _route(config: Config, route: RouteConfig, path: Path, root: Node, targets: set[str], names: set[str]) -> None:
    last = len(route.classify) - 1
    if not route.to and (not route.classify or route.classify[last].when is not None):
        _refuse(root, path, "no target for every request", "to, or a last rule of classify without when")
    _targets(route.to, (*path, "to"), root, targets)
    for place, rule in enumerate(route.classify):
        if rule.when is None and (place < last or route.to):
            _refuse(root, (*path, "classify", place), "a rule without when before others", "it last, and no `to` beside")
        if rule.when is not None and rule.when.has_code and rule.when.no_code:
            _refuse(root, (*path, "classify", place, "when"), "both has_code and no_code", "one of them")
        _targets(rule.to, (*path, "classify", place, "to"), root, targets)
    for place, other in enumerate(route.fallback):
        if other not in names:
            _unnamed(config, root, (*path, "fallback", place), other)
            _unknown(root, (*path, "fallback", place), "route", other, names)
        if other == route.name:
            _refuse(root, (*path, "fallback", place), "the route itself", "another route")


def _unnamed(config: Config, root: Node, path: Path, wanted: str) -> None:
    """A fallback goes to a route by its name; what it matches is easily taken for that."""
    for index, route in enumerate(config.routes):
        if route.name is None and wanted in route.match:
            found = f"{wanted}, which routes[{index}] matches but is not named"
            _refuse(root, path, found, f"a route's name; give it name: {wanted}")


def _targets(items: tuple[TargetConfig, ...], path: Path, root: Node, known: set[str]) -> None:
    for place, target in enumerate(items):
        if target.backend not in known:
            _unknown(root, (*path, place), "backend or engine", target.backend, known)


def _route_names(config: Config) -> set[str]:
    return {route.name for route in config.routes if route.name is not None}


def _unknown(root: Node, path: Path, kind: str, name: str, known: set[str]) -> None:
    hint = nearest(name, sorted(known))
    missing = " (there is no inference section)" if name == LOCAL else ""
    none = "the name of a route, and none has a name" if kind == "route" else f"no {kind} is configured"
    _refuse(root, path, f"the unknown {kind} {name}{hint}{missing}", ", ".join(sorted(known)) or none)
