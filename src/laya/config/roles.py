"""What each role makes of the configuration: which addresses it serves, which places it may send to.

In: the configuration and a role (serve, router, engine). Out: the configuration of that role, and its backends' settings. At
start and at a reload, on any thread but the loop's: commands are looked for on disk.
"""

from __future__ import annotations

import os
import shlex
import shutil
from urllib.parse import urlsplit

from msgspec.structs import replace

from laya.config.structs import (
    AuthConfig,
    BackendConfig,
    Config,
    EngineConfig,
    KeyConfig,
    ServerConfig,
    StagesConfig,
    TlsConfig,
)
from laya.errors import ConfigError

# The engine process decides by itself when an answer has taken too long; a router only notices that its host is gone.
_ENGINE_ANSWER_S = 86_400.0


def engine_config(config: Config, names: list[str]) -> Config:
    """The configuration of `laya engine [NAME...]`: those engines, or all, at their address and for routers alone.

    Keys, routes, stages and other backends are the router's. Raises ConfigError.
    """
    engines = _chosen(config, names)
    addresses = {engine.listen for engine in engines.values()}
    if None in addresses:
        lacking = next(name for name, engine in engines.items() if engine.listen is None)
        raise ConfigError(f"engine: engine {lacking} has no listen address; set inference.listen, such as unix:laya.sock")
    if len(addresses) > 1:
        commands = ", ".join(f"laya engine {name}" for name in engines)
        raise ConfigError(f"engine: these engines listen at different addresses; start a process for each: {commands}")
    keys = {engine.listen_key for engine in engines.values()}
    if len(keys) > 1:
        raise ConfigError("engine: engines at one address have different listen_key; allowed: one")
    key = keys.pop()
    inference = config.inference
    if inference.engines:
        inference = replace(inference, engines=engines)
    stem, extension = os.path.splitext(config.router.path)
    return replace(
        config,
        server=_listening(config.server, addresses.pop()),
        auth=AuthConfig(keys=(KeyConfig(name="router", key=key),) if key else ()),
        # Its own file beside the router's: a journal has one user.
        router=replace(config.router, default_model=None, path=f"{stem}-engine{extension}"),
        backends={}, routes=(), stages=StagesConfig(), inference=inference,
    )  # fmt: skip


def _chosen(config: Config, names: list[str]) -> dict[str, EngineConfig]:
    engines = config.engines_by_name()
    if not engines:
        raise ConfigError("engine: no engine is configured; add a section inference")
    for name in names:
        if name not in engines:
            raise ConfigError(f"engine: there is no engine {name}; known: {', '.join(engines)}")
    return {name: engines[name] for name in names} if names else engines


def _listening(server: ServerConfig, address: str) -> ServerConfig:
    if address.startswith("unix:"):
        return replace(server, host="", port=0, unix_socket=address[5:], tls=TlsConfig())
    parts = urlsplit(address)
    secure = parts.scheme == "https"
    if secure and server.tls.certificate is None:
        raise ConfigError("engine: an https listen address needs server.tls")
    port = parts.port or (443 if secure else 80)
    return replace(server, host=parts.hostname or "", port=port, unix_socket=None, tls=server.tls if secure else TlsConfig())


def backend_settings(config: Config, role: str) -> dict[str, BackendConfig]:
    """Every server that a route may send to; for a router that includes the engine processes behind its engines' names."""
    settings = dict(config.backends)
    if role == "router":
        several = len(config.engines_by_name()) > 1
        for name, engine in config.engines_by_name().items():
            if engine.listen:
                settings[name] = _engine_backend(name, engine, config.server, several)
    return settings


def _engine_backend(name: str, engine: EngineConfig, server: ServerConfig, several: bool) -> BackendConfig:
    """All requests go on at once: the engine's own queue is the one that is fair between clients."""
    return BackendConfig(
        url=engine.listen, base="/v1", health=None, key=engine.listen_key, max_inflight=server.max_connections,
        headers={"x-laya-target": name} if several else {}, first_byte_timeout_s=_ENGINE_ANSWER_S,
    )  # fmt: skip


def unreachable(config: Config, role: str) -> list[str]:
    """Engines of the file that a router can send nothing to."""
    return [name for name, engine in config.engines_by_name().items() if engine.listen is None] if role == "router" else []


def is_link(config: Config, name: str) -> bool:
    """Of a router's backend: it is an engine process of this configuration."""
    return name not in config.backends


def work_folder(config: Config) -> str:
    """Where commands run, and what relative paths in them start from: the configuration's folder."""
    return os.path.dirname(config.path_of("x"))


def check_commands(config: Config) -> None:
    """Raise ConfigError for a backend whose program is not there, before anybody waits for it."""
    for name, backend in config.backends.items():
        if backend.command is None:
            continue
        program = shlex.split(backend.command)[0]
        place = config.path_of(program) if "/" in program else program
        if shutil.which(place) is None:
            raise ConfigError(
                f"{config.source or 'backends'}: backends.{name}.command: there is no program {program} that can be run; "
                "allowed: a program on PATH, or a path"
            )
