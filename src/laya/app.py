"""The composition root: the only file that sees both sockets and torch.

In: a configuration and a role. Out: an exit code, when the process has served. Torch is imported only when the role runs an
in-process engine.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import os
import signal
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from laya import __version__, dependencies
from laya.config import Config
from laya.config.roles import unreachable, work_folder
from laya.errors import StartError
from laya.gateway.access import Access
from laya.gateway.condition import Condition
from laya.gateway.figures import routing_counters, routing_gauges
from laya.gateway.front import Gateway
from laya.gateway.pages import Pages
from laya.gateway.reload import Reloader
from laya.gateway.shared_limits import SharedLimits
from laya.gateway.shared_store import open_responses
from laya.gateway.staging import Stages
from laya.log import Log, forward_logging
from laya.net.backends import make_backends
from laya.net.clock import Clock
from laya.net.guests import GuestWorker
from laya.net.in_c import IN_C
from laya.net.loop import new_loop
from laya.net.room import Memory
from laya.net.server import Server
from laya.net.streams import streams_on
from laya.net.watchers import Watchers
from laya.net.worker import Worker
from laya.routing.sessions.journal import open_journal
from laya.routing.sessions.redis_link import open_redis
from laya.routing.sessions.store import open_sessions
from laya.routing.table import RouteTable
from laya.telemetry import Exposition, Telemetry
from laya.ui.desk import Desk
from laya.ui.history import History


def run(config: Config, role: str, read: Callable[[], Config]) -> int:
    """Serve until a signal. `read` gives the configuration anew, for a reload.

    Raises StartError for what keeps the process from starting."""
    dependencies.check(dependencies.ROUTER)
    log = Log(config.server.log_level)
    log.start()
    forward_logging(log)
    try:
        with asyncio.Runner(loop_factory=partial(new_loop, tls=_uses_tls(config))) as runner:
            return runner.run(serve(config, role, log, read))
    finally:
        log.stop()


async def serve(config: Config, role: str, log: Log, read: Callable[[], Config]) -> int:
    """As `run`, on a loop that runs already."""
    application = Application(config, role, log, read)
    await application.open()
    await application.server.run()
    return await application.close()


class Application:
    """Everything of one process, put together: made, opened, and closed again when the server has ended."""

    def __init__(self, config: Config, role: str, log: Log, read: Callable[[], Config]) -> None:
        self.config, self.role, self.log = config, role, log
        self.began = time.perf_counter()
        self.loop = loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: _log_fault(log, context))
        self.telemetry = Telemetry()
        self.clock = Clock(loop, self._stalled)
        self.streams = streams_on(loop)
        self.server = Server(config.server, self.clock, loop, self.streams)
        self.loopback = _is_loopback(config.server.host)
        self.failures: list[StartError] = []
        self.backends = make_backends(config, role, {}, self.clock, loop, self.streams)
        self.engines: dict[str, Any] = {}
        self.watchdog: Any = None
        if role != "router" and config.engines_by_name():
            self._make_engines()
        self.engine_ids = {engine.card.id: name for name, engine in self.engines.items()}
        self.condition = Condition(self.server, self.backends, self.engines, self.watchdog)
        self.gateway = self.server.gateway = self.condition.gateway = self._make_gateway()
        self.clock.add(self.condition)
        self.watchers = Watchers(self._command_limit, work_folder(config), self.clock, log, show_output=self.loopback)
        self.reloader = self.condition.reloader = Reloader(
            config, load=read, compile=self._compiled, apply=self._apply, post=loop.call_soon_threadsafe, log=log,
            show_errors=self.loopback,
        )  # fmt: skip
        self.telemetry.gauges += [self.condition.gauges, lambda: routing_gauges(self.gateway)]
        self.telemetry.counters += [self.condition.counters, lambda: routing_counters(self.gateway)]

    # -- the parts -----------------------------------------------------------------------------------------------------

    def _make_engines(self) -> None:
        from laya.inprocess import build_engines, build_watchdog, memory_gauges

        post = self.loop.call_soon_threadsafe
        self.engines = build_engines(self.config, post=post, on_failed=self._engine_failed, log=self.log)
        self.watchdog = build_watchdog(self.config, self.engines, post, self.log)
        self.telemetry.gauges.append(lambda: memory_gauges(self.watchdog, self.engines))

    def _make_gateway(self) -> Gateway:
        config, loop, clock, condition = self.config, self.loop, self.clock, self.condition
        self.worker = Worker(loop, lambda fault: self._note_fault("worker", fault))
        self.guests = GuestWorker(loop, lambda fault: self._note_fault("stages", fault))
        self.journal = open_journal(config, loop.call_soon_threadsafe)
        self.link = open_redis(config.router, loop.call_soon_threadsafe)
        sessions = open_sessions(config.router, self.journal, loop.call_later, self.link)
        history = History(self.telemetry, self.engines, self.backends, clock.now)
        clock.add(sessions)
        clock.add(history)
        desk = Desk(
            self.role, gateway=lambda: self.gateway, ready=condition.ready, history=history, components=condition.components,
            now=lambda: clock.now,
        )  # fmt: skip
        pages = Pages(
            Exposition(self.telemetry), ready=condition.ready, healthy=condition.healthy, components=condition.components,
            metrics_open=self.loopback, desk=desk,
        )  # fmt: skip
        gateway = Gateway(
            table=RouteTable.compile(config, self.engine_ids), backends=self.backends, engines=self.engines,
            access=self._access(config), telemetry=self.telemetry, log=self.log, offload=self.worker.offload,
            offload_guest=self.guests.offload, now=lambda: clock.now,
            store=open_responses(config.router, self.journal, self.link, loop.call_later), sessions=sessions,
            later=loop.call_later, stages=Stages(config), pages=pages,
        )  # fmt: skip
        if self.link is not None:
            limits = SharedLimits(self.link)
            gateway.staging.metering.count_with(limits)
            clock.add(limits)
        return gateway

    def _access(self, config: Config) -> Access:
        origins = self.config.server.cors_origins  # the server's settings stay until a restart
        return Access(config.auth, origins, loopback=self.loopback, relayed=self.role == "engine")

    def _command_limit(self) -> Memory:
        from laya.inprocess.commands import command_limit  # most configurations have no command

        return command_limit(self.config, [engine.plan for engine in self.engines.values() if engine.plan is not None])

    # -- a reload ------------------------------------------------------------------------------------------------------

    def _compiled(self, new: Config) -> tuple[RouteTable, Stages]:
        return RouteTable.compile(new, self.engine_ids), Stages(new)

    def _apply(self, new: Config, compiled: tuple[RouteTable, Stages]) -> None:
        """Backends of unchanged settings stay, with connections, counts and breakers; the others end with their calls."""
        backends = self.backends
        found = make_backends(new, self.role, backends, self.clock, self.loop, self.streams)
        self.watchers.check(list(found.values()))
        gone = [backend for name, backend in backends.items() if found.get(name) is not backend]
        backends.clear()
        backends.update(found)
        self.gateway.adopt(*compiled, self._access(new))
        self.watchers.watch(list(backends.values()))
        for backend in gone:
            backend.pool.retire()

    # -- what goes wrong -----------------------------------------------------------------------------------------------

    def _engine_failed(self, error: StartError, was_ready: bool) -> None:
        """An engine that cannot start ends the process; one that dies later does so where nothing else could answer."""
        self.log.event("error", "engine_failed", text=str(error))
        if not was_ready or not self.condition.healthy():
            self.failures.append(error)
            self.server.stop()

    def _note_fault(self, where: str, fault: BaseException) -> None:
        self.log.event("error", "fault", where=where, kind=type(fault).__name__)

    def _stalled(self, seconds: float) -> None:
        self.telemetry.longest_stall = max(self.telemetry.longest_stall, seconds)

    # -- start and end -------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Listen, and start what runs beside the loop. Raises StartError."""
        watched = list(self.backends.values())
        self.watchers.check(watched)
        await self.server.listen()
        self.clock.start()
        self.watchers.watch(watched)
        self.reloader.start()
        terminal = os.isatty(0)
        self.loop.add_signal_handler(signal.SIGHUP, lambda: self._hang_up(terminal))
        self._announce()
        gc.freeze()  # what start-up made stays for good: the collector need not walk it under traffic
        for engine in self.engines.values():
            engine.start()
            self.clock.add(EngineTick(engine))
        if self.watchdog is not None:
            self.watchdog.start()

    def _hang_up(self, terminal: bool) -> None:
        """SIGHUP: the terminal that it was started from has gone, or somebody wants the file read again."""
        if terminal and not os.isatty(0):
            self.server.stop()
        else:
            self.reloader.request()

    def _announce(self) -> None:
        """The first lines of the log."""
        log, addresses = self.log, self.server.addresses
        if not self.loopback and not self.config.auth.keys:
            key = "inference.listen_key" if self.role == "engine" else "auth.keys"
            log.event("warning", "open_to_all", text=f"no {key} off loopback: all who reach this address may use it")
        for name in unreachable(self.config, self.role):
            text = "it has no listen address, so this router sends nothing to it"
            log.event("warning", "unreachable", engine=name, text=text)
        page = next((f"{address}/ui" for address in addresses if not address.startswith("unix:")), None)
        seconds = round(time.perf_counter() - self.began, 3)
        log.event(
            "info", "listening", version=__version__, role=self.role, addresses=addresses, page=page,
            lane="c" if IN_C else "python", seconds=seconds,
        )  # fmt: skip

    async def close(self) -> int:
        """End it all, when the server has drained. The exit code; raises the StartError of an engine that ended the process."""
        self.reloader.stop()
        if self.watchdog is not None:
            self.watchdog.stop()
        for engine in self.engines.values():
            engine.stop(0.0)  # what it ran for clients has ended with the drain
        wait = self.loop.run_in_executor
        ended = [await wait(None, engine.join, 5.0) for engine in self.engines.values()]
        await self.watchers.stop()
        for backend in self.backends.values():
            backend.pool.close()
        self.worker.stop()
        self.guests.stop()
        for store in (self.journal, self.link):
            if store is not None:
                await wait(None, store.stop, 5.0)
        self.clock.stop()
        if self.streams is not None:
            self.streams.close()
        if self.failures:
            if not all(ended):
                _leave(self.failures[0], self.log)
            raise self.failures[0]
        self.log.event("info", "stopped")
        return 0


def _leave(error: StartError, log: Log) -> NoReturn:
    """An engine thread hangs in its device: the interpreter's own end would wait for the driver, perhaps for ever."""
    log.stop()
    os.write(2, f"laya: {error}\n".encode())
    os._exit(error.exit_code)


class EngineTick:
    """What an engine must do now and then although a step is stuck."""

    def __init__(self, engine) -> None:
        self._engine = engine

    def on_tick(self, now: float) -> None:
        self._engine.tick()


def _log_fault(log: Log, context: dict) -> None:
    """A fault that reached the loop: where it arose, never its text, which may hold what a client sent."""
    fault = context.get("exception")
    trace = fault.__traceback__ if fault is not None else None
    places = [f"{os.path.basename(f.filename)}:{f.lineno}" for f in traceback.extract_tb(trace)][-4:]
    log.event("error", "fault", kind=type(fault).__name__, where=places, text=context.get("message", ""))


def _uses_tls(config: Config) -> bool:
    return bool(config.server.tls.certificate) or any((b.url or "").startswith("https:") for b in config.backends.values())


def _is_loopback(host: str) -> bool:
    if not host:  # a socket file alone
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
