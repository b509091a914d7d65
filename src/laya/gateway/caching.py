"""The result cache on a request's way: answered from it, joined to a twin's generation, or sent on to fill it.

In: a request of a route with a cache, its target chosen. Out: its answer; or the connection on which it goes on, a `Flight`
that fills the cache. Reading a large request and making a large answer go through the preparation worker. Loop thread only.
"""

from __future__ import annotations

from laya.errors import LayaError, Unavailable
from laya.gateway.cached import CachedExchange
from laya.gateway.exchange import JSON_LINE
from laya.gateway.flight import Flight, events_of
from laya.gateway.known import Known, KnownBodies
from laya.gateway.local import SSE_LINES
from laya.gateway.staged import UNREAD, Staged
from laya.routing.sessions.hot import HotTable
from laya.schema.fields import RoutingFields
from laya.stages.cache import Kept, ResultCache
from laya.stages.cache_key import Question, read_question
from laya.stages.replay import from_plain, from_stream, told_as_stream

# Reading a body and writing it twice, or telling an answer again, costs about 10 ns a byte: this much is 0.3 ms.
WORK_ON_LOOP = 32 * 1024
# Bodies whose question is remembered: a repeated one, which is what a cache is for, is not read again. A megabyte at most.
MET, MET_BYTES = 256, 2048


class Caching:
    """`settings` are those of `stages.cache`."""

    def __init__(self, gateway, settings) -> None:
        self.cache = ResultCache(HotTable(settings.max_bytes), max_bytes=settings.max_bytes, ttl_s=settings.ttl_s)
        self._gateway = gateway
        self._any_temperature = settings.any_temperature
        self._flights: dict[tuple, Flight] = {}
        self._read: dict[tuple, Question | None] = {}  # by body and all else that the question depends on
        self._known = KnownBodies()

    def knows(self, plan, body: bytes) -> bool:
        """The same bytes came before, and their answer was kept then."""
        return self._known.get(plan, body) is not None

    def answers(self, connection, request, body: bytes, plan) -> bool:
        """Whether the request was answered at once: the same bytes came before, and their answer is kept. `connection` is the
        client's own, or the `Staged` of a key's request."""
        known = self._known.get(plan, body)
        if known is None:
            return False
        kept = self.cache.find(known.question, self._gateway.now())
        if kept is None:
            return False
        self.cache.hits += 1
        if not (connection.staged or plan.asks or known.question.stream):
            known.answer(self._gateway, connection, kept)
            return True
        staged = connection if connection.staged else self._gateway.staging.between(connection, request, body, plan)
        self._tell(self._cached(staged, request, body, plan, known), known.question, kept)
        return True

    def forget_known(self) -> None:
        """The rules by which requests were routed hold no longer."""
        self._known.forget()

    def enter(self, staged: Staged, request, body: bytes, plan, fields: RoutingFields, name: str, route, candidates: list, way):
        """(connection, body, fields) to go on with. None: it was answered, waits for a twin, or comes again when it is read."""
        target = candidates[0]
        if staged.question is UNREAD:
            key = plan.key
            asked = (
                body, plan.api, key.name if key is not None else "", plan.path, request.query, target.name,
                target.model or name, request.fields.get(b"cache-control"),
            )  # fmt: skip
            if len(body) > WORK_ON_LOOP:
                self._read_in_worker(staged, asked, (staged, request, body, plan, fields, name, route, candidates, way))
                return None
            staged.question = self._question(asked) if len(body) > MET_BYTES else self._question_met(asked)
        question = staged.question
        if question is None:
            staged.cached_as("bypass")
            return staged, body, fields
        known = Known(question, name, route.name, target.name, plan, request.method)
        if self._is_there(staged, request, body, plan, known):
            if way is None and self._comes_so_again(staged, request, body, plan, route):
                self._known.add(plan, body, known)
            return None
        self.cache.misses += 1
        staged.cached_as("miss")
        staged.exchange = flight = self._flight(staged, question, plan.api, target.name)
        return flight, question.body, RoutingFields(fields.model, fields.stream, question.body, None)

    # -- reading -------------------------------------------------------------------------------------------------------

    def _question_met(self, asked: tuple) -> Question | None:
        """Of a short body: to look up a long one takes a millisecond for a megabyte."""
        question = self._read.get(asked, UNREAD)
        if question is UNREAD:
            question = self._question(asked)
            if len(self._read) >= MET:
                self._read.clear()
            self._read[asked] = question
        return question

    def _question(self, asked: tuple) -> Question | None:
        """Any thread."""
        body, api, tenant, path, query, target, model, control = asked
        scope = (tenant, path.decode("latin-1"), query.decode("latin-1"), target, model)
        return read_question(body, api, scope, control, self._any_temperature)

    def _read_in_worker(self, staged: Staged, asked: tuple, again: tuple) -> None:
        gateway, (_, request, body, plan, *_rest) = self._gateway, again

        def then(question: Question | None) -> None:
            staged.question = question
            gateway.dispatch(*again)

        gateway.park(staged, request, body, plan, lambda: self._question(asked), then)

    # -- answers that are there, or on their way -------------------------------------------------------------------------

    def _comes_so_again(self, staged: Staged, request, body: bytes, plan, route) -> bool:
        """The same bytes under the same plan come here again with the same target."""
        return (
            request.memo.kept and staged.body is body
            and not (plan.coded or route.redact or self._gateway.staging.customs)
            and len(route.state.own.candidates) == 1
        )  # fmt: skip

    def _is_there(self, staged: Staged, request, body: bytes, plan, known: Known) -> bool:
        """Whether it is answered without a generation of its own."""
        question = known.question
        kept = self.cache.find(question, self._gateway.now())
        twin = self._flights.get(_form(question)) if kept is None and question.max_age else None
        if kept is None and (twin is None or not twin.takes_more):
            return False
        self.cache.hits += 1
        exchange = self._cached(staged, request, body, plan, known)
        if kept is None:
            twin.join(exchange)
        else:
            self._tell(exchange, question, kept)
        return True

    def _cached(self, staged: Staged, request, body: bytes, plan, known: Known) -> CachedExchange:
        staged.cached_as("hit")
        exchange = CachedExchange(self._gateway, staged, request, body, plan, known.model, known.route, known.target)
        staged.exchange = exchange
        return exchange

    def _tell(self, exchange: CachedExchange, question: Question, kept: Kept) -> None:
        """A kept answer in the form asked for."""
        api, body = exchange.plan.api, kept.body
        if not question.stream:
            exchange.answer(200, JSON_LINE, body, "ok")
        elif len(body) <= WORK_ON_LOOP:
            exchange.tell(SSE_LINES, told_as_stream(api, body, question.wants_count))
        else:
            self._gateway.offload(
                lambda: told_as_stream(api, body, question.wants_count), lambda data: exchange.tell(SSE_LINES, data)
            )

    # -- filling -------------------------------------------------------------------------------------------------------

    def _flight(self, staged: Staged, question: Question, api: str, target: str) -> Flight:
        flight = Flight(staged, self.cache.largest, lambda flight, data: self._landed(flight, data, question, api, target))
        if question.max_age:
            self._flights[_form(question)] = flight
        return flight

    def _landed(self, flight: Flight, data: bytes | None, question: Question, api: str, target: str) -> None:
        form = _form(question)
        if self._flights.get(form) is flight:
            del self._flights[form]
        exchange = flight.exchange
        if data is None or exchange is None or exchange.backend != target:
            return  # another target's answer is no answer to this question
        streamed, tokens = flight.streamed, exchange.tokens
        if len(data) <= WORK_ON_LOOP:
            self._keep(question, _kept_of(api, data, streamed, tokens, question))
            return
        try:
            self._gateway.offload(
                lambda: _kept_of(api, data, streamed, tokens, question), lambda kept: self._keep(question, kept)
            )
        except Unavailable:
            pass  # the worker is busy: the answer is not kept

    def _keep(self, question: Question, kept: Kept | LayaError | None) -> None:
        if isinstance(kept, Kept):
            self.cache.keep(question, kept, self._gateway.now())


def _form(question: Question) -> tuple:
    """Twins ask the same in the same form."""
    return question.key, question.stream, question.wants_count


def _kept_of(api: str, data: bytes, streamed: bool, tokens: tuple[int, int] | None, question: Question) -> Kept | None:
    """What is kept of a whole answer. Any thread."""
    if streamed:
        try:
            found = from_stream(api, events_of(data), tokens, question)
        except LayaError:  # an event too long to be read
            return None
        return None if found is None else Kept(*found)
    body = from_plain(api, data, question)
    return None if body is None else Kept(body, True)
