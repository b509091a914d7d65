"""The fast lane: the common request and its common answer, each taken in one step.

In: bytes that just came on a client's connection (`ask`) or on a backend's (`reply`). Out: True when the step was taken whole;
False: nothing was touched, go the long way. Loop thread only. Where there was a C compiler at installation native/lane.c takes
the same steps, and passes on a stream's frame that is one chunk in a segment of its own; this is its reference, and what runs
without.

What a step leaves behind is what the long way leaves behind: a `ProxyExchange` and a `Call` in the same states, the same
bytes, metrics and log line. So a retry, a time-out, a client that leaves, an answer in pieces find what they always find, and a
step may be left to the long way for any reason. The gain is in what is not called: some ninety calls a request otherwise.

| in the lane | on the long way |
|---|---|
| one whole request in one read, its head seen before | whatever must be waited for, or read by h11 |
| chat and completions for a backend, in their own form | translated APIs, engines, pages |
| no key, nothing asked for by header (`x-laya-*`, an origin) | limits, overrides, timings, CORS |
| an id of ours | a client's own id, in a head that is seen once |
| a route that its model name alone decides, without stages | sessions, prefixes, rules of `classify`, redaction, cache |
| the name goes on as it came | a target with a model name of its own, an engine process |
| a backend whose breaker is closed | half-open breakers, on-demand backends |
| status 200 in one read, its head seen before, not a stream | errors, retries, streams, large answers |
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from laya.errors import InvalidRequest
from laya.gateway.exchange import DONE, STREAMING, WAITING
from laya.gateway.front import Gateway
from laya.gateway.plan import HeadPlan
from laya.gateway.proxy import ProxyExchange
from laya.gateway.staging import Staging
from laya.gateway.vigil import is_stream
from laya.log import BATCH, Log, access_line, who
from laya.net.clock import NEVER, Clock
from laya.net.flow import JOIN_BELOW, LARGE_READ, Ledger
from laya.net.in_c import native_lane
from laya.net.pool import IDLE_S, QUEUE_S, Pool
from laya.net.upstream import Call, UpstreamConnection
from laya.routing.balance import Breaker
from laya.schema.fields import READ_ON_LOOP, RoutingFields, read_routing
from laya.telemetry import Histogram, Telemetry
from laya.wire import parser
from laya.wire.chunked import ChunkedBody
from laya.wire.inbound import Inbound
from laya.wire.messages import Limits, Memo, Request, Response
from laya.wire.outbound import Outbound
from laya.wire.recall import whole
from laya.wire.reply import http_date
from laya.wire.sse import WATCH_TAIL, StreamWatch

APIS = frozenset({"chat", "completions"})
# Model names with a lane, of one head. Emptied when full: a flood of names costs the long way, not memory. With one target a
# route a lane takes 1.2 KiB, or 4 KiB where many clients came by it, and `recall` keeps 512 heads: 20 MiB at most, or 64 MiB.
MOST_LANES = 32
# Clients' addresses whose part of a log line is kept, of one lane and target.
MOST_CLIENTS = 16

# Told of each step that the C takes or leaves for a `Stream`: ("ask" or "reply", whether it was taken, the connection).
watcher: Callable[[str, bool, Any], None] | None = None


class ServerState:
    """What each request asks of the server, in slots."""

    __slots__ = ("settings", "ledger", "limits", "draining")


class LaneExchange(ProxyExchange):
    """What the lane sets for each request lies in slots, where C reaches it; the defaults of the rest stand on the class."""

    __slots__ = (
        "gateway", "connection", "request", "body", "plan", "request_id", "began", "fields", "rule", "route", "targets",
        "model", "target", "backend", "leg", "state", "call", "sent_at", "first_at", "status",
    )  # fmt: skip


new_exchange = LaneExchange.__new__


class Leg:
    """One target, as requests of one head go there."""

    __slots__ = (
        "candidate", "name", "pool", "breaker", "patience", "head", "lines", "counted", "who", "clock", "limits", "routing",
        "waiting", "requests",
    )  # fmt: skip

    def __init__(self, candidate: Any, head: bytes, route: str, api: str, telemetry: Telemetry) -> None:
        backend = candidate.backend_state
        self.candidate = candidate
        self.name = backend.name
        self.pool = backend.pool
        self.breaker = backend.breaker
        self.patience = float(backend.settings.first_byte_timeout_s)
        self.head = head  # shared by all lanes of a head; the id's line comes behind it, as behind the next
        self.lines = candidate.lines
        self.counted = (route, backend.name, api, "ok")
        self.who: dict[str, bytes] = {}  # by the client's address
        self.clock = backend.pool.clock
        self.limits = backend.pool.limits
        self.routing, self.waiting, self.requests = telemetry.route, telemetry.upstream, telemetry.requests


class Lane:
    """Requests of one head with one model name. `only`: the route has one target; else the balancer picks among `legs`."""

    __slots__ = ("route", "name", "candidates", "legs", "only")

    def __init__(self, route: Any, candidates: list[Any], legs: dict[Any, Leg]) -> None:
        self.route = route
        self.name = route.name
        self.candidates = candidates
        self.legs = legs
        self.only = legs[candidates[0]] if len(candidates) == 1 else None


def lane_of(gateway: Any, request: Any, plan: Any, name: str) -> Lane | None:
    """The lane of this head and name; None: they go the long way, for now or for good."""
    if plan.error is not None or plan.api not in APIS or plan.key is not None or not request.keep_alive:
        return None
    if plan.asks or plan.target is not None or plan.session or plan.client or plan.cap or plan.request_id is not None:
        return None
    if plan.coded or plan.boundary is not None:
        return None
    route = gateway.table.match(name)
    if route is None or route.staged or route.state is None or route.state.steered:
        return None
    candidates = route.state.own.candidates
    heads = plan.upstream_heads  # of targets that the long way was gone to
    if not candidates or not all(candidate in heads and _is_plain(candidate) for candidate in candidates):
        return None
    legs = {candidate: Leg(candidate, heads[candidate], route.name, plan.api, gateway.telemetry) for candidate in candidates}
    if len(plan.lanes) >= MOST_LANES:
        plan.lanes.clear()
    lane = plan.lanes[name] = Lane(route, candidates, legs)
    return lane


def _is_plain(candidate: Any) -> bool:
    if candidate.engine is not None or candidate.model is not None or candidate.note:
        return False
    backend = candidate.backend_state
    return not backend.link and not backend.pool.waits


def ask_in_python(connection: Any, data: bytes) -> bool:
    """A client's request, written to a backend. `connection` (a ClientConnection) is open, idle, and not paused."""
    inbound = connection.inbound
    if inbound.buffer or inbound.phase != parser.HEAD or not inbound.fast or len(data) > READ_ON_LOOP:
        return False
    server = connection.server
    limits = server.limits
    found = whole(data, limits.request_heads, limits.max_head_bytes, limits.max_body_bytes)
    if found is None:
        return False
    request, body, _ = found
    plan = request.memo.plan
    gateway = connection.gateway
    if plan is None or plan.owner is not gateway.table or not body:
        return False
    caching = gateway.staging.caching
    if caching is not None and caching.knows(plan, body):  # its answer is here: no lane leads to it, but its head was read
        inbound.phase = parser.DONE
        connection._begin(request, body)
        return True
    try:
        fields = read_routing(body)
    except InvalidRequest:
        return False
    name = fields.model
    if name is None:
        return False
    lane = plan.lanes.get(name) or lane_of(gateway, request, plan, name)
    if lane is None:
        return False
    began = perf_counter()
    leg, candidates = lane.only, lane.candidates
    if leg is None:
        candidates = gateway.selection.choose(lane.route)
        leg = lane.legs[candidates[0]]
    pool, ledger, length = leg.pool, server.ledger, len(body)
    upstream = pool.idle[-1] if pool.idle else None
    dead = upstream is not None and (upstream.gone or upstream.transport.is_closing())
    if dead or leg.breaker.open_until or ledger.held + length > ledger.limit:
        if lane.only is None:
            gateway.selection.turn -= 1  # the long way chooses, and counts it
        return False

    ledger.held += length
    connection.held = length
    connection.in_head = False
    connection.keep_alive = True
    connection.head_only = False
    connection.chunked = True
    connection.deadline = NEVER
    inbound.phase = parser.DONE
    connection.exchange = exchange = new_exchange(LaneExchange)
    exchange.gateway = gateway
    exchange.connection = connection
    exchange.request = request
    exchange.body = body
    exchange.plan = plan
    exchange.request_id = request_id = gateway.new_request_id()
    exchange.began = began
    exchange.fields = fields
    exchange.rule = lane.route
    exchange.route = lane.name
    exchange.targets = candidates
    exchange.model = name
    exchange.target = leg.candidate
    exchange.backend = leg.name
    exchange.leg = leg
    exchange.state = WAITING
    exchange.first_at = 0.0
    exchange.status = 0

    head = b"%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (leg.head, request_id, length)
    exchange.call = call = Call(pool, exchange, request.method, head, body)
    call.in_one_step = reply_in_python
    pool.inflight += 1
    exchange.sent_at = sent_at = perf_counter()
    if upstream is None:
        pool.line_up(call)
    else:
        pool.idle.pop()
        upstream.send(call)
    gateway.telemetry.route.observe(sent_at - began)
    return True


def reply_in_python(upstream: Any, call: Any, data: bytes) -> bool:
    """A backend's answer to `call`, which `ask_in_python` made, written to the client. `upstream` is its UpstreamConnection."""
    exchange, outbound = call.listener, upstream.outbound
    if type(exchange) is not LaneExchange or exchange.state is not WAITING:
        return False
    leg = exchange.leg
    if leg.breaker.failures:
        return False
    if outbound.buffer or outbound.phase != parser.HEAD or not outbound.fast or upstream.paused:
        return False
    limits = leg.pool.limits
    found = whole(data, limits.response_heads, limits.max_head_bytes, limits.max_body_bytes)
    if found is None:
        return False
    response, body, digits = found
    memo, length = response.memo, len(body)
    if response.status != 200 or not response.keep_alive or digits is None or length >= JOIN_BELOW or memo.lines is None:
        return False
    if memo.is_stream is None:
        memo.is_stream = is_stream(response)
    transport, connection, gateway = upstream.transport, exchange.connection, exchange.gateway
    server, inbound = connection.server, connection.inbound
    if memo.is_stream or transport.get_write_buffer_size() or transport.is_closing() or server.draining or inbound.buffer:
        return False

    now = perf_counter()
    outbound.keep_alive = True
    outbound.phase = parser.DONE
    call.done = True
    upstream.call = None
    upstream.reused = True
    leg.pool.give_back(upstream)
    request_id = exchange.request_id
    connection.transport.write(
        b"HTTP/1.1 200 OK\r\ndate: %b\r\ncontent-length: %d\r\n%b%bx-request-id: %b\r\n\r\n%b"
        % (http_date(), length, memo.lines, leg.lines, request_id, body)
    )
    exchange.first_at = now
    exchange.status = 200
    exchange.call = None
    exchange.state = DONE
    telemetry = gateway.telemetry
    telemetry.upstream.observe(now - exchange.sent_at)
    telemetry.count(leg.counted)
    log = gateway.log
    if log.info_on or gateway.watchers:
        whose = leg.who.get(connection.peer) or named(leg, exchange)
        line = access_line(request_id, whose, 200, "ok", now - exchange.began, None, b"")
        gateway.recent.append(line)
        if log.info_on:
            log.line(line)
    connection.exchange = None
    inbound.phase = parser.HEAD
    inbound.fast = inbound.tries_fast
    server.ledger.held -= connection.held
    connection.held = 0
    connection.deadline = server.clock.now + server.settings.keepalive_timeout_s
    return True


def named(leg: Leg, exchange: LaneExchange) -> bytes:
    """The members of the log line that are the same for all requests of this client here."""
    if len(leg.who) >= MOST_CLIENTS:
        leg.who.clear()
    made = leg.who[exchange.connection.peer] = who(*exchange.named())
    return made


def prepared(connection: type) -> Callable[[Any, bytes], bool]:
    """`ask` for the connections of this class: in C where that was built."""
    if native_lane is None:
        return ask_in_python
    classes = (
        Inbound, Outbound, Limits, Request, Response, Memo, HeadPlan, RoutingFields, Ledger, Breaker, Lane, Leg,
        UpstreamConnection, Call, Histogram, LaneExchange, ChunkedBody, StreamWatch, Clock, Pool, ServerState, Gateway,
        Staging, Log,
    )  # fmt: skip
    native_lane.prepare({
        **{known.__name__: known for known in classes}, "ClientConnection": connection,
        "lane_of": lane_of, "named": named, "is_stream": is_stream, "WAITING": WAITING, "DONE": DONE, "NEVER": NEVER,
        "READ_ON_LOOP": READ_ON_LOOP, "JOIN_BELOW": JOIN_BELOW, "IDLE_S": IDLE_S, "QUEUE_S": QUEUE_S, "PHASE_HEAD": parser.HEAD,
        "PHASE_BODY": parser.BODY, "PHASE_DONE": parser.DONE, "STREAMING": STREAMING, "WATCH_TAIL": WATCH_TAIL,
        "LARGE_READ": LARGE_READ, "watcher": watcher, "BATCH": BATCH,
    })  # fmt: skip
    return native_lane.ask
