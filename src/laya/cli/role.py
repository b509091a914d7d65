"""Start the process in a role: configuration first, then the packages, then the application, which runs until it is stopped.

In: the path of the file and the role. Out: the exit code of `laya.app.run`; StartError for whatever keeps it from starting.
"""

from __future__ import annotations

from laya import dependencies
from laya.config import Config, load
from laya.config.roles import check_commands, engine_config
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
    absent = [name for name, engine in config.engines_by_name().items() if engine.listen is None]
    if absent and not config.backends:
        raise ConfigError(
            f"router: there is nothing to send to: no backends, and no listen address for {', '.join(absent)}; "
            "`laya serve` runs the engine in this process"
        )
