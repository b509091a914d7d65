"""The front door: each whole request is checked, named, routed and given to the exchange that answers it.

In: `accept` from a client connection. Out: an exchange on the connection, or an answer at once. Loop thread only.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from time import perf_counter
from typing import Any

from laya.errors import InternalError, InvalidRequest, LayaError
from laya.gateway.access import Access
from laya.gateway.api import chat, completions
from laya.gateway.backends import Backend, Candidate
from laya.gateway.exchange import JSON_LINE, Exchange, outcome_of
from laya.gateway.local import LocalExchange
from laya.gateway.models import ModelList
from laya.gateway.pages import Pages
from laya.gateway.plan import HeadPlan
from laya.gateway.proxy import ProxyExchange
from laya.log import Log
from laya.routing.balance import order
from laya.routing.table import Route, RouteTable
from laya.schema.codec import encode_json
from laya.schema.fields import READ_ON_LOOP, RoutingFields, invalid_body, read_routing
from laya.telemetry import Telemetry

# What an in-process engine answers itself; the other APIs need a backend that has them.
LOCAL_APIS: dict[str, Any] = {"chat": chat, "completions": completions}

Offload = Callable[[Callable[[], Any], Callable[[Any], None]], None]


class Gateway:
    """`offload(work, done)` runs `work` in the preparation worker and `done(result or LayaError)` on the loop."""

    def __init__(
        self, *, table: RouteTable, backends: dict[str, Backend], engines: dict[str, Any], access: Access, telemetry: Telemetry,
        log: Log, offload: Offload, now: Callable[[], float], default_model: str | None, pages: Pages,
    ) -> None:  # fmt: skip
        self.table = table
        self.backends = backends
        self.engines = engines
        self.access = access
        self.telemetry = telemetry
        self.log = log
        self.offload = offload
        self.now = now
        self.default_model = default_model
        self.models = ModelList(table, engines)
        self.pages = pages
        self._turn = itertools.count()
        self._run = b"req-" + os.urandom(6).hex().encode()
        self._count = itertools.count(1)

    # -- the connection's calls -----------------------------------------------------------------------------------------------

    def precheck(self, connection, request) -> LayaError | None:
        """What can be said before the body is read: place, path, method, key."""
        return self._plan(request).error

    def accept(self, connection, request, body: bytes) -> None:
        """Answer the request, now or later. Nothing a client sends ends in an exception here."""
        plan = request.memo.plan
        if plan is None or plan.owner is not self:
            plan = self._plan(request)
        if plan.error is not None:
            self._refuse(connection, request, body, plan, plan.error)
            return
        try:
            if plan.api is None:
                exchange = connection.exchange = Exchange(self, connection, request, body, plan)
                self._page(exchange)
            elif plan.coded or len(body) > READ_ON_LOOP:
                self._read_in_worker(connection, request, body, plan)
            else:
                self._route(connection, request, body, plan, read_routing(body))
        except LayaError as refused:
            self._refuse(connection, request, body, plan, refused)
        except Exception as fault:  # the last line of defence: the client gets a clean 500, the log gets the fault
            self.log.event("error", "fault", where=_origin(fault), kind=type(fault).__name__)
            self._refuse(connection, request, body, plan, InternalError("The server made a mistake; it is in its log."))

    def count_refusal(self, error: LayaError) -> None:
        """An answer given by the connection itself: bytes that were never a request."""
        self.telemetry.count("", "", "", outcome_of(error))

    def new_request_id(self) -> bytes:
        return b"%b%08x" % (self._run, next(self._count))

    def _plan(self, request) -> HeadPlan:
        plan = request.memo.plan = HeadPlan(self, request, self.access, self.pages)
        return plan

    def _refuse(self, connection, request, body: bytes, plan: HeadPlan, error: LayaError) -> None:
        exchange = connection.exchange
        if exchange is None:
            exchange = connection.exchange = Exchange(self, connection, request, body, plan)
        exchange.fail(error)

    # -- finding the way ------------------------------------------------------------------------------------------------------

    def _read_in_worker(self, connection, request, body: bytes, plan: HeadPlan) -> None:
        waiting = connection.exchange = Exchange(self, connection, request, body, plan)

        def done(result) -> None:
            if connection.exchange is not waiting:
                return  # the client left meanwhile
            if isinstance(result, LayaError):
                waiting.fail(result)
                return
            plain, fields = result
            connection.exchange = None
            try:
                self._route(connection, request, plain, plan, fields)
            except LayaError as refused:
                self._refuse(connection, request, plain, plan, refused)

        encoding = request.fields.get(b"content-encoding", b"")
        limit = connection.server.limits.max_body_bytes
        self.offload(lambda: _unpack_and_read(body, encoding, limit), done)

    def _route(self, connection, request, body: bytes, plan: HeadPlan, fields: RoutingFields) -> None:
        name = fields.model
        if name is None:
            name = self.default_model
            if name is None:
                raise InvalidRequest("`model` is required: there is no default model here.", param="model")
        route = self.table.match(name)
        if route is None:
            raise self.models.not_found(name)
        key = plan.key
        if key is not None and key.routes is not None and route.name not in key.routes:
            raise self.models.not_found(name)
        candidates = route.state
        if candidates is None:
            candidates = route.state = self._candidates(route)
        exchange: Any
        if not candidates:
            exchange = LocalExchange(self, connection, request, body, plan, route, route.targets[0].backend)
            exchange.model = name
            connection.exchange = exchange
            self._start_local(exchange, connection)
            return
        if len(candidates) > 1:
            candidates = order(route.policy, candidates, next(self._turn), self.now())
        exchange = ProxyExchange(self, connection, request, body, plan, fields, route, candidates)
        exchange.model = name
        connection.exchange = exchange
        exchange.start()

    def _candidates(self, route: Route) -> list[Candidate]:
        """The route's backends; none when an engine of this process serves it."""
        if any(target.backend in self.engines for target in route.targets):
            return []
        return [
            Candidate(route.name, self.backends[t.backend], t.model, t.weight)
            for t in route.targets
            if t.backend in self.backends
        ]

    def _start_local(self, exchange: LocalExchange, connection) -> None:
        module = LOCAL_APIS.get(exchange.plan.api)
        if module is None:
            raise InvalidRequest(f"The model {exchange.model!r} does not offer this API.", param="model")
        key = exchange.plan.key
        client = key.name if key is not None else connection.peer
        request_id = exchange.request_id.decode("latin-1")

        def read() -> tuple:
            try:
                request = module.decode(exchange.body)
            except (ValueError, RecursionError) as exc:  # msgspec's errors and UnicodeDecodeError are ValueErrors
                raise invalid_body(exc) from None
            return module.generations_of(request, request_id, client), request

        def done(result) -> None:
            if connection.exchange is not exchange:
                return  # the client left meanwhile
            if isinstance(result, LayaError):
                exchange.fail(result)
                return
            generations, request = result
            exchange.begin(generations, module.writer_of(request, exchange.model, len(generations)))

        if len(exchange.body) > READ_ON_LOOP // 4:  # building every member costs several times what skipping them does
            self.offload(read, done)
        else:
            done(read())

    # -- pages ------------------------------------------------------------------------------------------------------------------

    def _page(self, exchange: Exchange) -> None:
        request, path = exchange.request, exchange.plan.path
        if request.method == b"OPTIONS":
            exchange.answer(204, self._preflight_lines(request), b"", "ok")
        elif path == b"/v1/models":
            exchange.answer(200, JSON_LINE, encode_json(self.models.all()), "ok")
        elif path.startswith(b"/v1/models/"):
            exchange.answer(200, JSON_LINE, encode_json(self.models.one(path[len(b"/v1/models/") :])), "ok")
        else:
            status, content_type, body = self.pages.render(path)
            exchange.answer(status, b"content-type: " + content_type + b"\r\n", body, "ok")

    def _preflight_lines(self, request) -> bytes:
        lines = b"allow: GET, HEAD, POST, OPTIONS\r\n"
        if self.access.cors_headers(request.fields.get(b"origin")):
            asked = request.fields.get(b"access-control-request-headers", b"*")
            lines += (
                b"access-control-allow-methods: GET, POST, OPTIONS\r\naccess-control-max-age: 600\r\n"
                b"access-control-allow-headers: %b\r\n" % asked
            )
        return lines

    # -- what exchanges report ----------------------------------------------------------------------------------------------------

    def finished(self, exchange: Exchange, outcome: str) -> None:
        """Once for each exchange: metrics and log."""
        plan = exchange.plan
        self.telemetry.count(exchange.route, exchange.backend, plan.api or "page", outcome)
        if self.log.info_on:
            request, key = exchange.request, plan.key
            self.log.access((
                exchange.request_id, key.name if key is not None else exchange.connection.peer, request.method, plan.path[:256],
                plan.api or "page", exchange.route, exchange.backend, exchange.model[:128], exchange.status, outcome,
                perf_counter() - exchange.began, exchange.tokens,
            ))  # fmt: skip


def _unpack_and_read(body: bytes, encoding: bytes, limit: int) -> tuple[bytes, RoutingFields]:
    from laya.gateway.unpack import unpack

    plain = unpack(body, encoding, limit)
    return plain, read_routing(plain)


def _origin(fault: Exception) -> str:
    """Where an unexpected exception came from: file and line, never its text (which may hold what the client sent)."""
    trace = fault.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}" if trace else ""


