"""The front door: each whole request is checked, named, routed and given to the exchange that answers it.

In: `accept` from a client connection. Out: an exchange on the connection, or an answer at once. Loop thread only.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

from laya.config import Config
from laya.errors import InternalError, LayaError, Unavailable
from laya.gateway.access import Access
from laya.gateway.backends import Backend
from laya.gateway.decision import DecisionExchange
from laya.gateway.dispatch import RetryBudget
from laya.gateway.exchange import DONE, JSON_LINE, Exchange, outcome_of
from laya.gateway.forms import read_form
from laya.gateway.local import LocalExchange
from laya.gateway.models import ModelList
from laya.gateway.offers import PICKED, offering
from laya.gateway.pages import Pages
from laya.gateway.plan import HeadPlan
from laya.gateway.proxy import ProxyExchange
from laya.gateway.selection import Selection
from laya.gateway.staging import Stages, Staging
from laya.gateway.steering import Steering, Way
from laya.gateway.store import ResponseStore
from laya.gateway.stored_responses import PREFIX as STORED_PREFIX
from laya.gateway.stored_responses import answer_stored
from laya.gateway.tokens import TokenExchange
from laya.gateway.translated_local import TranslatedLocal
from laya.gateway.translated_proxy import TranslatedProxy
from laya.log import Log, access_line, who
from laya.routing.sessions.store import Later, MemorySessions, SessionStore
from laya.routing.table import RouteTable
from laya.schema.codec import encode_json
from laya.schema.fields import READ_ON_LOOP, RoutingFields, read_routing
from laya.telemetry import Telemetry

# Exchanges of APIs that are translated; all others have the plain kinds.
LOCAL_KINDS: dict[str | None, Any] = {
    "responses": TranslatedLocal, "messages": TranslatedLocal, "systemone": DecisionExchange, "tokenize": TokenExchange,
}  # fmt: skip
PROXY_KINDS: dict[str | None, Any] = {"responses": TranslatedProxy, "messages": TranslatedProxy}
# What goes along when a request moves on to a target of another kind.
CARRIED = ("model", "began", "request_id", "attempts", "session", "note")
# Finished requests that /ui may show: what one scrolls through, some 100 KiB.
RECENT = 200
# Not logged: balancers, and routers that start an engine, ask many times a minute. Metrics count them; changes are logged.
PROBES = frozenset({b"/health", b"/ready"})
Offload = Callable[[Callable[[], Any], Callable[[Any], None]], None]
OffloadGuest = Callable[[Callable[[], Any], Callable[[Any], None], float, Callable[[], LayaError]], None]


class GatewayState:
    """What each request asks for, in slots for the lane."""

    __slots__ = ("table", "staging", "selection", "log", "watchers", "recent", "run", "count")


class Gateway(GatewayState):
    """`offload(work, done)` runs `work` in the preparation worker and `done(result or LayaError)` on the loop; so does
    `offload_guest(work, done, limit_s, late)` in a worker for what may hang, with `done(late())` after so long;
    `later(seconds, call)` runs `call` on the loop after a while, and its result can be cancelled."""

    def __init__(
        self, *, table: RouteTable, backends: dict[str, Backend], engines: dict[str, Any], access: Access, telemetry: Telemetry,
        log: Log, offload: Offload, offload_guest: OffloadGuest, now: Callable[[], float], pages: Pages,
        store: ResponseStore | None = None, sessions: SessionStore | None = None, later: Later | None = None,
        stages: Stages | None = None,
    ) -> None:  # fmt: skip
        self.table = table
        self.backends = backends
        self.engines = engines
        self.access = access
        self.telemetry = telemetry
        self.log = log
        self.offload = offload
        self.offload_guest = offload_guest
        self.now = now
        self.models = ModelList(table, engines, backends)
        self.selection = Selection(table, backends, engines, self.models, now)
        self.sessions = sessions or MemorySessions(1)
        self.steering = Steering(self, self.sessions)
        self.staging = Staging(self, stages or Stages(Config()))
        self.budget = RetryBudget()
        self.later = later
        self.pages = pages
        self.store = store  # conversations of /v1/responses
        self.recent: deque[bytes] = deque(maxlen=RECENT)  # their lines in the log
        self.watchers = 0  # of /ui
        self.run = b"req-" + os.urandom(6).hex().encode()
        self.count = itertools.count(1)

    def adopt(self, table: RouteTable, stages: Stages, access: Access) -> None:
        """Serve by these rules and keys from the next request on; `backends` was changed in place. Requests under way keep
        what they have."""
        turn = self.selection.turn
        self.table, self.access = table, access
        self.staging.adopt(stages)
        self.models = ModelList(table, self.engines, self.backends)
        self.selection = Selection(table, self.backends, self.engines, self.models, self.now)
        self.selection.turn = turn

    # -- the connection's calls ----------------------------------------------------------------------------------------

    def precheck(self, connection, request) -> LayaError | None:
        """What can be said before the body is read: place, path, method, key."""
        return self._plan(request).error

    def accept(self, connection, request, body: bytes) -> None:
        """Answer the request, now or later. Nothing a client sends ends in an exception here."""
        plan = request.memo.plan
        if plan is None or plan.owner is not self.table:
            plan = self._plan(request)
        if plan.error is not None:
            self._refuse(connection, request, body, plan, plan.error)
            return
        try:
            if plan.key is not None and plan.api is not None:
                connection = self.staging.admit(connection, request, body, plan)
            if plan.api is None:
                exchange = connection.exchange = Exchange(self, connection, request, body, plan)
                self._page(exchange)
            elif self.staging.caching is not None and self.staging.caching.answers(connection, request, body, plan):
                return
            elif plan.coded or plan.boundary is not None or len(body) > READ_ON_LOOP:
                self._read_in_worker(connection, request, body, plan)
            else:
                self.route(connection, request, body, plan, read_routing(body))
        except LayaError as refused:
            self._refuse(connection, request, body, plan, refused)
        except Exception as fault:
            self._failed(connection, request, body, plan, fault)

    def guard(self, connection, request, body: bytes, plan: HeadPlan, step: Callable, *arguments: Any) -> None:
        """Take a later step for a request, with the same last line of defence as `accept`."""
        try:
            step(*arguments)
        except LayaError as refused:
            self._refuse(connection, request, body, plan, refused)
        except Exception as fault:
            self._failed(connection, request, body, plan, fault)

    def _failed(self, connection, request, body: bytes, plan: HeadPlan, fault: Exception) -> None:
        if connection.exchange is not None:
            connection.exchange.on_fault(fault)
        else:
            self._refuse(connection, request, body, plan, self.fault(fault))

    def fault(self, fault: Exception) -> InternalError:
        """The last line of defence: the client gets a clean 500, the log gets the fault."""
        self.log.event("error", "fault", where=_origin(fault), kind=type(fault).__name__)
        return InternalError("The server made a mistake; it is in its log.")

    def count_refusal(self, error: LayaError) -> None:
        """An answer given by the connection itself: bytes that were never a request."""
        self.telemetry.count(("", "", "", outcome_of(error)))

    def new_request_id(self) -> bytes:
        return b"%b%08x" % (self.run, next(self.count))

    def _plan(self, request) -> HeadPlan:
        plan = request.memo.plan = HeadPlan(self.table, request, self.access, self.pages)
        return plan

    def _refuse(self, connection, request, body: bytes, plan: HeadPlan, error: LayaError) -> None:
        exchange = connection.exchange
        if exchange is None:
            exchange = connection.exchange = Exchange(self, connection, request, body, plan)
        exchange.end_with(error)

    # -- finding the way -----------------------------------------------------------------------------------------------

    def _read_in_worker(self, connection, request, body: bytes, plan: HeadPlan) -> None:
        encoding = request.fields.get(b"content-encoding", b"")
        limit = connection.server.limits.max_body_bytes

        def then(read: tuple[bytes, RoutingFields]) -> None:
            plain, fields = read
            if len(plain) > len(body) and not connection.hold(len(plain) - len(body)):
                raise Unavailable("too much data is held in memory just now")
            self.route(connection, request, plain, plan, fields)

        self.park(connection, request, body, plan, lambda: _unpack_and_read(body, encoding, limit, plan.boundary), then)

    def park(
        self, connection, request, body: bytes, plan: HeadPlan, work: Callable[[], Any], then: Callable[[Any], None],
        offload: Offload | None = None,
    ) -> None:  # fmt: skip
        """`then(work())`, where the work is done in the worker and the request keeps its place meanwhile. Nothing more happens
        for a client that has left; what either raises is the request's answer."""
        waiting = connection.exchange = Exchange(self, connection, request, body, plan)

        def done(result: Any) -> None:
            if connection.exchange is not waiting:
                return  # the client left
            if isinstance(result, LayaError):
                waiting.fail(result)
            else:
                self.guard(connection, request, body, plan, then, result)

        (offload or self.offload)(work, done)

    def route(self, connection, request, body: bytes, plan: HeadPlan, fields: RoutingFields) -> None:
        """Find the request's way by its model name. Raises LayaError."""
        selection = self.selection
        name, route = selection.route_of(fields.model, plan)
        if (route.staged or connection.staged) and not connection.ready_for(route):
            connection = self.staging.prepare(connection, request, body, plan, fields, route)
            if connection is None:
                return
        candidates = selection.choose(route) if plan.target is None else None
        if candidates is None:
            self.steering.steer(Way(connection, request, body, plan, fields, name, route))
        else:
            self.dispatch(connection, request, body, plan, fields, name, route, candidates)

    def dispatch(
        self, connection, request, body: bytes, plan: HeadPlan, fields: RoutingFields, name: str, route, candidates: list,
        way: Way | None = None,
    ) -> None:  # fmt: skip
        """Give the request to the first candidate; `way` is what steering adds."""
        if plan.api in PICKED:
            candidates = offering(self, plan.api, name, candidates)
        if connection.staged and candidates[0].engine is None:
            self.staging.check_prompt(connection, plan.key)
        if route.cache and self.staging.caching is not None:
            way_on = self.staging.caching.enter(connection, request, body, plan, fields, name, route, candidates, way)
            if way_on is None:
                return
            connection, body, fields = way_on
        best = candidates[0]
        exchange: Any
        if best.engine is not None:
            exchange = LOCAL_KINDS.get(plan.api, LocalExchange)(self, connection, request, body, plan, route, best)
            exchange.fields, exchange.targets = fields, candidates
        else:
            kind = PROXY_KINDS.get(plan.api, ProxyExchange)
            exchange = kind(self, connection, request, body, plan, fields, route, candidates)
        exchange.model = name
        if way is not None:
            way.tell(exchange)
        connection.exchange = exchange
        exchange.start()

    def hand_over(self, old, target) -> None:
        """The request goes on at a target of another kind: another exchange takes the place of `old`."""
        connection = old.connection
        targets = [target, *(other for other in old.targets if other is not target)]
        old.leave()
        exchange: Any
        if target.engine is not None:
            kind = LOCAL_KINDS.get(old.plan.api, LocalExchange)
            exchange = kind(self, connection, old.request, old.body, old.plan, old.rule, target)
            exchange.fields, exchange.targets = old.fields, targets
        else:
            kind = PROXY_KINDS.get(old.plan.api, ProxyExchange)
            exchange = kind(self, connection, old.request, old.body, old.plan, old.fields, old.rule, targets)
        for name in CARRIED:
            setattr(exchange, name, getattr(old, name))
        connection.exchange = exchange
        self.guard(connection, old.request, old.body, old.plan, exchange.start)

    def guarded(self, way: Way, step: Callable, *arguments: Any) -> None:
        """A step of steering that was waited for, with the same last line of defence as `accept`."""
        self.guard(way.connection, way.request, way.body, way.plan, step, way, *arguments)

    def may_retry(self) -> bool:
        """The retry budget allows one more."""
        return self.budget.take(self.selection.turn, self.now())

    # -- pages ---------------------------------------------------------------------------------------------------------

    def _page(self, exchange: Exchange) -> None:
        request, path = exchange.request, exchange.plan.path
        if request.method == b"OPTIONS":
            exchange.answer(204, self._preflight_lines(request), b"", "ok")
        elif path == b"/v1/models":
            exchange.answer(200, JSON_LINE, encode_json(self.models.all()), "ok")
        elif path.startswith(b"/v1/models/"):
            exchange.answer(200, JSON_LINE, encode_json(self.models.one(path[len(b"/v1/models/") :])), "ok")
        elif path.startswith(STORED_PREFIX):
            answer_stored(exchange)
        elif path == b"/metrics":
            self._metrics(exchange)
        elif self.pages.for_people(path):
            self.pages.desk.answer(exchange)
        else:
            status, content_type, body = self.pages.render(path)
            exchange.answer(status, b"content-type: " + content_type + b"\r\n", body, "ok")

    def _metrics(self, exchange: Exchange) -> None:
        exposition = self.pages.exposition
        snapshot = exposition.snapshot()

        def done(text) -> None:
            if exchange.state is DONE:
                return  # the scraper left
            if isinstance(text, LayaError):
                exchange.fail(text)
            else:
                exchange.answer(200, b"content-type: " + exposition.content_type + b"\r\n", text, "ok")

        self.offload(lambda: exposition.render(snapshot), done)

    def _preflight_lines(self, request) -> bytes:
        lines = b"allow: GET, HEAD, POST, OPTIONS\r\n"
        if self.access.cors_headers(request.fields.get(b"origin")):
            asked = request.fields.get(b"access-control-request-headers", b"*")
            lines += (
                b"access-control-allow-methods: GET, POST, OPTIONS\r\naccess-control-max-age: 600\r\n"
                b"access-control-allow-headers: %b\r\n" % asked
            )
        return lines

    # -- what exchanges report -----------------------------------------------------------------------------------------

    def finished(self, exchange: Exchange, outcome: str) -> None:
        """Once for each exchange: metrics and log."""
        plan = exchange.plan
        self.telemetry.count((exchange.route, exchange.backend, plan.api or "page", outcome))
        if self.log.info_on or self.watchers:
            connection = exchange.connection
            line = access_line(
                exchange.request_id, who(*exchange.named()), exchange.status, outcome, perf_counter() - exchange.began,
                exchange.tokens, connection.log_note() if connection.staged else b"",
            )  # fmt: skip
            if plan.api is not None:
                self.recent.append(line)
            if self.log.info_on and (plan.api is not None or plan.path not in PROBES):
                self.log.line(line)


def _unpack_and_read(body: bytes, encoding: bytes, limit: int, boundary: bytes | None) -> tuple[bytes, RoutingFields]:
    from laya.gateway.unpack import unpack

    plain = unpack(body, encoding, limit)
    return plain, read_routing(plain) if boundary is None else read_form(plain, boundary)


def _origin(fault: Exception) -> str:
    """Where an unexpected exception came from: file and line, never its text (which may hold what the client sent)."""
    trace = fault.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}" if trace else ""


