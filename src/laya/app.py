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
from typing import NoReturn

from laya import __version__, dependencies
from laya.config import Config
from laya.config.roles import unreachable, work_folder
from laya.errors import StartError
from laya.gateway.access import Access
from laya.gateway.backends import Backend
from laya.gateway.figures import routing_components, routing_counters, routing_gauges
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
from laya.net.room import Memory
from laya.net.server import COMPILED, Server
from laya.net.watchers import Watchers
from laya.net.worker import Worker
from laya.routing.sessions.journal import open_journal
from laya.routing.sessions.redis_link import open_redis
from laya.routing.sessions.store import open_sessions
from laya.routing.table import RouteTable
from laya.telemetry import Exposition, Telemetry, resident_bytes
from laya.ui.desk import Desk
from laya.ui.history import History


def run(config: Config, role: str, read: Callable[[], Config]) -> int:
    """Serve until a signal. `read` gives the configuration anew, for a reload.

    Raises StartError for what keeps the process from starting."""
    dependencies.check(dependencies.ROUTER)
    import uvloop

    log = Log(config.server.log_level)
    log.start()
    forward_logging(log)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(config, role, log, read))
    finally:
        log.stop()


async def _serve(config: Config, role: str, log: Log, read: Callable[[], Config]) -> int:
    began = time.perf_counter()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: _log_fault(log, context))
    telemetry = Telemetry()
    clock = Clock(loop, lambda stall: setattr(telemetry, "longest_stall", max(telemetry.longest_stall, stall)))
    server = Server(config.server, clock, loop)
    worker = Worker(loop, lambda fault: log.event("error", "fault", where="worker", kind=type(fault).__name__))
    guests = GuestWorker(loop, lambda fault: log.event("error", "fault", where="stages", kind=type(fault).__name__))
    failures: list[StartError] = []

    def engine_failed(error: StartError, was_ready: bool) -> None:
        """An engine that cannot start ends the process; one that dies later does so where nothing else could answer."""
        log.event("error", "engine_failed", text=str(error))
        if not was_ready or not _healthy(backends, engines):
            failures.append(error)
            server.stop()

    backends = make_backends(config, role, {}, clock, loop)
    engines, watchdog = {}, None
    if role != "router" and config.engines_by_name():
        from laya.inprocess import build_engines, build_watchdog, memory_gauges

        engines = build_engines(config, post=loop.call_soon_threadsafe, on_failed=engine_failed, log=log)
        watchdog = build_watchdog(config, engines, loop.call_soon_threadsafe, log)
        telemetry.gauges.append(lambda: memory_gauges(watchdog, engines))
    engine_ids = {engine.card.id: name for name, engine in engines.items()}
    table = RouteTable.compile(config, engine_ids)
    stages = Stages(config)
    loopback = _is_loopback(config.server.host)

    def access(of: Config) -> Access:
        return Access(of.auth, config.server.cors_origins, loopback=loopback, relayed=role == "engine")

    journal = open_journal(config, loop.call_soon_threadsafe)
    link = open_redis(config.router, loop.call_soon_threadsafe)
    sessions = open_sessions(config.router, journal, loop.call_later, link)
    clock.add(sessions)
    store = open_responses(config.router, journal, link, loop.call_later)
    history = History(telemetry, engines, backends, clock.now)
    clock.add(history)
    gateway = server.gateway = Gateway(
        table=table, backends=backends, engines=engines,
        access=access(config), telemetry=telemetry, log=log,
        offload=worker.offload, offload_guest=guests.offload, now=lambda: clock.now, store=store,
        sessions=sessions, later=loop.call_later, stages=stages,
        pages=Pages(
            Exposition(telemetry), ready=lambda: _ready(backends, engines, server), healthy=lambda: _healthy(backends, engines),
            components=lambda: _components(gateway, server, watchdog, reloader), metrics_open=loopback,
            desk=Desk(
                role, gateway=lambda: gateway, ready=lambda: _ready(backends, engines, server), history=history,
                components=lambda: _components(gateway, server, watchdog, reloader), now=lambda: clock.now,
            ),
        ),
    )  # fmt: skip

    if link is not None:
        limits = SharedLimits(link)
        gateway.staging.metering.count_with(limits)
        clock.add(limits)

    def limit() -> Memory:
        from laya.inprocess.commands import command_limit  # most configurations have no command

        return command_limit(config, [engine.plan for engine in engines.values() if engine.plan is not None])

    watchers = Watchers(limit, work_folder(config), clock, log, show_output=loopback)

    def apply(new: Config, compiled: tuple[RouteTable, Stages]) -> None:
        """Backends of unchanged settings stay, with connections, counts and breakers; the others end with their calls."""
        found = make_backends(new, role, backends, clock, loop)
        watchers.check(list(found.values()))
        gone = [backend for name, backend in backends.items() if found.get(name) is not backend]
        backends.clear()
        backends.update(found)
        gateway.adopt(*compiled, access(new))
        watchers.watch(list(backends.values()))
        for backend in gone:
            backend.pool.retire()

    reloader = Reloader(
        config, load=read, compile=lambda new: (RouteTable.compile(new, engine_ids), Stages(new)),
        apply=apply,
        post=loop.call_soon_threadsafe, log=log, show_errors=loopback,
    )  # fmt: skip
    telemetry.gauges.extend((
        lambda: _gauges(server, engines, log), lambda: routing_gauges(gateway),
        lambda: [("laya_config_reload_failed", {}, int(reloader.failed))],
    ))  # fmt: skip
    telemetry.counters.extend((
        lambda: _counters(engines), lambda: routing_counters(gateway),
        lambda: [("laya_config_reloads", {}, reloader.reloads)],
    ))  # fmt: skip
    watchers.check(list(backends.values()))
    await server.listen()
    clock.start()
    watchers.watch(list(backends.values()))
    reloader.start()
    terminal = os.isatty(0)
    loop.add_signal_handler(signal.SIGHUP, lambda: server.stop() if terminal and not os.isatty(0) else reloader.request())
    if not loopback and not config.auth.keys:
        key = "inference.listen_key" if role == "engine" else "auth.keys"
        log.event("warning", "open_to_all", text=f"no {key} off loopback: all who reach this address may use it")
    for name in unreachable(config, role):
        log.event("warning", "unreachable", engine=name, text="it has no listen address, so this router sends nothing to it")
    page = next((f"{address}/ui" for address in server.addresses if not address.startswith("unix:")), None)
    log.event("info", "listening", version=__version__, role=role, addresses=server.addresses, page=page, compiled=COMPILED,
              seconds=round(time.perf_counter() - began, 3))  # fmt: skip
    gc.freeze()  # what start-up made stays for good: the collector need not walk it under traffic
    for engine in engines.values():
        engine.start()
        clock.add(EngineTick(engine))
    if watchdog is not None:
        watchdog.start()
    await server.run()
    reloader.stop()
    if watchdog is not None:
        watchdog.stop()
    for engine in engines.values():
        engine.stop(0.0)  # what it ran for clients has ended with the drain
    ended = [await loop.run_in_executor(None, engine.join, 5.0) for engine in engines.values()]
    await watchers.stop()
    for backend in backends.values():
        backend.pool.close()
    worker.stop()
    guests.stop()
    if journal is not None:
        await loop.run_in_executor(None, journal.stop, 5.0)
    if link is not None:
        await loop.run_in_executor(None, link.stop, 5.0)
    clock.stop()
    if failures:
        if not all(ended):
            _leave(failures[0], log)
        raise failures[0]
    log.event("info", "stopped")
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


def _is_loopback(host: str) -> bool:
    if not host:  # a socket file alone
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# States of an engine in which requests are served, or wait while its model is loaded for them.
_TAKES_REQUESTS = frozenset({"ready", "asleep", "waking", "unloading"})


def _ready(backends: dict[str, Backend], engines: dict, server: Server) -> bool:
    """This role can serve: an engine is ready, or some backend may be picked."""
    if server.draining:
        return False
    states = [engine.status() for engine in engines.values()]
    engine_ready = any(state["state"] in _TAKES_REQUESTS and not state.get("stuck") for state in states)
    return engine_ready or any(b.healthy is not False and b.breaker.state != 2 for b in backends.values())


def _healthy(backends: dict[str, Backend], engines: dict) -> bool:
    """The process lives; a dead engine matters only where nothing else could answer."""
    return bool(backends) or not engines or any(engine.status()["state"] != "failed" for engine in engines.values())


def _components(gateway: Gateway, server: Server, watchdog, reloader: Reloader) -> dict:
    """The JSON of /ready."""
    return {
        **({"watchdog": watchdog.status()} if watchdog is not None else {}),
        "server": {
            "draining": server.draining, "connections": len(server.connections), "buffered_bytes": server.ledger.held,
        },
        "engines": {name: engine.status() for name, engine in gateway.engines.items()},
        **routing_components(gateway),
        "config": reloader.status(),
    }  # fmt: skip


def _gauges(server: Server, engines: dict, log: Log):
    yield "laya_connections", {}, len(server.connections)
    yield "laya_buffered_bytes", {}, server.ledger.held
    yield "laya_log_lines_dropped", {}, log.dropped
    yield "laya_host_memory_bytes", {"kind": "rss"}, resident_bytes()
    for name, engine in engines.items():
        figures = engine.figures()
        yield "laya_sequences_running", {"engine": name}, figures.sequences_running
        yield "laya_sequences_waiting", {"engine": name}, figures.sequences_waiting
        yield "laya_kv_blocks_used", {"engine": name}, figures.kv_blocks_used
        yield "laya_kv_blocks_total", {"engine": name}, figures.kv_blocks_total


def _counters(engines: dict):
    for name, engine in engines.items():
        figures = engine.figures()
        for kind in ("prompt", "cached", "generated"):
            yield "laya_tokens", {"engine": name, "kind": kind}, getattr(figures, f"{kind}_tokens")
        yield "laya_preemptions", {"engine": name}, figures.preemptions


