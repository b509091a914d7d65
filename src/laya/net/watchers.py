"""Who watches over backends: health probes of those that run elsewhere, links to engine processes, the supervisor of commands.

In: the backends in force, at start and after each reload. Out: their health, gates and processes. Loop thread only.
"""

from __future__ import annotations

from collections.abc import Callable

from laya.errors import ConfigError
from laya.gateway.backends import Backend
from laya.log import Log
from laya.net.clock import Clock
from laya.net.engine_link import EngineLink
from laya.net.health import HealthProbe
from laya.net.room import Memory
from laya.net.supervisor import Supervisor


class Watchers:
    """`limit()` is what all commands may take together; asked for once, when there is a command."""

    def __init__(self, limit: Callable[[], Memory], folder: str, clock: Clock, log: Log, *, show_output: bool) -> None:
        self._limit = limit
        self._folder = folder
        self._clock = clock
        self._log = log
        self._show_output = show_output
        self._probe = HealthProbe()
        self._links: dict[Backend, EngineLink] = {}
        self._supervisor: Supervisor | None = None

    def check(self, backends: list[Backend]) -> None:
        """Raises ConfigError for a command that could never run; changes nothing."""
        commands = [backend for backend in backends if backend.settings.command is not None]
        if commands and self._supervisor is None:
            self._supervisor = Supervisor(
                self._limit(), self._folder, self._clock, self._log, show_output=self._show_output
            )  # fmt: skip
        for backend in commands:
            for key, need, limit in zip(
                ("memory", "gpu_memory"), (backend.settings.memory, backend.settings.gpu_memory), self._supervisor.limit,
                strict=True,
            ):  # fmt: skip
                if need is not None and limit is not None and need > limit:
                    raise ConfigError(
                        f"backends.{backend.name}.{key}: found {need >> 20} MiB, more than all commands may take together; "
                        f"allowed: at most {limit >> 20} MiB (router.command_{key}, or what the machine has beside its engines)"
                    )

    def watch(self, backends: list[Backend]) -> None:
        """Watch these from now on and no others."""
        self._probe.watch([backend for backend in backends if backend.settings.command is None])
        links = {backend for backend in backends if backend.link}
        for backend in self._links.keys() - links:
            self._links.pop(backend).stop()
        for backend in links - self._links.keys():
            self._links[backend] = EngineLink(backend)
            self._links[backend].start()
        if self._supervisor is not None:
            self._supervisor.watch(backends)

    async def stop(self) -> None:
        """No more probes; every command is ended and waited for."""
        self._probe.stop()
        for link in self._links.values():
            link.stop()
        if self._supervisor is not None:
            await self._supervisor.stop()
