"""Routing that needs more of a request than its model name: classes, sessions, shared prefixes, overrides, fallbacks.

In: a request of a route that `Selection` does not settle by itself. Out: `Gateway.dispatch` with the targets, best first, at
once or when the session table has answered; meanwhile a plain exchange holds the client's place. Loop thread only.
"""

from __future__ import annotations

from typing import Any

from laya.errors import ContextLengthExceeded, LayaError
from laya.gateway.exchange import Exchange
from laya.gateway.facts import prompt_bytes, read_facts
from laya.gateway.offers import PICKED, offering
from laya.gateway.selection import Group
from laya.routing.classify import Decision
from laya.routing.prefix import PrefixTable
from laya.routing.sessions.store import SessionStore, session_key
from laya.routing.table import Route
from laya.schema.fields import READ_ON_LOOP, RoutingFields


class Way:
    """One request while its targets are being found, and what its exchange must know of that."""

    __slots__ = (
        "connection", "request", "body", "plan", "fields", "name", "route", "session", "note", "rule", "why", "tokens",
        "parked",
    )  # fmt: skip

    def __init__(self, connection, request, body: bytes, plan, fields: RoutingFields, name: str, route: Route) -> None:
        self.connection = connection
        self.request = request
        self.body = body
        self.plan = plan
        self.fields = fields
        self.name = name
        self.route = route
        self.session: bytes | None = None
        self.note = ""  # what x-laya-route and the log say beside the route's name
        self.rule = ""  # label of the decision's metric; "" for none
        self.why = ""
        self.tokens = 0  # of the prompt, estimated where the route asks for it
        self.parked: Exchange | None = None  # what holds the client's place meanwhile

    def tell(self, exchange) -> None:
        """What the exchange must know of how its targets were found."""
        exchange.session = self.session
        exchange.note = self.note
        if self.parked is not None:
            exchange.began, exchange.request_id = self.parked.began, self.parked.request_id
        if self.rule and exchange.gateway.log.info_on:
            exchange.gateway.log.event(
                "info", "decision", id=exchange.request_id.decode("latin-1"), route=self.route.name, rule=self.rule,
                why=self.why, backend=exchange.targets[0].name,
            )  # fmt: skip


class Steering:
    def __init__(self, gateway, sessions: SessionStore) -> None:
        self.decisions: dict[tuple[str, str, str], int] = {}  # route, rule, target -> requests
        self._gateway = gateway
        self._sessions = sessions
        self._prefixes = PrefixTable()

    def steer(self, way: Way) -> None:
        """Raises LayaError for what can be said at once."""
        gateway, route = self._gateway, way.route
        if way.plan.target is not None:
            way.note, way.rule, way.why = "; target", "override", "x-laya-target"
            self._send(way, [gateway.selection.override(route, way.plan)])
        elif not route.reads_prompts:
            self._pick(way, gateway.selection.group(route, None))
        elif len(way.body) > READ_ON_LOOP // 4:  # decoding every message costs several times what skipping them does
            self._park(way)
            gateway.offload(lambda: _decide(way), lambda decision: self._resume(way, self._decided, decision))
        else:
            self._decided(way, _decide(way))

    # -- which group of targets ----------------------------------------------------------------------------------------

    def _decided(self, way: Way, found: tuple[int, Decision | None] | LayaError) -> None:
        if isinstance(found, LayaError):
            raise found
        way.tokens, decision = found
        if decision is not None:
            way.rule = "otherwise" if decision.rule < 0 else str(decision.rule + 1)
            way.why = decision.reason
            way.note = f"; rule={way.rule}; why={decision.reason}"
        self._pick(way, self._gateway.selection.group(way.route, None if decision is None else decision.rule))

    def _pick(self, way: Way, group: Group) -> None:
        if len(group.candidates) > 1:
            if way.route.policy == "session":
                self._by_session(way, group)
                return
            if way.route.policy == "prefix":
                self._by_prefix(way, group)
                return
        self._send(way, self._ordered(way, group, None))

    # -- affinity ------------------------------------------------------------------------------------------------------

    def _by_session(self, way: Way, group: Group) -> None:
        session = way.plan.session
        if session is None:
            text = way.fields.text("prompt_cache_key")
            session = text.encode("utf-8", "surrogatepass") if text else None
        if session is None:
            self._send(way, self._ordered(way, group, None))
            return
        key = way.plan.key
        way.session = session_key(key.name if key is not None else "", way.route.name, session)
        known = self._sessions.find(way.session)
        if known is None and self._sessions.may_fetch():
            self._park(way)
            self._sessions.fetch(
                way.session, lambda target, in_time: self._resume(way, self._with_session, group, target, in_time)
            )
        else:
            self._with_session(way, group, known, True)

    def _with_session(self, way: Way, group: Group, known: str | None, in_time: bool) -> None:
        candidates = self._ordered(way, group, known)
        if not in_time:
            way.session = None  # what the table has is not known: nothing is recorded over it
        elif not self._sessions.assign(way.session, candidates[0].name, lambda: self._resume(way, self._send, candidates)):
            self._park(way)
            return
        self._send(way, candidates)

    def _by_prefix(self, way: Way, group: Group) -> None:
        marks = PrefixTable.marks(way.route.name, prompt_bytes(way.fields))
        known = self._prefixes.find(marks)
        candidates = self._ordered(way, group, known)
        chosen = candidates[0].name
        if known is None or chosen == known or self._gateway.selection.usable(group, known):
            self._prefixes.assign(marks, chosen)
        else:
            self._prefixes.move(marks, chosen)
        self._send(way, candidates)

    def _ordered(self, way: Way, group: Group, preferred: str | None) -> list:
        candidates = self._gateway.selection.ordered(way.route, group, preferred, way.plan.key)
        if way.plan.api in PICKED:
            candidates = offering(self._gateway, way.plan.api, way.name, candidates)
        return _with_room(candidates, way.tokens) if way.tokens else candidates

    # -- on its way ----------------------------------------------------------------------------------------------------

    def _send(self, way: Way, candidates: list) -> None:
        if way.rule:
            key = (way.route.name, way.rule, candidates[0].name)
            self.decisions[key] = self.decisions.get(key, 0) + 1
        self._gateway.dispatch(
            way.connection, way.request, way.body, way.plan, way.fields, way.name, way.route, candidates, way
        )

    def _park(self, way: Way) -> None:
        """Hold the client's place: it can leave, and the request must not be answered after that."""
        if way.parked is None:
            way.parked = way.connection.exchange = Exchange(self._gateway, way.connection, way.request, way.body, way.plan)

    def _resume(self, way: Way, step, *arguments: Any) -> None:
        """Go on after waiting. An assignment answered at once has not parked yet and goes on by itself."""
        if way.parked is not None and way.connection.exchange is way.parked:
            self._gateway.guarded(way, step, *arguments)


def _decide(way: Way) -> tuple[int, Decision | None]:
    """The prompt's estimated tokens, and what the route's classes say."""
    facts, message = read_facts(way.fields)
    return facts.prompt_tokens, way.route.classify.decide(message, facts) if way.route.classify else None


def _with_room(candidates: list, tokens: int) -> list:
    """Those whose route takes so long a prompt. Engines count for themselves; for other backends the estimate must do."""
    fitting = [
        c for c in candidates if c.counts or c.max_prompt_tokens is None or tokens <= c.max_prompt_tokens
    ]  # fmt: skip
    if not fitting:
        limit = max(c.max_prompt_tokens for c in candidates)
        raise ContextLengthExceeded(
            f"Prompts are limited to {limit} tokens here, however the prompt is about {tokens} tokens.", param="messages"
        )
    return fitting
