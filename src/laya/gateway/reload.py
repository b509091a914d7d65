"""The configuration file followed while the server runs: a change or SIGHUP brings new rules, backends and keys.

In: `request` (SIGHUP), and the file as a thread of its own sees it once a second. Out: `apply(config, table)` on the loop
thread with everything read, checked and compiled; or, where that fails, nothing: the old configuration stays, and `status`, the
metric and the log say so. What cannot change in a running process keeps its old value and is named in the log.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from laya.config import Config
from laya.errors import ConfigError, StartError
from laya.log import Log

WATCH_S = 1.0  # a change is seen within this time and SETTLE_S
# A file that was just changed must look the same once more: editors and copies write in several steps.
SETTLE_S = 0.2
TAKEN = frozenset({"backends", "routes", "auth", "stages", "source"})  # sections that a reload takes over whole

Compiled = Any  # what `compile` makes of a configuration: the route table, and what else is built off the loop
Apply = Callable[[Config, Compiled], None]


class Reloader:
    """`load` reads the file again; `apply` may raise StartError and must then have changed nothing. The thread calls `load`
    and `compile`; all else is the loop thread's."""

    def __init__(
        self, config: Config, *, load: Callable[[], Config], compile: Callable[[Config], Compiled], apply: Apply,
        post: Callable[[Callable[[], None]], Any], log: Log, show_errors: bool,
    ) -> None:  # fmt: skip
        self.failed = False
        self.reloads = 0
        self._error = ""
        self._config = config
        self._load = load
        self._compile = compile
        self._apply = apply
        self._post = post
        self._log = log
        self._show_errors = show_errors
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="laya-config", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def request(self) -> None:
        """Reload now, changed or not. Two requests before the first is served are one."""
        self._wake.set()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()

    def status(self) -> dict[str, Any]:
        """For /ready. The error quotes the file, so only those on this machine see it there; the log always has it."""
        status: dict[str, Any] = {"state": "kept the old one" if self.failed else "ok", "reloads": self.reloads}
        if self.failed and self._show_errors:
            status["error"] = self._error
        return status

    # -- the thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        seen = self._stamp()
        while True:
            asked = self._wake.wait(WATCH_S)
            self._wake.clear()
            if self._stopping:
                return
            stamp = self._stamp()
            if not asked:
                if stamp == seen or self._wake.wait(SETTLE_S) or self._stamp() != stamp:
                    continue  # nothing new, or still being written: looked at again in a moment
            seen = stamp
            self._reload()

    def _stamp(self) -> tuple:
        """What changes with the file, or that of the keys: also when another is renamed into its place."""
        config = self._config
        keys = config.auth.keys_file
        return _stamp_of(config.source), _stamp_of(keys and config.path_of(keys))

    def _reload(self) -> None:
        try:
            config, ignored = merged(self._config, self._load())
            table = self._compile(config)
        except StartError as error:
            self._tell(partial(self._refuse, str(error)))
        except Exception as fault:  # whatever it is, the old configuration serves on
            self._tell(partial(self._refuse, f"the file could not be read: {type(fault).__name__}"))
        else:
            self._tell(partial(self._adopt, config, table, ignored))

    def _tell(self, call: Callable[[], None]) -> None:
        try:
            self._post(call)
        except RuntimeError:
            pass  # the loop is closed: the process is going down

    # -- loop thread -----------------------------------------------------------------------------------------------------

    def _adopt(self, config: Config, table: Compiled, ignored: list[str]) -> None:
        try:
            self._apply(config, table)
        except StartError as error:
            self._refuse(str(error))
            return
        self._config = config
        self.failed, self._error = False, ""
        self.reloads += 1
        self._log.event("info", "config_reloaded", routes=len(config.routes), backends=len(config.backends))
        if ignored:
            self._log.event("warning", "restart_needed", text=f"changes take effect at a restart: {', '.join(ignored)}")

    def _refuse(self, text: str) -> None:
        self.failed, self._error = True, text
        self._log.event("error", "config_reload_failed", text=text)


def _stamp_of(path: str | None) -> tuple | None:
    try:
        found = os.stat(path) if path else None
    except OSError:
        return None
    return found and (found.st_ino, found.st_size, found.st_mtime_ns)


def merged(old: Config, new: Config) -> tuple[Config, list[str]]:
    """What runs after a reload, and the names of changed sections that wait for a restart. Raises ConfigError."""
    if list(new.engines_by_name()) != list(old.engines_by_name()):
        raise ConfigError(f"{new.source}: the engines have other names now; restart to apply that")
    router = msgspec.structs.replace(old.router, default_model=new.router.default_model)
    ignored = ["router"] if new.router != router else []
    changes: dict[str, Any] = {"router": router}
    for name in Config.__struct_fields__:
        if name in TAKEN:
            changes[name] = getattr(new, name)
        elif name != "router" and getattr(new, name) != getattr(old, name):
            ignored.append(name)
    return msgspec.structs.replace(old, **changes), ignored
