"""`laya check`: everything that `serve` does before it listens, but for loading a model."""

from __future__ import annotations

import argparse
import os

from laya.cli import exits
from laya.config import DEFAULT_MODEL, Config, EngineConfig, load, served_name
from laya.config.notices import notices
from laya.config.roles import check_commands
from laya.gateway.staging import Stages
from laya.routing.table import RouteTable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments of its own."""


def run(arguments: argparse.Namespace) -> int:
    config, table = read(arguments.config)
    unread = read_models(config)
    print(f"{config.source or 'built-in defaults'}: OK")
    for line in summary(config, table):
        print("  " + line)
    for line in [*notices(config), *missing_models(config), *unread]:
        print("  warning: " + line)
    return exits.OK


def read(path: str | None) -> tuple[Config, RouteTable]:
    """Raises StartError for whatever in the file would keep serve from starting."""
    config = load(path)
    table = RouteTable.compile(config)
    check_commands(config)
    Stages(config)  # a pattern or a stage of the user's own that cannot be had
    return config, table


def summary(config: Config, table: RouteTable) -> list[str]:
    """What would run, a line for each part."""
    server = config.server
    scheme = "https" if server.tls.certificate else "http"
    lines = [f"listens on {scheme}://{server.host}:{server.port}"]
    if server.unix_socket:
        lines.append(f"listens on {server.unix_socket}")
    for name, engine in config.engines_by_name().items():
        lines.append(f"engine {name}: {engine.model}, served as {served_name(engine)}")
    for name, backend in config.backends.items():
        lines.append(f"backend {name}: {'started on demand' if backend.command else 'at its url'}, weight {backend.weight:g}")
    rules = sum(len(route.match) for route in config.routes)
    lines.append(f"{rules} rules in {len(config.routes)} routes" if rules else 'no routes: every name goes to "local"')
    lines.append(f"a request without a model takes: {table.default_model or 'nothing, it is refused with 400'}")
    lines.append(f"{len(config.auth.keys)} API keys" if config.auth.keys else "no API keys: authorization is not asked for")
    return lines


def missing_models(config: Config) -> list[str]:
    """Engines whose model is no file here."""
    return [
        f"the model of engine {name} is not there: {config.model_path(engine)}{_hint(engine)}"
        for name, engine in config.engines_by_name().items()
        if not os.path.exists(config.model_path(engine))
    ]


def read_models(config: Config) -> list[str]:
    """The headers of those that are here. Raises StartError for one that cannot be run; what could not be looked at is told."""
    present = {
        name: engine for name, engine in config.engines_by_name().items() if os.path.exists(config.model_path(engine))
    }  # fmt: skip
    if not present:
        return []
    try:
        from laya.model.describe import describe
    except ImportError as exc:
        return [f"no model was looked at: {exc}; laya doctor tells what is missing"]
    for engine in present.values():
        describe(config.model_path(engine), dtype=engine.dtype)
    return []


def _hint(engine: EngineConfig) -> str:
    return "; bring it with: laya pull default" if engine.model == DEFAULT_MODEL else ""
