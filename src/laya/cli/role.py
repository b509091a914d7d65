"""Start the process in a role: configuration first, then the packages, then the application, which runs until it is stopped.

In: the path of the file and the role. Out: the exit code of `laya.app.run`; StartError for whatever keeps it from starting.
"""

from __future__ import annotations

from laya import dependencies
from laya.config import Config, load
from laya.config.roles import check_commands, engine_config, unreachable
from laya.errors import ConfigError


def run_role(path: str | None, role: str, engines: list[str] | None = None) -> int:
    """`role` is serve, router or engine; `engines` are those that the role engine was asked for."""

    def read() -> Config:
        config = load(path)
        if role == "router":
            _require_somewhere(config)
        if role == "engine":
            return engine_config(config, engines or [])
        check_commands(config)
        return config

    config = read()
    dependencies.check(dependencies.ROUTER)
    from laya.app import run  # the packages it needs have just been found sound

    return run(config, role, read)


def _require_somewhere(config: Config) -> None:
    """A router has no engine of its own, so each engine that the file has must say where its process listens."""
    absent = unreachable(config, "router")
    if not absent or (config.backends and not _all_lead_to(config, set(absent))):
        return
    nowhere = f"{'no route to a backend' if config.backends else 'no backends'}, and no listen address for {', '.join(absent)}"
    if config.source is None:
        hint = "no file was read: write backends and routes into ./laya.yaml, or name a file with --config"
    else:
        hint = "set inference.listen for `laya engine`, or let `laya serve` run the engine in this process"
    raise ConfigError(f"router: there is nothing to send to: {nowhere}; {hint}")


def _all_lead_to(config: Config, absent: set[str]) -> bool:
    """Whether each target of each route is one of these engines."""
    choices = [route.to for route in config.routes] + [rule.to for route in config.routes for rule in route.classify]
    return all(config.engine_target(target.backend) in absent for targets in choices for target in targets)
