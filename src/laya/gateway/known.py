"""Requests whose very bytes were answered from the cache before: where they go and what they ask is known.

In: what the front has of a request before it reads the body. Out: the kept answer on the client's connection; or False, and
nothing was touched: the request goes the long way. Loop thread only.

A request is known by its head's plan and its body, byte by byte. The plan stands for everything else that decides: the rules
and keys of one configuration, the path with its query, the key, `Cache-Control`. What changes between two requests is asked
anew each time: the key's limits before this, the answer's age here. Remembered are only bodies that reach the cache as they
came, of routes with one target: what redaction or a stage of the user's own makes of a body is not looked at again.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

from laya.gateway.exchange import JSON_LINE, header_value
from laya.log import access_line, who
from laya.stages.cache import Kept
from laya.stages.cache_key import Question

# Bodies that are remembered, in bytes with what an entry costs besides. All are forgotten when it is too much: a flood of
# questions costs the long way, not memory.
MOST_BYTES = 1024 * 1024
ENTRY_BYTES = 700
# Of one body: looking it up takes 0.6 ns a byte.
LONGEST = 32 * 1024
# Heads under which bodies are remembered: half of those that the parser keeps, since each holds its plan.
MOST_PLANS = 256
# Clients' addresses whose part of the log line is kept for one question.
MOST_CLIENTS = 16
HIT_LINE = b"x-laya-cache: hit\r\n"
HIT_NOTE = b',"cache":"hit"'


class Known:
    """What a request asks and where it would go: the names of its model, route and target."""

    __slots__ = ("question", "model", "route", "target", "_plan", "_method", "_lines", "_counted", "_who")

    def __init__(self, question: Question, model: str, route: str, target: str, plan, method: bytes) -> None:
        self.question = question
        self.model = model
        self.route = route
        self.target = target
        self._plan = plan
        self._method = method
        self._lines = b""
        self._counted = (route, target, plan.api, "ok")
        self._who: dict[str, bytes] = {}

    def answer(self, gateway, connection, kept: Kept) -> None:
        """The answer to a request of no key, in one step: it leaves behind what a `CachedExchange` does."""
        began, plan = perf_counter(), self._plan
        request_id = plan.request_id or gateway.new_request_id()
        connection.send(200, (self._lines or self._made_lines()) % request_id, kept.body)
        try:
            gateway.telemetry.count(self._counted)
            log = gateway.log
            if log.info_on or gateway.watchers:
                named = self._who.get(connection.peer) or self._named(connection.peer)
                line = access_line(request_id, named, 200, "ok", perf_counter() - began, None, HIT_NOTE)
                gateway.recent.append(line)
                if log.info_on:
                    log.line(line)
        except Exception as fault:  # the answer was given: no second one
            gateway.fault(fault)
        connection.done()

    def _made_lines(self) -> bytes:
        """As `Exchange.own_lines` and `Staged.send` have them, around the request's id."""
        made = self._lines = b"%bx-request-id: %%b\r\nx-laya-route: %b\r\nx-laya-backend: %b\r\n%b" % (
            JSON_LINE, _escaped(self.route), _escaped(self.target), HIT_LINE,
        )  # fmt: skip
        return made

    def _named(self, peer: str) -> bytes:
        if len(self._who) >= MOST_CLIENTS:
            self._who.clear()
        plan = self._plan
        made = self._who[peer] = who(
            plan.client or peer, self._method, plan.path[:256], plan.api, self.route, self.target, self.model[:128]
        )
        return made


def _escaped(name: str) -> bytes:
    return header_value(name).replace(b"%", b"%%")


class KnownBodies:
    """By the head's plan, then by the body. Plans of an earlier configuration are never asked for again."""

    def __init__(self) -> None:
        self._by_plan: dict[Any, dict[bytes, Known]] = {}
        self._bytes = 0

    def get(self, plan, body: bytes) -> Known | None:
        of_head = self._by_plan.get(plan)
        return of_head.get(body) if of_head is not None and len(body) <= LONGEST else None

    def add(self, plan, body: bytes, known: Known) -> None:
        if len(body) > LONGEST:
            return
        self._bytes += len(body) + ENTRY_BYTES
        if self._bytes > MOST_BYTES or (len(self._by_plan) >= MOST_PLANS and plan not in self._by_plan):
            self.forget()
            self._bytes = len(body) + ENTRY_BYTES
        self._by_plan.setdefault(plan, {})[body] = known

    def forget(self) -> None:
        self._by_plan.clear()
        self._bytes = 0
