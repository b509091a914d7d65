"""The whole configuration as one frozen value, `Config`, and the names of its parts.

In: `load.py` builds it. Out: every room reads it and none changes it; any thread. Defaults and bounds stand beside the
fields in `server.py`, `targets.py` and `inference.py`.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

from laya.config.inference import DEFAULT_MODEL, EngineConfig, InferenceConfig, WatchdogConfig
from laya.config.section import Name, Section, about
from laya.config.server import (
    AuthConfig,
    CacheConfig,
    KeyConfig,
    RedactConfig,
    ResponsesConfig,
    RouterConfig,
    ServerConfig,
    StagesConfig,
    TlsConfig,
)
from laya.config.targets import BackendConfig, ClassifyRule, RouteConfig, TargetConfig, WhenConfig

__all__ = [
    "DEFAULT_MODEL", "LOCAL", "AuthConfig", "BackendConfig", "CacheConfig", "ClassifyRule", "Config", "EngineConfig",
    "InferenceConfig", "KeyConfig", "RedactConfig", "ResponsesConfig", "RouteConfig", "RouterConfig", "ServerConfig",
    "StagesConfig", "TargetConfig", "TlsConfig", "WatchdogConfig", "WhenConfig", "served_name",
]  # fmt: skip

LOCAL = "local"  # the target name of the in-process engine


class Config(Section, kw_only=True):
    """All sections of laya.yaml."""

    server: Annotated[ServerConfig, about("where Laya listens, and the bounds on clients")] = ServerConfig()
    auth: Annotated[AuthConfig, about("who may call")] = AuthConfig()
    router: Annotated[RouterConfig, about("the session table and the default model")] = RouterConfig()
    backends: Annotated[dict[Name, BackendConfig], about("other servers to send to, by name; `local` needs no entry")] = {}
    routes: Annotated[tuple[RouteConfig, ...], about('rules from model names to targets; none: {match: "*", to: local}')] = ()
    stages: Annotated[StagesConfig, about("redaction, cache and stages of your own")] = StagesConfig()
    inference: Annotated[
        InferenceConfig | None, about("the model in this process, called `local` in routes; or several, called by their names")
    ] = None
    source: Annotated[str | None, about("path of the file that was read, or null", hidden=True)] = None

    def engines_by_name(self) -> dict[str, EngineConfig]:
        """In-process engines by target name, in the order written: ``{"local": ...}`` for the single form."""
        if self.inference is None:
            return {}
        return dict(self.inference.engines) or {LOCAL: self.inference}

    def engine_target(self, backend: str) -> str | None:
        """The engine that a target's `backend` means, or None when it is no engine.

        With `engines`, `local` means the first one unless one has that name.
        """
        names = self.engines_by_name()
        if backend in names:
            return backend
        return next(iter(names), None) if backend == LOCAL else None

    def path_of(self, text: str) -> str:
        """A path of the file, absolute: relative ones start at the file's folder, or without a file where we are."""
        folder = os.path.dirname(os.path.abspath(self.source)) if self.source else os.getcwd()
        return os.path.join(folder, os.path.expanduser(text))

    def model_path(self, engine: EngineConfig) -> str:
        """Where an engine's model is, or should be. The single executable carries the default one within itself."""
        path = self.path_of(engine.model)
        carried = os.path.join(getattr(sys, "_MEIPASS", ""), engine.model)  # PyInstaller's folder of what was packed
        return carried if hasattr(sys, "_MEIPASS") and not os.path.exists(path) and os.path.exists(carried) else path


def served_name(engine: EngineConfig) -> str:
    """The public id of an engine's model: `name`, else the file's or folder's name without .gguf."""
    if engine.name:
        return engine.name
    base = os.path.basename(engine.model.rstrip("/")) or engine.model
    return base.removesuffix(".gguf")
